"""Helpers for ``ds-layerwise``: a model with parameters of every kind, its checkpoints, and calls of commands."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout

import torch
from safetensors.torch import load_file
from torch import nn

from ds_layerwise import cli
from ds_layerwise.checkpoint.manifest import FILE_NAME, Manifest, names_in
from ds_layerwise.checkpoint.plain_values import load_safely
from tests.support.checkpoints import assert_equal_contents
from tests.support.training import Net, ds_config, start, train_engine

BF16 = {"bf16": {"enabled": True}}

MODEL_FILE = "mp_rank_00_model_states.pt"


class Everything(Net):
    """A model with trained and frozen parameters, tied ones of both kinds, empty ones, and buffers."""

    def __init__(self):
        super().__init__(tied=True, frozen=True, odd=True)
        self.fixed, self.fixed_again = nn.Linear(12, 5, bias=False), nn.Linear(12, 5, bias=False)
        self.fixed_again.weight = self.fixed.weight
        self.fixed.weight.requires_grad = False
        self.fixed.weight.data[0, 0] = 1e6
        self.empty_too = nn.Parameter(torch.zeros(0, 5))
        self.register_buffer("mean", torch.randn(3))
        self.register_buffer("counts", torch.tensor([2**24 + 1, -1]))
        self.register_buffer("by_position", torch.arange(4.0), persistent=False)


#: Names of :class:`Everything` whose values are stored under another name.
TIED = {"head.weight": "embed.weight", "fixed_again.weight": "fixed.weight"}


def saved(folder, tag="saved", *, client_state=None, **layerwise):
    """Return an engine that was trained for three steps in bf16 and then saved."""
    engine = start(Everything(), ds_config(layerwise=layerwise, **BF16))
    train_engine(engine, 3)
    engine.save_checkpoint(folder, tag=tag, client_state=client_state)
    return engine


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return not super().isatty()  # raises ValueError once it is closed


def run(*args):
    """Return the exit code of a command, and its text on stdout and on stderr."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = cli.main([str(arg) for arg in args])
    return code, out.getvalue(), err.getvalue()


def assert_refused(message, *args):
    """Check that a command says ``message`` in one line on stderr and ends with 2."""
    code, out, err = run(*args)
    assert code == 2 and not out and message in err and err.count("\n") == 1, (code, out, err)


def check_from_outside(folder, states):
    """Check that the commands take ``folder`` with the checkpoints "saved" and "saved_universal", which hold
    ``states``, as whole, 1-D tensors by name and key."""
    for saved in ("saved", "saved_universal"):
        assert cli.main(["verify", str(folder / saved)]) == 0
    assert cli.main(["consolidate", str(folder), str(folder / "all.safetensors")]) == 0
    weights = load_file(folder / "all.safetensors")
    for name, key in states:
        if key == "fp32":
            assert torch.equal(weights[name].flatten(), states[name, key]), name
    assert cli.main(["to-universal", str(folder), str(folder / "converted")]) == 0
    assert cli.main(["verify", str(folder / "converted")]) == 0
    converted, by_engine = folder / "converted", folder / "saved_universal"
    assert names_in(converted) == names_in(by_engine)
    for name in names_in(by_engine):
        assert_equal_contents(load_safely(converted / name), load_safely(by_engine / name), (name, ))


def edit(path, change):
    """Change the content of a checkpoint's file, and write the checkpoint's list of files again to match."""
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)
    folder = next(parent for parent in path.parents if (parent / FILE_NAME).exists())
    Manifest.of(folder).write(folder)
