"""QK-clip: scales weights of queries and keys down where they made attention logits too large.

Note: the rule
    Of a head whose largest logit over a step's batches is s, where threshold / s = eta is less than
    1, queries are scaled by eta^alpha and keys by eta^(1 - alpha), which scales the head's logits
    by eta. Kimi K2 (arXiv 2507.20534, algorithm 1) has alpha 1/2, and of multi-head latent
    attention scales the part of a query that is rotated by eta itself, because all heads share the
    rotated part of the keys, which stays. Where several heads of queries share keys, the largest
    logit of all of them counts for each, as in Megatron-LM (core/transformer/attention.py). Biases
    are scaled like the rows that they belong to, or logits would not come down by eta; the paper's
    model has none, and Megatron-LM leaves them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from ds_layerwise.errors import ConfigError
from ds_layerwise.recipes.base.fields import OR_NULL, Count, Positive, Section, build, entries_of

#: Kind of outputs of a layer: queries, their part that is rotated where keys share theirs, keys, or
#: something else.
Role = Literal["query", "rotated", "key", "other"]


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive outputs of one kind: ``heads`` times ``width``."""

    role: Role
    heads: int
    width: int


@dataclass(frozen=True, slots=True)
class Outputs:
    """The outputs of a layer in their order: ``groups`` times ``runs``."""

    runs: tuple[Run, ...]
    groups: int = 1

    @property
    def length(self) -> int:
        """The number of outputs."""
        return self.groups * sum(run.heads * run.width for run in self.runs)

    def heads(self) -> tuple[tuple[Role, int, int], ...]:
        """Return (role, index of the head of that role, number of outputs) in order."""
        heads = []
        for group in range(self.groups):
            for run in self.runs:
                for head in range(run.heads):
                    heads.append((run.role, group * run.heads + head, run.width))
        return tuple(heads)


def power_of(role: Role, alpha: float) -> float:
    """Return the power of eta that outputs are multiplied with."""
    return {"query": alpha, "rotated": 1.0, "key": 1 - alpha, "other": 0.0}[role]


class AttentionEntry(Section):
    """An entry of ``layerwise.qk_clip.attention``: the queries and keys of an attention module."""

    example = '{"name": "*.attn", "heads": 8, "qkv": "qkv"}'

    name: Annotated[str, Field(min_length=1)]
    """A glob over the paths of modules."""
    heads: Count
    """Heads of queries."""
    kv_heads: Annotated[Count | None, OR_NULL] = None
    """Heads of keys; None for as many."""
    q: Annotated[str | None, OR_NULL] = None
    """The path, from the module, of the layer that gives queries, or of its weight."""
    k: Annotated[str | None, OR_NULL] = None
    """The layer that gives keys."""
    qkv: Annotated[str | None, OR_NULL] = None
    """A layer that gives queries, keys and values, in place of the two."""
    by_head: bool = False
    """True if ``qkv`` gives queries, keys and values head by head (of keys), and not all queries
    first.
    """
    rotated: Annotated[Count | None, OR_NULL] = None
    """Outputs at the end of each head of ``q`` that meet keys that all heads share."""
    values: Annotated[Count | None, OR_NULL] = None
    """Outputs at the end of each head of ``k`` that are values."""

    def check_keys(self, where: str) -> None:
        """Refuse keys that contradict each other.

        Raises:
            ConfigError: names them; ``where`` is the name of the entry in a config.
        """
        fused = self.qkv is not None
        if fused == (self.q is not None) or (self.q is None) != (self.k is None):
            raise ConfigError(
                f"{where} needs q and k, or qkv alone, got q {self.q!r}, k {self.k!r}, qkv "
                f"{self.qkv!r}"
            )
        if self.by_head and not fused:
            raise ConfigError(f"{where}.by_head says how qkv lies, and there is none; leave it out")
        for key in ("rotated", "values"):
            if fused and getattr(self, key) is not None:
                raise ConfigError(
                    f"{where}.{key} is for q and k, and {where} has qkv; leave it out"
                )
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ConfigError(
                f"{where}.kv_heads is {self.kv_heads}, which does not divide heads, {self.heads}"
            )


class QkClip(Section):
    """``layerwise.qk_clip``: see the note on the rule."""

    example = '{"threshold": 100}'

    threshold: Positive = 100.0
    """No head's largest logit of a step stays above this."""
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    """The share that queries bear, and keys the rest."""
    hook: bool = True
    """Measure logits in the attention of transformers; false: they are given to
    ``note_attention_logits``.
    """
    attention: tuple[AttentionEntry, ...] = ()
    """Attention modules; empty: the modules of transformers that are known."""

    @classmethod
    def from_section(cls, where: str, section: object) -> QkClip:
        """Parse a section that a config has under the name ``where``.

        Raises:
            ConfigError: names the key.
        """
        if isinstance(section, Mapping) and "attention" in section:
            entries = entries_of(_entry, f"{where}.attention", section["attention"])
            section = {**section, "attention": entries}
        return build(cls, where, section)


def _entry(where: str, values: object) -> AttentionEntry:
    if isinstance(values, Mapping):
        for key in ("name", "heads"):
            if key not in values:
                raise ConfigError(f"{where} has no {key}; add it")
    entry = build(AttentionEntry, where, values)
    entry.check_keys(where)
    return entry
