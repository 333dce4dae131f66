"""Write the small checkpoints of tests/fixtures with the package of a checkout, a folder for each minor version.

    python tests/old_checkpoints.py --checkout CHECKOUT --out tests/fixtures/VERSION [NAME ...]

Two ranks train two steps, write known values into every master and state, and save them in each format that this
version has, or in those of NAME: ``saved``, ``inside`` (a step), ``saved_universal``, ``one_file.safetensors``,
``sharded``. tests/distributed/checkpoint/test_old_checkpoints.py loads all of them and compares values. The folder of a
version that is released is never written again.

Like tests/before_and_after.py it takes nothing from ``tests``, and of the package only ``ds_layerwise.initialize``, so
that it runs on checkouts that look different inside.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state
from torch import nn

NAMES = ["saved", "inside", "saved_universal", "one_file.safetensors", "sharded"]

#: The number of steps before a save, and of micro-batches in each.
STEPS, GAS = 2, 2

#: Keys of the states of each trained parameter, by its name.
STATES = {"embed.weight": ("exp_avg", "exp_avg_sq"), "matrix": ("momentum_buffer",),
          "vector": ("exp_avg", "exp_avg_sq")}

CLIENT_STATE = {"epoch": 3}
CONFIG = {
    "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": GAS, "steps_per_print": 10**9,
    "fp16": {"enabled": True, "initial_scale_power": 4}, "zero_optimization": {"stage": 1},
    "optimizer": {"type": "LayerWiseMuon", "params": {"lr": 0.004, "muon_lr": 0.02}},
    "scheduler": {"type": "WarmupLR", "params": {
        "warmup_min_lr": 0.0, "warmup_max_lr": 0.004, "warmup_num_steps": 4, "warmup_type": "linear"}}}


class Net(nn.Module):
    """A matrix under Muon, an embedding and a vector under AdamW, frozen weights and a buffer."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.matrix, self.vector = nn.Parameter(torch.empty(5, 4)), nn.Parameter(torch.empty(5))
        self.frozen = nn.Linear(3, 2, bias=False).requires_grad_(False)
        self.register_buffer("seen", torch.tensor([fill, 2 * fill]))
        with torch.no_grad():
            for param in self.parameters():
                param.fill_(fill)

    def forward(self, scale: float) -> torch.Tensor:
        return sum((param.float() * scale).square().mean() for param in self.parameters() if param.requires_grad)


def known(name: str, key: str, shape: torch.Size) -> torch.Tensor:
    """Return the values of a state, or of the weights for the key ``fp32``: different ones for each, exact in float16.
    """
    first = 40 * sorted(STATES).index(name) + 1000 * ("fp32", "momentum_buffer", "exp_avg", "exp_avg_sq").index(key)
    return (torch.arange(shape.numel(), dtype=torch.float32) + first).view(shape) / 64


def start(fill: float, **layerwise: object) -> deepspeed.DeepSpeedEngine:
    """Return an engine on this backend whose weights are ``fill``."""
    import ds_layerwise
    module = Net(fill)
    return ds_layerwise.initialize(model=module, model_parameters=module.parameters(),
                                   config={**CONFIG, "layerwise": layerwise})[0]


def train(engine: deepspeed.DeepSpeedEngine, micro_batches: int) -> None:
    for _ in range(micro_batches):
        engine.backward(engine(0.5))
        engine.step()


def save(folder: Path) -> None:
    """Write everything that this version can write. Both ranks must call this."""
    engine = start(1.0, save_universal=True)
    train(engine, STEPS * GAS)
    for name, keys in STATES.items():
        param = engine.module.get_parameter(name)
        safe_set_full_fp32_param(param, known(name, "fp32", param.shape))
        for key in keys:
            safe_set_full_optimizer_state(param, known(name, key, param.shape), key)
    engine.save_checkpoint(folder, tag="saved", client_state=CLIENT_STATE)
    if hasattr(engine.optimizer, "save_state_dict_to_file"):
        engine.optimizer.save_state_dict_to_file(folder / "one_file.safetensors")
    if hasattr(engine.optimizer, "sharded_state_dict"):
        torch.distributed.checkpoint.save(engine.optimizer.sharded_state_dict(), checkpoint_id=folder / "sharded")
    resumed = start(2.0)
    resumed.load_checkpoint(folder, tag="saved")
    train(resumed, 1)
    resumed.save_checkpoint(folder, tag="inside", client_state=CLIENT_STATE, save_latest=False)


def run_rank(rank: int, store: str, folder: Path) -> None:
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed refuses fp16 on CPUs on which it would be slow.
    type(get_accelerator()).is_fp16_supported = lambda self: True
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_SIZE="2")
    deepspeed.init_distributed("gloo", init_method=f"file://{store}", rank=rank, world_size=2, auto_mpi_discovery=False)
    save(folder)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # Taking Python apart now and then ends in an abort of one of gloo's threads.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("names", metavar="NAME", nargs="*")
    args = parser.parse_args()
    sys.path.insert(0, str(args.checkout.resolve()))
    args.out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.multiprocessing.start_processes(run_rank, (f"{name}/store", folder), 2, start_method="fork")
        for path in folder.iterdir():
            if path.name in (args.names or NAMES):
                shutil.move(path, args.out)


if __name__ == "__main__":
    os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1")
    main()
