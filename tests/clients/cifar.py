"""DeepSpeedExamples' training/cifar/cifar10_deepspeed.py, from $CLIENTS, with made images. Started by run.py.

Its config is in the script. So this changes the one word that a user changes on its way into ``deepspeed.initialize``.
torchvision cannot be installed everywhere, so this has the three names of it that the script uses.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import sys
import types
from pathlib import Path

import deepspeed
import torch
from material import write_figures

figures, given = sys.argv[-2], json.loads(Path(sys.argv[-1]).read_text())


class Images(torch.utils.data.Dataset):
    """Images of 3 x 32 x 32 in ten classes: a pattern for each class, and noise."""

    def __init__(self, root, train, download, transform) -> None:
        patterns = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        draw = torch.Generator().manual_seed(1 if train else 2)
        count = 16 * 120 if train else 400
        self.labels = torch.randint(10, (count,), generator=draw)
        self.images = 0.5 * patterns[self.labels] + torch.randn(count, 3, 32, 32, generator=draw)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], int(self.labels[index])


torchvision = types.ModuleType("torchvision")
torchvision.datasets = types.SimpleNamespace(CIFAR10=Images)
torchvision.transforms = types.SimpleNamespace(Compose=lambda t: None, ToTensor=lambda: None,
                                               Normalize=lambda *a: None)
sys.modules["torchvision"] = torchvision
initialize = deepspeed.initialize


def with_our_optimizer(*args, config, **kwargs):
    config["optimizer"]["type"] = given["optimizer"]["type"]
    config["optimizer"]["params"].update(given["optimizer"]["params"])
    config["optimizer"]["params"] = {k: v for k, v in config["optimizer"]["params"].items() if v is not None}
    if "layerwise" in given:
        config["layerwise"] = given["layerwise"]
    return initialize(*args, config=config, **kwargs)


deepspeed.initialize = with_our_optimizer
sys.argv = ["cifar10_deepspeed.py", "--dtype=fp32", "--stage=1", "--epochs=2", "--log-interval=20", *sys.argv[1:-2]]
printed = io.StringIO()
torch.manual_seed(0)
with contextlib.redirect_stdout(printed):
    runpy.run_path(str(Path(os.environ["CLIENTS"], "cifar10_deepspeed.py")), run_name="__main__")
if torch.distributed.get_rank() == 0:
    print(printed.getvalue())
    losses = [float(loss) for loss in re.findall(r"loss:\s+([\d.]+)", printed.getvalue())]
    accuracy = re.search(r"test images:\s+(\d+) %", printed.getvalue())
    write_figures(figures, losses, accuracy=float(accuracy[1]))
torch.distributed.destroy_process_group()
