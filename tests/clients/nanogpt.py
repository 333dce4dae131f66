"""nanoGPT's model in a plain loop over deepspeed.initialize. Started by run.py; its model.py is in $CLIENTS."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import deepspeed
import torch
from material import CONTEXT, write_figures

sys.path.insert(0, os.environ["CLIENTS"])
from nanogpt_model import GPT, GPTConfig

parser = argparse.ArgumentParser()
parser.add_argument("--material", type=Path, required=True)
parser.add_argument("--figures", required=True)
parser.add_argument("--out", required=True)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--local_rank", type=int, default=-1)
deepspeed.add_config_arguments(parser)
args = parser.parse_args()

torch.manual_seed(0)
model = GPT(GPTConfig(block_size=CONTEXT, vocab_size=256, n_layer=3, n_head=4, n_embd=64))
decayed = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=groups)
text = torch.tensor(list((args.material / "text.txt").read_bytes()))
draw = torch.Generator().manual_seed(100 + engine.global_rank)
losses = []
for _ in range(args.steps):
    for _ in range(engine.gradient_accumulation_steps()):
        starts = torch.randint(len(text) - CONTEXT - 1, (8,), generator=draw)
        window = torch.stack([text[s:s + CONTEXT + 1] for s in starts.tolist()]).to(engine.device)
        _, loss = engine(window[:, :-1], window[:, 1:].contiguous())
        engine.backward(loss)
        engine.step()
    mean = loss.detach().clone()
    torch.distributed.all_reduce(mean)
    losses.append(float(mean) / torch.distributed.get_world_size())
if engine.global_rank == 0:
    write_figures(args.figures, losses)
engine.destroy()
torch.distributed.destroy_process_group()
