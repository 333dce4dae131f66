"""Accelerate, with a placeholder for the config's optimizer or with an optimizer of the script's.

bash examples/recipes/accelerate/run.sh placeholder|own
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DummyOptim, InitProcessGroupKwargs
from deepspeed.accelerator import get_accelerator
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import material


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("optimizer", choices=("placeholder", "own"))
    parser.add_argument("--max_steps", type=int, default=60)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--output_dir", default="out/recipes/accelerate")
    parser.add_argument("--resume_from_checkpoint", help="a folder of save_state")
    args = parser.parse_args()

    # Accelerate must be told the backend on a CPU. On GPUs leave kwargs_handlers out.
    backend = InitProcessGroupKwargs(backend=get_accelerator().communication_backend_name())
    accelerator = Accelerator(kwargs_handlers=[backend])
    tokenizer = material.tokenizer_of()
    model = material.llama(tokenizer)
    if args.optimizer == "own":
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    else:
        optimizer = DummyOptim(model.parameters(), lr=args.learning_rate)
    loader = DataLoader(material.windows(tokenizer, 2048), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses: list[float] = []
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        losses = torch.load(Path(args.resume_from_checkpoint, "losses.pt"))
        loader = accelerator.skip_first_batches(loader, len(losses))
    for batch in loader:
        if len(losses) == args.max_steps:
            break
        loss = model(input_ids=batch, labels=batch).loss
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
