"""A vision transformer of timm in a loop over deepspeed.initialize.

bash examples/recipes/timm/run.sh
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import deepspeed
import timm
import torch
from timm.optim import param_groups_weight_decay

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import material


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_steps", type=int, default=60)
    parser.add_argument("--output_dir", default="out/recipes/timm")
    parser.add_argument("--resume_from_checkpoint", help="a folder of checkpoints")
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
    losses: list[float] = []
    if args.resume_from_checkpoint:
        _, state = engine.load_checkpoint(args.resume_from_checkpoint)
        losses = state["losses"]
    while len(losses) < args.max_steps:
        draw = torch.Generator().manual_seed(1000 * len(losses) + engine.global_rank)
        chosen = torch.randint(len(pixels), (16,), generator=draw)
        logits = engine(pixels[chosen].to(engine.device))
        loss = torch.nn.functional.cross_entropy(logits, labels[chosen].to(engine.device))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / torch.distributed.get_world_size())
        if len(losses) == args.max_steps // 2:
            engine.save_checkpoint(
                f"{args.output_dir}/checkpoint-{len(losses)}", client_state={"losses": losses}
            )
    if engine.global_rank == 0:
        material.write_losses(args.output_dir, losses)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
