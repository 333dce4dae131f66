"""nanoGPT's model, from a clone of it, on letters in a loop over deepspeed.initialize.

bash examples/recipes/nanogpt/run.sh
"""

from __future__ import annotations

import sys
from pathlib import Path

import deepspeed
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import material


def main() -> None:
    parser = material.arguments("out/recipes/nanogpt")
    parser.add_argument("--nanogpt", type=Path, default=Path("nanoGPT"), help="a clone of nanoGPT")
    parser.add_argument("--local_rank", type=int, default=-1)
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    if not (args.nanogpt / "model.py").is_file():
        parser.error(
            f"no model.py in {args.nanogpt}: git clone https://github.com/karpathy/nanoGPT"
        )
    sys.path.insert(0, str(args.nanogpt))
    from model import GPT, GPTConfig

    text = "\n".join(material.sentences(8192))
    letters = sorted(set(text))
    tokens = torch.tensor([letters.index(letter) for letter in text])
    torch.manual_seed(0)
    model = GPT(
        GPTConfig(
            block_size=material.CONTEXT,
            vocab_size=len(letters),
            n_layer=2,
            n_head=4,
            n_embd=64,
            dropout=0.0,
            bias=False,
        )
    )
    # nanoGPT's groups, which its configure_optimizers makes together with an AdamW.
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() >= 2]},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=groups)
    losses = material.Losses(engine, args)
    while len(losses.values) < args.max_steps:
        draw = torch.Generator().manual_seed(1000 * len(losses.values) + engine.global_rank)
        starts = torch.randint(len(tokens) - material.CONTEXT, (16,), generator=draw)
        window = starts[:, None] + torch.arange(material.CONTEXT + 1)
        batch = tokens[window].to(engine.device)
        _, loss = engine(batch[:, :-1], batch[:, 1:].contiguous())
        engine.backward(loss)
        engine.step()
        losses.add(loss)
    losses.end()


if __name__ == "__main__":
    main()
