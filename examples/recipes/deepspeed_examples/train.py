"""DeepSpeedExamples' training/cifar, with the sections of ds.json in place of those in the script.

    bash examples/recipes/deepspeed_examples/run.sh [arguments of cifar10_deepspeed.py]

In a script of yours that is one line after ``ds_config = get_ds_config(args)``:
``ds_config.update(json.load(open("ds.json")))``. The images are made here, not downloaded.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import material
import their_script


def without_downloads(steps: int) -> types.ModuleType:
    """Stand in for the three names that the script takes from torchvision.

    An epoch has ``steps`` batches, of 16 as the script says.
    """

    def made(root: str, train: bool, **_: Any) -> list[tuple[torch.Tensor, int]]:
        pixels, labels = material.images(16 * steps if train else 400, seed=1 if train else 2)
        return list(zip(pixels, labels.tolist(), strict=True))

    def nothing(*_: Any) -> None:
        return None

    torchvision = types.ModuleType("torchvision")
    torchvision.datasets = types.SimpleNamespace(CIFAR10=made)
    torchvision.transforms = types.SimpleNamespace(
        Compose=nothing, ToTensor=nothing, Normalize=nothing
    )
    return torchvision


def main() -> None:
    args, words = their_script.parse("out/recipes/deepspeed_examples", "training/cifar")
    sys.modules["torchvision"] = without_downloads(args.max_steps)
    torch.manual_seed(0)

    def change(given: dict[str, Any]) -> dict[str, Any]:
        return {**given, "config": {**given["config"], **args.config}}

    script = args.clone / "training" / "cifar" / "cifar10_deepspeed.py"
    their_script.run(script, words, change, args)


if __name__ == "__main__":
    main()
