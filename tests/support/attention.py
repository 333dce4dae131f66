"""Small models of transformers with attention of every kind, their logits by the plain formula, and a plain QK-clip."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.support.reference import whole_number_loss

HEADS, WIDTH, VOCAB, LENGTH = 4, 8, 32, 9

_LLAMA = {"hidden_size": HEADS * WIDTH, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": VOCAB,
          "num_attention_heads": HEADS}
_MLA = {**_LLAMA, "num_key_value_heads": HEADS, "first_k_dense_replace": 2, "kv_lora_rank": 12, "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4, "v_head_dim": 5}

#: The model type and its config, by the kind of its attention.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "separate": ("llama", {**_LLAMA, "num_key_value_heads": HEADS}),
    "grouped, with biases": ("llama", {**_LLAMA, "num_key_value_heads": 2, "attention_bias": True}),
    "sliding": ("mistral", {**_LLAMA, "num_key_value_heads": 1, "sliding_window": 3, "head_dim": WIDTH}),
    "fused, transposed": ("gpt2", {"n_embd": HEADS * WIDTH, "n_head": HEADS, "n_layer": 2, "n_positions": LENGTH,
                                   "vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0,
                                   "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "fused, grouped": ("phi3", {**_LLAMA, "num_key_value_heads": 2, "pad_token_id": 0}),
    "fused by head": ("gpt_neox", {**_LLAMA, "rotary_pct": 0.5}),
    "latent": ("deepseek_v3", {**_MLA, "q_lora_rank": 10}),
    "latent, queries direct": ("deepseek_v3", {**_MLA, "q_lora_rank": None}),
}


def entry_of(kind: str, name: str = "*") -> dict[str, Any]:
    """Return the entry of ``layerwise.qk_clip.attention`` for the attention modules of a kind of :data:`KINDS`."""
    model_type, values = KINDS[kind]
    entry = {"name": f"{name}.self_attn", "heads": HEADS, "kv_heads": values.get("num_key_value_heads")}
    of_type: dict[str, dict[str, Any]] = {
        "gpt2": {"name": f"{name}.attn", "qkv": "c_attn"},
        "phi3": {"qkv": "qkv_proj"},
        "gpt_neox": {"name": f"{name}.attention", "qkv": "query_key_value", "by_head": True},
        "deepseek_v3": {"q": "q_b_proj" if values.get("q_lora_rank") else "q_proj", "k": "kv_b_proj", "rotated": 4,
                        "values": 5}}
    return {**entry, **of_type.get(model_type, {"q": "q_proj", "k": "k_proj"})}


def model_of(kind: str, *, attention: str = "sdpa", large: float = 3.0) -> nn.Module:
    """Return a model of a kind of :data:`KINDS`. Its weights depend on nothing but ``large``, which multiplies them."""
    model_type, values = KINDS[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model: nn.Module = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**values),
                                                            attn_implementation=attention)
        with torch.no_grad():
            for name, param in model.named_parameters():
                # Only biases and norms start with equal elements.
                gain = 1.0 if param.dim() == 1 and name.endswith("weight") else 0.0
                param.copy_(gain + torch.randn(param.shape) * (0.1 * large if param.dim() > 1 else 0.3))
    return model


def tokens_of(place: tuple[int, int, int], batch: int = 2) -> Tensor:
    """Return tokens of the shape (batch, LENGTH), different for every (step, micro-batch, rank)."""
    step, micro, rank = place
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    return torch.randint(0, VOCAB, (batch, LENGTH), generator=generator)


class Attends(nn.Module):
    """A model that attends to tokens, and whose gradients are whole numbers that have nothing to do with them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def config(self) -> Any:
        """The config of the model."""
        return self.model.config

    def forward(self, place: tuple[int, int, int]) -> Tensor:
        """Return the loss."""
        with torch.no_grad():
            self.model(input_ids=tokens_of(place))
        return whole_number_loss(self, place)


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the attention modules by their paths."""
    return {path: module for path, module in model.named_modules() if type(module).__name__.endswith("Attention")}


@contextmanager
def plain_logits(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Note the logits that count, as whole matrices by module and forward pass, while ``model`` attends eagerly."""
    paths = {module: path for path, module in attention_modules(model).items()}
    logits_of: dict[str, list[Tensor]] = {path: [] for path in paths.values()}
    file = importlib.import_module(next(iter(paths)).__module__)
    before = file.eager_attention_forward

    def noting(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        many = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        logits = query @ many.transpose(-1, -2) * kwargs["scaling"]
        logits_of[paths[module]].append(logits if mask is None else torch.where(mask == 0, logits, -math.inf))
        return before(module, query, key, value, mask, **kwargs)

    file.eager_attention_forward = noting  # type: ignore[attr-defined]
    try:
        yield logits_of
    finally:
        file.eager_attention_forward = before  # type: ignore[attr-defined]


def largest_by_head(logits_of: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
    """Return the largest logit of each head over all forward passes, of the shape (heads,), by module."""
    return {path: torch.stack([logits.amax((0, 2, 3)) for logits in each]).amax(0) for path, each in logits_of.items()}


def clip_plainly(kind: str, params: Mapping[str, Tensor], path: str, largest: Tensor, threshold: float,
                 alpha: float) -> None:
    """Scale the rows that give queries and keys of the module at ``path``, head by head."""
    values = KINDS[kind][1]
    kv_heads = values.get("num_key_value_heads", HEADS)
    for head in range(HEADS):
        first = head // (HEADS // kv_heads) * (HEADS // kv_heads)
        s = float(largest[first:first + HEADS // kv_heads].max())
        eta = min(1.0, threshold / s) if s > 0 else 1.0
        own = head == first
        for layer, rows, power in _rows(kind, head, first // (HEADS // kv_heads), kv_heads, alpha, own):
            weight = params[f"{path}.{layer}.weight"]
            columns = kind == "fused, transposed"
            (weight[:, rows] if columns else weight[rows]).mul_(eta ** power)
            if (bias := params.get(f"{path}.{layer}.bias")) is not None:
                bias[rows].mul_(eta ** power)


def _rows(kind: str, head: int, kv: int, kv_heads: int, alpha: float, own: bool) -> Iterator[tuple[str, slice, float]]:
    """Yield layer, outputs and power for the queries of one head, and for its keys if it is the first that has them."""
    w, keys, qkv = WIDTH, 1 - alpha, {"gpt2": "c_attn", "phi3": "qkv_proj", "gpt_neox": "query_key_value"}
    model_type, values = KINDS[kind]
    if model_type in ("llama", "mistral"):
        yield "q_proj", slice(head * w, head * w + w), alpha
        if own:
            yield "k_proj", slice(kv * w, kv * w + w), keys
    elif model_type == "deepseek_v3":
        q = "q_b_proj" if values["q_lora_rank"] else "q_proj"
        yield q, slice(head * 10, head * 10 + 6), alpha
        yield q, slice(head * 10 + 6, head * 10 + 10), 1.0
        yield "kv_b_proj", slice(head * 11, head * 11 + 6), keys
    elif model_type == "gpt_neox":
        yield qkv[model_type], slice(head * 3 * w, head * 3 * w + w), alpha
        yield qkv[model_type], slice(head * 3 * w + w, head * 3 * w + 2 * w), keys
    else:
        yield qkv[model_type], slice(head * w, head * w + w), alpha
        if own:
            yield qkv[model_type], slice((HEADS + kv) * w, (HEADS + kv) * w + w), keys
