"""QK-clip: scales the weights of queries and keys down if they made attention logits too large.

Note: the rule
    Let s be the largest logit of a head over a step's batches. If eta = threshold / s is less than
    1, queries are scaled by eta^alpha and keys by eta^(1 - alpha), so the head's logits are scaled
    by eta. In Kimi K2 (arXiv 2507.20534, algorithm 1), alpha is 1/2. In multi-head latent attention
    it scales the rotated part of a query by eta itself, because all heads share the rotated part of
    the keys, which is not scaled. If several query heads share a key head, the largest logit of all
    of them counts for each, as in Megatron-LM (core/transformer/attention.py). Biases are scaled
    like their rows; otherwise logits would not be scaled by eta. The paper's model has no biases,
    and Megatron-LM does not scale them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ds_layerwise.errors import ConfigError
from ds_layerwise.recipes.base.fields import (
    Count,
    Name,
    OrNull,
    Positive,
    Section,
    Share,
    build,
    entries_of,
)

#: The kind of outputs of a layer: queries, the rotated part of queries whose keys share theirs,
#: keys, or something else.
Role = Literal["query", "rotated", "key", "other"]


@dataclass(frozen=True)
class Run:
    """Consecutive outputs of one kind: ``heads`` times ``width``."""

    role: Role
    heads: int
    width: int


@dataclass(frozen=True)
class Outputs:
    """The outputs of a layer in order: ``groups`` times ``runs``."""

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
    """Return the power of eta by which outputs are multiplied."""
    return {"query": alpha, "rotated": 1.0, "key": 1 - alpha, "other": 0.0}[role]


class AttentionEntry(Section):
    """An entry of ``layerwise.qk_clip.attention``: the queries and keys of an attention module."""

    example = '{"name": "*.attn", "heads": 8, "qkv": "qkv"}'

    name: Name
    """A glob over the paths of modules."""
    heads: Count
    """The number of query heads."""
    kv_heads: OrNull[Count] = None
    """The number of key heads; None if it equals ``heads``."""
    q: OrNull[str] = None
    """The path, relative to the module, of the layer that makes queries, or of its weight."""
    k: OrNull[str] = None
    """The path of the layer that makes keys."""
    qkv: OrNull[str] = None
    """The path of a layer that makes queries, keys and values, in place of the two."""
    by_head: bool = False
    """True if the outputs of ``qkv`` are grouped by key head; False if all queries come first."""
    rotated: OrNull[Count] = None
    """The number of outputs at the end of each head of ``q`` whose keys all heads share."""
    values: OrNull[Count] = None
    """The number of outputs at the end of each head of ``k`` that are values."""

    def check_keys(self, where: str) -> None:
        """Refuse keys that contradict each other.

        Raises:
            ConfigError: names them; ``where`` is the name of the entry in a config.
        """
        fused = self.qkv is not None
        if fused == (self.q is not None) or (self.q is None) != (self.k is None):
            raise ConfigError(
                f"{where} needs q and k, or only qkv, got q {self.q!r}, k {self.k!r}, qkv "
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
    """The bound for the largest logit of each head."""
    alpha: Share = 0.5
    """The share of the scaling that queries get; keys get the rest."""
    hook: bool = True
    """Measure logits in the attention of transformers; false if the script passes them to
    ``note_attention_logits``.
    """
    attention: tuple[AttentionEntry, ...] = ()
    """The attention modules; empty for the known modules of transformers."""

    @classmethod
    def from_section(cls, where: str, section: object) -> QkClip:
        """Parse the section that a config has under the name ``where``.

        Raises:
            ConfigError: names the key.
        """
        if isinstance(section, Mapping) and "attention" in section:
            entries = entries_of(_entry, f"{where}.attention", section["attention"])
            section = {**section, "attention": entries}
        return build(cls, where, section)


def _entry(where: str, values: object) -> AttentionEntry:
    entry = build(AttentionEntry, where, values)
    entry.check_keys(where)
    return entry
