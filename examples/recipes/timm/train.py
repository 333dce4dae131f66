"""A vision transformer of timm in a loop over deepspeed.initialize.

bash examples/recipes/timm/run.sh
"""

from __future__ import annotations

import sys
from pathlib import Path

import deepspeed
import timm
import torch
from timm.optim import param_groups_weight_decay

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import material


def main() -> None:
    parser = material.arguments("out/recipes/timm")
    parser.add_argument("--local_rank", type=int, default=-1)
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=32,
        patch_size=8,
        embed_dim=64,
        depth=2,
        num_heads=4,
        num_classes=10,
    )
    # timm's groups: no decay for biases, norms and the position embedding.
    groups = param_groups_weight_decay(
        model, weight_decay=0.05, no_weight_decay_list=model.no_weight_decay()
    )
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=groups)
    pixels, labels = material.images(4096, seed=1)
    losses = material.Losses(engine, args)
    while len(losses.values) < args.max_steps:
        draw = torch.Generator().manual_seed(1000 * len(losses.values) + engine.global_rank)
        chosen = torch.randint(len(pixels), (16,), generator=draw)
        logits = engine(pixels[chosen].to(engine.device))
        loss = torch.nn.functional.cross_entropy(logits, labels[chosen].to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.add(loss)
    losses.end()


if __name__ == "__main__":
    main()
