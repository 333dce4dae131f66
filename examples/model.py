"""A small GPT over bytes: rotary attention, RMSNorm, SwiGLU, no biases.

Letters in shapes: B sequences, T positions, C width, H heads, D width of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256
"""Every byte is a token."""

ROTARY_BASE = 10_000.0


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Shape of the model.

    Raises:
        ValueError: the width does not split into heads of an even width.
    """

    layers: int = 4
    width: int = 256
    heads: int = 4
    context: int = 256
    tie_embeddings: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.layers, self.width, self.heads, self.context) < 1:
            raise ValueError(f"layers, width, heads and context must be at least 1, got {self}")
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width must be a multiple of 2 * heads = {2 * self.heads}, got {self.width}"
            )

    @property
    def mlp_width(self) -> int:
        """8/3 of the width, rounded up to 64: three such matrices cost as much as two of 4 times
        the width."""
        return -(-8 * self.width // (3 * 64)) * 64


def rotary_angles(length: int, head_width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, ``(T, D / 2)`` float32 each.

    They are computed in every forward pass, not kept in a buffer: a 16-bit engine would round a
    buffer to 16 bits.
    """
    frequencies = ROTARY_BASE ** -(torch.arange(0, head_width, 2, device=device) / head_width)
    angles = torch.outer(torch.arange(length, device=device), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + D/2) of ``x``, ``(B, H, T, D)``, by its position's angle; the dtype
    stays.
    """
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal attention with rotary positions. It has four matrices instead of a fused one, so that
    each is a matrix of its own for Muon."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(config.width, config.width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, T, D)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """A SwiGLU network."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.mlp_width, bias=False)
        self.up_proj = nn.Linear(config.width, config.mlp_width, bias=False)
        self.down_proj = nn.Linear(config.mlp_width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and MLP, each after a norm and beside a residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """A model that takes bytes, and returns logits of the next byte, or with targets the loss.

    ``embed`` and ``lm_head`` have names that make stock DeepSpeed's Muon, which goes by names,
    leave them to AdamW.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.lm_head = nn.Linear(config.width, VOCABULARY, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed.weight
        self._init_weights()

    def _init_weights(self) -> None:
        """Draw normal weights from a generator of its own: the same on every rank, whatever was
        drawn before."""
        generator = torch.Generator().manual_seed(self.config.seed)
        for name, param in self.named_parameters():
            if param.ndim < 2:
                continue
            std = 0.02 if name.startswith(("embed", "lm_head")) else param.shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std /= math.sqrt(
                    2 * self.config.layers
                )  # 2 * layers branches add up in the residual
            nn.init.normal_(param, std=std, generator=generator)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits ``(B, T, 256)``, or with ``targets`` the mean cross-entropy in nats, both
        float32."""
        cos, sin = rotary_angles(
            tokens.shape[1], self.config.width // self.config.heads, tokens.device
        )
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.lm_head(self.norm(x)).float()
        return (
            logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        )
