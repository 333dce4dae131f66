"""Fine-tuning a small model with AdamW, and with Muon at several scales of its update.

    python examples/recipes/material.py
    python examples/benchmarks/fine_tuning.py

It runs in one process, with torch's own AdamW and Muon ("match_rms_adamw") and no DeepSpeed: the
question is the size of the steps alone. It prints the mean loss of the last five steps.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.optim import Optimizer
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))
import material

BASE = "out/recipes/base"
LR = 2e-4
WARMUP = 5
FACTORS = (1, 5, 10)


def optimizers_of(model: nn.Module, factor: float | None) -> list[Optimizer]:
    """Return AdamW, and Muon with ``factor`` times its update for hidden matrices, unless that is
    None."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices = [
        p
        for name, p in trained.items()
        if p.dim() == 2 and "embed" not in name and "head" not in name
    ]
    if factor is None:
        return [torch.optim.AdamW(trained.values(), lr=LR, weight_decay=0.0)]
    rest = [p for p in trained.values() if all(p is not matrix for matrix in matrices)]
    muon = torch.optim.Muon(
        matrices, lr=factor * LR, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
    )
    return [muon, *([torch.optim.AdamW(rest, lr=LR, weight_decay=0.0)] if rest else [])]


def fine_tune(steps: int, lora: bool, factor: float | None) -> float:
    """Return the mean loss of the last five of ``steps`` steps."""
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    lines = [material.reversed_words(line) for line in material.sentences(512, seed=2)]
    tokens = tokenizer([line + "<eos>" for line in lines], padding=True, return_tensors="pt")
    ids, mask = tokens["input_ids"], tokens["attention_mask"]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(BASE)
    if lora:
        model = get_peft_model(
            model,
            LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
        )

    def schedule(step: int) -> float:
        done = max(0, step - WARMUP) / (steps - WARMUP)
        return min(1.0, step / WARMUP) * 0.5 * (1 + math.cos(math.pi * done))

    optimizers = optimizers_of(model, factor)
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, schedule) for optimizer in optimizers]
    draw = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        rows = torch.randint(len(ids), (16,), generator=draw)
        labels = ids[rows].masked_fill(mask[rows] == 0, -100)
        loss = model(input_ids=ids[rows], attention_mask=mask[rows], labels=labels).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, moving in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            moving.step()
        losses.append(loss.item())
    return sum(losses[-5:]) / 5


def main() -> None:
    print("| steps | trained | AdamW |" + "".join(f" factor {factor} |" for factor in FACTORS))
    print("|--:|---|--:|" + "--:|" * len(FACTORS))
    for steps in (40, 300):
        for lora in (False, True):
            ends = [fine_tune(steps, lora, factor) for factor in (None, *FACTORS)]
            trained = "LoRA, rank 8" if lora else "all"
            print(f"| {steps} | {trained} |" + "".join(f" {end:.2f} |" for end in ends), flush=True)


if __name__ == "__main__":
    main()
