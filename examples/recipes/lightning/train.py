"""Lightning's DeepSpeedStrategy. Lightning starts the other ranks as this script, so it registers.

bash examples/recipes/lightning/run.sh
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch.utils.data import DataLoader

import ds_layerwise

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import material

ds_layerwise.register()


class Strategy(DeepSpeedStrategy):
    """Lightning's strategy without its refusal of CPUs; on GPUs take DeepSpeedStrategy itself."""

    def setup_environment(self) -> None:
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    @property
    def root_device(self) -> torch.device:
        device = super().root_device
        return torch.device("cpu", 0) if device.type == "cpu" else device


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = material.llama(material.tokenizer_of())
        self.losses: list[float] = []

    def training_step(self, batch, _):
        loss = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(float(self.all_gather(loss.detach()).mean()))
        return loss

    def on_save_checkpoint(self, checkpoint):
        checkpoint["losses"] = self.losses

    def on_load_checkpoint(self, checkpoint):
        self.losses = checkpoint["losses"]

    def configure_optimizers(self):
        return None  # the config has one


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed", type=Path, required=True)
    parser.add_argument("--max_steps", type=int, default=60)
    parser.add_argument("--output_dir", default="out/recipes/lightning")
    parser.add_argument("--resume_from_checkpoint", help="a folder that Lightning saved")
    args = parser.parse_args()
    on_cpu = os.environ.get("DS_ACCELERATOR") == "cpu"
    keep = ModelCheckpoint(
        args.output_dir, "checkpoint-{step}", every_n_train_steps=args.max_steps // 2, save_top_k=-1
    )
    trainer = lightning.Trainer(
        accelerator="cpu" if on_cpu else "gpu",
        devices=int(os.environ.get("RANKS", "2")),
        strategy=Strategy(config=json.loads(args.deepspeed.read_text())),
        max_steps=args.max_steps,
        callbacks=[keep],
        logger=False,
        enable_progress_bar=False,
        gradient_clip_val=1.0,
    )
    module = Module()
    # Two epochs: Lightning goes on from the end of an epoch, not from the middle of its data.
    rows = 16 * trainer.world_size * (args.max_steps // 2)
    data = DataLoader(material.windows(material.tokenizer_of(), rows), batch_size=16)
    trainer.fit(module, data, ckpt_path=args.resume_from_checkpoint)
    if trainer.is_global_zero:
        material.write_losses(args.output_dir, module.losses)


if __name__ == "__main__":
    main()
