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

from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers.fields import (
    Count,
    Name,
    OrNull,
    Positive,
    Section,
    Share,
    build,
    entries_of,
)


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

    @property
    def paths(self) -> list[str]:
        """The paths of its layers."""
        return list(filter(None, (self.q, self.k, self.qkv)))

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

    example = f'{{"threshold": 100, "attention": [{AttentionEntry.example}]}}'

    threshold: Positive = 100.0
    """The bound for the largest logit of each head."""
    alpha: Share = 0.5
    """The share of the scaling that queries get; keys get the rest."""
    attention: tuple[AttentionEntry, ...]
    """The attention modules."""

    @classmethod
    def from_section(cls, where: str, section: object) -> QkClip:
        """Parse the section that a config has under the name ``where``.

        Raises:
            ConfigError: names the key.
        """
        if isinstance(section, Mapping):
            if "hook" in section:
                raise ConfigError(
                    f"{where}.hook is no option any more: attention of transformers is measured, "
                    "and what note_attention_logits is given counts as well; remove it"
                )
            entries = entries_of(_entry, f"{where}.attention", section.get("attention", ()))
            if not entries:
                raise ConfigError(
                    f"{where}.attention has to say where queries and keys are, like "
                    f"[{AttentionEntry.example}]; docs/qk_clip.md has the entries for Llama, Qwen "
                    "and DeepSeek; or leave qk_clip out"
                )
            section = {**section, "attention": entries}
        return build(cls, where, section)


def _entry(where: str, values: object) -> AttentionEntry:
    entry = build(AttentionEntry, where, values)
    entry.check_keys(where)
    return entry
