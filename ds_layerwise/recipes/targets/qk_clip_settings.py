"""QK-clip: weights of queries and keys are scaled down where they made attention logits too large.

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

#: What outputs of a layer are: queries, their part that is rotated where keys share theirs, keys,
#: or something else.
Role = Literal["query", "rotated", "key", "other"]


@dataclass(frozen=True, slots=True)
class Run:
    """Outputs of one kind that lie one after the other: ``heads`` times ``width``."""

    role: Role
    heads: int
    width: int


@dataclass(frozen=True, slots=True)
class Outputs:
    """What the outputs of a layer are, in their order: ``groups`` times ``runs``."""

    runs: tuple[Run, ...]
    groups: int = 1

    @property
    def length(self) -> int:
        """How many there are."""
        return self.groups * sum(run.heads * run.width for run in self.runs)

    def heads(self) -> tuple[tuple[Role, int, int], ...]:
        """The outputs as (role, which head of that role, how many outputs), in their order."""
        return tuple(
            (run.role, group * run.heads + head, run.width)
            for group in range(self.groups)
            for run in self.runs
            for head in range(run.heads)
        )


def power_of(role: Role, alpha: float) -> float:
    """The power of eta that outputs are multiplied with."""
    return {"query": alpha, "rotated": 1.0, "key": 1 - alpha, "other": 0.0}[role]


class AttentionEntry(Section):
    """One entry of ``layerwise.qk_clip.attention``: where an attention module has its queries and
    keys.
    """

    name: Annotated[str, Field(min_length=1)]
    """A glob over the paths of modules."""
    heads: Count
    """Of queries."""
    kv_heads: Annotated[Count | None, OR_NULL] = None
    """Of keys; None for as many."""
    q: Annotated[str | None, OR_NULL] = None
    """The path, from the module, of the layer that gives queries, or of its weight."""
    k: Annotated[str | None, OR_NULL] = None
    """The layer that gives keys."""
    qkv: Annotated[str | None, OR_NULL] = None
    """In place of the two, a layer that gives queries, keys and values."""
    by_head: bool = False
    """Whether ``qkv`` gives queries, keys and values head by head (of keys), and not all queries
    first.
    """
    rotated: Annotated[Count | None, OR_NULL] = None
    """How many outputs at the end of each head of ``q`` meet keys that all heads share."""
    values: Annotated[Count | None, OR_NULL] = None
    """How many outputs at the end of each head of ``k`` are values."""

    def check_keys(self, where: str) -> None:
        """Refuse keys that contradict each other.

        Raises:
            ConfigError: names them; ``where`` is what a config calls the entry.
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

    threshold: Positive = 100.0
    """No head's largest logit of a step stays above this."""
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    """How much of it queries bear, and keys the rest."""
    hook: bool = True
    """Measure logits in the attention of transformers; false: they are given to
    ``note_attention_logits``.
    """
    attention: tuple[AttentionEntry, ...] = ()
    """Where attention is; empty: in the modules of transformers that are known."""

    @classmethod
    def from_section(cls, where: str, section: object) -> QkClip:
        """Parse what a config has under the name ``where``.

        Raises:
            ConfigError: names the key.
        """
        if not isinstance(section, Mapping):
            raise ConfigError(
                f'{where} must be an object like {{"threshold": 100}}, got {section!r}'
            )
        values = dict(section)
        if "attention" in values:
            values["attention"] = entries_of(_entry, f"{where}.attention", values["attention"])
        return build(cls, where, values)


def _entry(where: str, entry: object) -> AttentionEntry:
    if not isinstance(entry, Mapping):
        raise ConfigError(
            f'{where} must be an object like {{"name": "*.attn", "heads": 8, "qkv": "qkv"}}, '
            f"got {entry!r}"
        )
    for key in ("name", "heads"):
        if key not in entry:
            raise ConfigError(f"{where} has no {key}; add it")
    found = build(AttentionEntry, where, entry)
    found.check_keys(where)
    return found
