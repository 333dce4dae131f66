"""Helpers for universal checkpoints: DeepSpeed's own writer and reader, and a model to train."""

from __future__ import annotations

import argparse
from pathlib import Path

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from tests.support.checkpoints import on_rank_0
from tests.support.models import TINY_GPT_MATRICES, tiny_gpt, token_loss
from tests.support.training import ds_config, start

#: The layout and the bucket size of each side of a resume; the world size is the index plus one.
LAYOUTS = [("balanced", 600), ("lpt", 10**9), ("size_matching", 600), ("balanced", 1)]


class WithLoss(torch.nn.Module):
    """A language model whose mean loss and gradient do not depend on how twelve sequences are dealt to ranks."""

    def __init__(self):
        super().__init__()
        self.inner = tiny_gpt(tied=True)
        # The count is beyond the whole numbers that float32 can hold.
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, step):
        g = torch.Generator().manual_seed(step)
        sequences = torch.randint(0, 24, (12, 9), generator=g).chunk(dist.get_world_size())[dist.get_rank()]
        return token_loss(self.inner, sequences)


#: Matrices of :class:`WithLoss`, by name.
MATRICES = {f"inner.{name}" for name in TINY_GPT_MATRICES}


def start_with_loss(*, layerwise=None, **changes):
    """Return an engine on this backend that trains :class:`WithLoss`, with the layout of this world size."""
    layout, bucket_numel = LAYOUTS[dist.get_world_size() - 1]
    return start(WithLoss(), ds_config(clip=1.0, bucket_numel=bucket_numel, params={"eps": 1e-8},
                                       layerwise={"layout": layout, **(layerwise or {})}, **changes))


def start_stock(stage, **changes):
    """Return DeepSpeed's own engine for :class:`WithLoss`: AdamW under ZeRO ``stage``."""
    module = WithLoss()
    config = ds_config(clip=1.0, bf16={"enabled": True}, **changes,
                       optimizer={"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}})
    del config["layerwise"]
    config["zero_optimization"]["stage"] = stage
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
    return engine


def train_with_loss(engine, first, last):
    """Train on steps ``first`` to ``last``; return their losses, averaged over ranks."""
    losses = []
    for step in range(first, last):
        loss = engine(step)
        losses.append(loss.detach().clone())
        engine.backward(loss)
        engine.step()
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def stock_states(engine):
    """Return masters (key ``fp32``) and moments by DeepSpeed's own interface, 1-D, by (parameter, state)."""
    states = {}
    for name, param in engine.module.named_parameters():
        states[name, "fp32"] = safe_get_full_fp32_param(param).flatten().clone()
        for key in ("exp_avg", "exp_avg_sq"):
            states[name, key] = safe_get_full_optimizer_state(param, key).flatten().clone()
    return states


def convert(saved, into, *, inject=False):
    """Run DeepSpeed's own ``ds_to_universal.py`` on the folder ``saved``; ``inject`` is ``--inject_missing_state``."""
    on_rank_0(lambda: ds_to_universal.main(converter_options(saved, into, inject=inject)))


def converter_options(saved, into, *, inject=False):
    return argparse.Namespace(input_folder=str(saved), output_folder=str(into), num_extract_workers=1,
                              num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=inject)


def write_dense(folder: Path, state_dict):
    """Write a universal checkpoint of weights alone, as anybody could from a ``state_dict`` of a dense model."""
    for name, value in state_dict.items():
        (folder / "zero" / name).mkdir(parents=True)
        torch.save({"param": value.float()}, folder / "zero" / name / "fp32.pt")
    # The engine asks for no other entries.
    torch.save({"dp_world_size": 1, "mp_world_size": 1, "global_steps": 0, "skipped_steps": 0},
               folder / "mp_rank_00_model_states.pt")
