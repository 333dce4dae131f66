"""The script that ``tests/nodes.py`` starts on every rank: a small GPT, and a checkpoint every two steps.

Rank 0 writes the facts that are compared into ``--out``, one JSON object a line: for each step the losses of its
samples, in their order, and a digest of the weights; for each save and load a digest of all masters and states.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Iterator

import deepspeed
import deepspeed.comm as dist
import torch
from torch import Tensor

from ds_layerwise.errors import LayerWiseError
from examples.data import load_corpus, training_windows
from examples.model import GPT, GPTConfig
from tests.support.checkpoints import whole_states
from tests.support.faults import FileEvents
from tests.support.training import from_all_ranks, weights

ROOT = Path(__file__).parents[2]
CONTEXT, BATCH, SAVE_EVERY = 16, 4, 2

#: The step and the save of a run in which functions are listed, and those in which the run stops in one of them.
LISTED, STOPPED = {"step": 1, "save": 0}, {"step": 4, "save": 1}

#: Seconds that the process which has started this may take for its part.
PATIENCE = 120.0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--checkpoints", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--timeout", type=float, required=True, help="of collectives, seconds")
    parser.add_argument("--stop_in", choices=["step", "save"], help="in which to wait for the signal that kills")
    parser.add_argument("--stop_rank", type=int, help="the rank that does")
    parser.add_argument("--stop_at", type=float, help="in which of its functions: from 0 for the first to 1")
    parser.add_argument("--lacks_files", action="store_true", help="a load is refused until somebody brings files")
    parser.add_argument("--local_rank", type=int)
    return parser.parse_args()


def config(stage: int) -> dict[str, Any]:
    ds_config: dict[str, Any] = json.loads((ROOT / "ds_configs" / "quickstart.json").read_text())
    ds_config |= {"train_batch_size": BATCH, "train_micro_batch_size_per_gpu": 1, "steps_per_print": 10**9,
                  "checkpoint": {"use_node_local_storage": True}, "layerwise": {}}
    # "auto" measures which dtype is faster, and may find another one in another run.
    ds_config["optimizer"]["params"]["ns_dtype"] = "fp32"
    ds_config["scheduler"]["params"] |= {"warmup_num_steps": 4, "warmup_min_ratio": 0.1}
    ds_config["zero_optimization"] |= {"stage": stage, "reduce_bucket_size": 10_000}
    return ds_config


def digest(tensors: Mapping[Any, Tensor]) -> str:
    checksum = hashlib.sha256()
    for key in sorted(tensors):
        checksum.update(f"{key} ".encode() + tensors[key].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return checksum.hexdigest()


def wait_for(path: Path) -> str:
    """Wait for a file, and return its text.

    Raises:
        TimeoutError: the file does not come.
    """
    until = time.monotonic() + PATIENCE
    while not path.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"{path} has not come in {PATIENCE:g} s")
        time.sleep(0.05)
    return path.read_text()


class Run:
    """A start of the script."""

    def __init__(self, engine: Any, options: argparse.Namespace) -> None:
        self.engine, self.options = engine, options
        self.corpus = load_corpus(str(ROOT / "docs" / "design.md"), CONTEXT)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.met = {"step": 0, "save": 0}
        self.functions: list[str] = []

    def note(self, **facts: Any) -> None:
        if self.rank == 0:
            with open(self.options.out / "notes", "ab", buffering=0) as file:
                file.write(json.dumps(facts).encode() + b"\n")

    def tell(self, name: str, text: str) -> None:
        """Write a file that somebody waits for. It is whole as soon as it is there."""
        (self.options.out / "part").write_text(text)
        (self.options.out / "part").rename(self.options.out / name)

    def resume(self) -> None:
        """Go on from the newest checkpoint, if there is one."""
        folder = self.options.checkpoints
        if not self.options.lacks_files:
            path, _ = self.engine.load_checkpoint(folder)
        else:
            before = digest(whole_states(self.engine))
            try:
                self.engine.load_checkpoint(folder)
                raise SystemExit("a load has not missed what the other node has saved")
            except LayerWiseError as error:
                if digest(whole_states(self.engine)) != before:
                    raise SystemExit("a load that was refused has changed the engine") from error
                if self.rank == 0:
                    self.tell("refused", str(error))
            path, _ = self.engine.load_checkpoint(folder, tag=wait_for(self.options.out / "brought"))
        if path:
            self.note(loaded=self.engine.global_steps, states=digest(whole_states(self.engine)))

    def train(self) -> None:
        """Train and save up to the last step."""
        for step in range(self.engine.global_steps, self.options.steps):
            with self.moment("step"):
                losses = self.step(step)
            shown = digest({"": weights(self.engine.module)})
            self.note(step=step + 1, losses=[loss.hex() for loss in losses], weights=shown)
            if (step + 1) % SAVE_EVERY == 0:
                with self.moment("save"):
                    self.engine.save_checkpoint(self.options.checkpoints)
                self.note(saved=step + 1, states=digest(whole_states(self.engine)))

    def step(self, step: int) -> list[float]:
        """Train on the samples of a step, the same for any number of ranks; returns their losses."""
        losses: list[float] = []
        for micro in range(self.engine.gradient_accumulation_steps()):
            first = step * BATCH + micro * self.world_size + self.rank
            windows = training_windows(self.corpus.train, seed=0, first=first, size=1, context=CONTEXT)
            loss = self.engine(windows[:, :-1], windows[:, 1:])
            self.engine.backward(loss)
            self.engine.step()
            losses += from_all_ranks(loss.item())
        return losses

    def moment(self, kind: str) -> AbstractContextManager[object]:
        """Return the context of a step or a save, in the middle of which this rank may stop."""
        number, self.met[kind] = self.met[kind], self.met[kind] + 1
        if kind != self.options.stop_in or self.rank != self.options.stop_rank:
            return nullcontext()
        if number == LISTED[kind]:
            return self.listed()
        if number == STOPPED[kind]:
            return self.stopping(self.functions[int(self.options.stop_at * len(self.functions))])
        return nullcontext()

    @contextmanager
    def listed(self) -> Iterator[None]:
        with FileEvents() as events:
            yield
        self.functions = list(dict.fromkeys(events.names))

    @contextmanager
    def stopping(self, function: str) -> Iterator[None]:
        with FileEvents(0, self.stop, function):
            yield
            # Some functions are called only where ranks wait for one another.
            self.stop()

    def stop(self) -> None:
        """Wait to be killed."""
        frame = sys._getframe(2)
        self.tell("stopped", f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        time.sleep(PATIENCE)
        os._exit(3)


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(1)
    # Only inference uses this operator, and building it takes a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", timeout=timedelta(seconds=options.timeout))
    model = GPT(GPTConfig(layers=2, width=32, heads=2, context=CONTEXT))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(options.stage))
    run = Run(engine, options)
    run.resume()
    run.train()


if __name__ == "__main__":
    main()
