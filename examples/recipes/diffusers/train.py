"""A small UNet of diffusers that learns to tell noise from patterns, under Accelerate.

bash examples/recipes/diffusers/run.sh
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DummyOptim, InitProcessGroupKwargs
from deepspeed.accelerator import get_accelerator
from diffusers import DDPMScheduler, UNet2DModel
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import material


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_steps", type=int, default=60)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--output_dir", default="out/recipes/diffusers")
    parser.add_argument("--resume_from_checkpoint", help="a folder of save_state")
    args = parser.parse_args()

    backend = InitProcessGroupKwargs(backend=get_accelerator().communication_backend_name())
    accelerator = Accelerator(kwargs_handlers=[backend])
    torch.manual_seed(0)
    model = UNet2DModel(
        sample_size=16,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    )
    noises = DDPMScheduler(num_train_timesteps=100)
    pixels = torch.nn.functional.avg_pool2d(material.images(4096, seed=1)[0], 2)
    loader = DataLoader(pixels, batch_size=16)
    optimizer = DummyOptim(model.parameters(), lr=args.learning_rate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses: list[float] = []
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        losses = torch.load(Path(args.resume_from_checkpoint, "losses.pt"))
        loader = accelerator.skip_first_batches(loader, len(losses))
    for batch in loader:
        if len(losses) == args.max_steps:
            break
        draw = torch.Generator().manual_seed(1000 * len(losses) + accelerator.process_index)
        noise = torch.randn(batch.shape, generator=draw).to(batch.device)
        times = torch.randint(100, (len(batch),), generator=draw).to(batch.device)
        predicted = model(noises.add_noise(batch, noise, times), times).sample
        loss = torch.nn.functional.mse_loss(predicted, noise)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        if len(losses) == args.max_steps // 2:
            half = Path(args.output_dir, f"checkpoint-{len(losses)}")
            accelerator.save_state(str(half))
            if accelerator.is_main_process:
                torch.save(losses, half / "losses.pt")
    if accelerator.is_main_process:
        material.write_losses(args.output_dir, losses)
    accelerator.end_training()


if __name__ == "__main__":
    main()
