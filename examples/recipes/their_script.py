"""Run a script that makes its own config, and change its arguments of deepspeed.initialize.

The script stays as its project has it. It saves no checkpoints and writes no losses, so this does
both for it.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import material


def parse(output_dir: str, folder: str) -> tuple[argparse.Namespace, list[str]]:
    """Return the arguments of a recipe with such a script, and the rest, which are the script's."""
    parser = material.arguments(output_dir, allow_abbrev=False)
    parser.add_argument("--clone", type=Path, required=True, help="of DeepSpeedExamples")
    parser.add_argument("--config", type=Path, required=True)
    args, words = parser.parse_known_args()
    refused = {"--gradient_accumulation_steps", "--lora_dim"}
    for word in words:
        if word.partition("=")[0] in refused:
            parser.error(f"{word}: this recipe counts each batch as a step, at one rate for all")
    if not (args.clone / folder).is_dir():
        parser.error(
            f"no {folder} in {args.clone}: "
            "git clone https://github.com/deepspeedai/DeepSpeedExamples"
        )
    args.config = json.loads(args.config.read_text())
    return args, words


class Record(material.Losses):
    """A record of an engine's losses, from a script's calls of ``backward`` and ``step``.

    The script of a resumed run gives its first batches again. They go by without a step, up to the
    first batch after the checkpoint.
    """

    def __init__(self, engine: deepspeed.DeepSpeedEngine, args: argparse.Namespace) -> None:
        super().__init__(engine, args)
        self.to_pass = len(self.values)
        self._backward, self._step = engine.backward, engine.step
        engine.backward, engine.step = self.backward, self.step

    def backward(self, loss: torch.Tensor) -> None:
        if not self.to_pass:
            self.loss = loss.detach()
            self._backward(loss)

    def step(self) -> None:
        if self.to_pass:
            self.to_pass -= 1
            return
        self._step()
        self.add(self.loss)


def run(
    script: Path,
    words: list[str],
    change: Callable[[dict[str, Any]], dict[str, Any]],
    args: argparse.Namespace,
) -> None:
    """Run ``script`` with ``words``, and write the losses of its engine.

    Args:
        change: a function that makes the arguments of ``deepspeed.initialize`` from those that the
            script gives.
    """
    initialize = deepspeed.initialize
    records: list[Record] = []

    def initialize_changed(**given: Any) -> tuple:
        made = initialize(**change(given))
        records.append(Record(made[0], args))
        return made

    deepspeed.initialize = initialize_changed
    sys.argv = [str(script), *words]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
    records[0].end()
