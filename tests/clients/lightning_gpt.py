"""nanoGPT's model under Lightning's DeepSpeedStrategy. Started by run.py; nanoGPT's model.py is in $CLIENTS.

Lightning starts every rank but the first as this script, in any case. ``ds_layerwise.run`` does not reach these ranks,
so the script registers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from material import CONTEXT, write_figures
from torch.utils.data import DataLoader, TensorDataset

import ds_layerwise

sys.path.insert(0, os.environ["CLIENTS"])
from nanogpt_model import GPT, GPTConfig

parser = argparse.ArgumentParser()
parser.add_argument("--material", type=Path, required=True)
parser.add_argument("--figures", required=True)
parser.add_argument("--out", required=True)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--deepspeed", required=True)
args = parser.parse_args()


ds_layerwise.register()


class Strategy(DeepSpeedStrategy):
    """Lightning's strategy without its refusal of CPUs, which DeepSpeed does not share."""

    def setup_environment(self) -> None:
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    @property
    def root_device(self) -> torch.device:
        # DeepSpeed needs the device's index, which that of a CPU lacks.
        device = super().root_device
        return torch.device("cpu", 0) if device.type == "cpu" else device


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = GPT(GPTConfig(block_size=CONTEXT, vocab_size=256, n_layer=2, n_head=4, n_embd=64))
        self.losses: list[float] = []

    def training_step(self, batch, _):
        _, loss = self.model(batch[0][:, :-1], batch[0][:, 1:].contiguous())
        mean = self.all_gather(loss.detach()).mean()
        self.losses.append(float(mean))
        return loss

    def configure_optimizers(self):
        # Lightning makes the engine's optimizer from this where the config has none; the config of run.py has one.
        return None


text = torch.tensor(list((args.material / "text.txt").read_bytes()[:200_000]))
windows = TensorDataset(text[:len(text) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1))
trainer = lightning.Trainer(accelerator="cpu" if os.environ.get("DS_ACCELERATOR") == "cpu" else "gpu", devices=2,
                            strategy=Strategy(config=json.loads(Path(args.deepspeed).read_text())),
                            max_steps=args.steps, logger=False, enable_checkpointing=False, enable_progress_bar=False)
module = Module()
trainer.fit(module, DataLoader(windows, batch_size=8))
if trainer.is_global_zero:
    write_figures(args.figures, module.losses)
