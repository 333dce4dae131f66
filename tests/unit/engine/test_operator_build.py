"""The line that says that DeepSpeed compiles an operator, or waits for a lock."""

import time
from types import SimpleNamespace

import psutil
import pytest
from deepspeed.ops.op_builder.builder import OpBuilder

from ds_layerwise.engine import operator_build
from ds_layerwise.engine.register import register, unregister
from tests.support.rooms import rooms

pytestmark = rooms("operator_build")


class Unfit(OpBuilder):
    """An operator that cannot be compiled here, of which DeepSpeed finds it ``after`` it was asked so often."""

    def __init__(self, after=1):
        super().__init__("an_operator")
        self.after = after

    def absolute_name(self):
        return "nowhere.an_operator"

    def sources(self):
        return []

    def is_compatible(self, verbose=False):
        self.after -= 1
        return self.after >= 0


COMPILES = "DeepSpeed compiles an_operator in {folder}; this takes one to three minutes, only at the first start"
WAITS = ("DeepSpeed still compiles an_operator, or waits for another process to do so; if there is none, because an "
         "earlier start was killed, stop this one and delete {folder}/lock")


class Slow(Unfit):
    """An operator whose start takes longer than anybody's patience."""

    def is_compatible(self, verbose=False):
        if self.after < 1:
            time.sleep(0.5)
        return super().is_compatible(verbose)


@pytest.mark.parametrize("kind", [Unfit, Slow])
@pytest.mark.parametrize("files, rank", [((), "0"), ((), "1"), (("an_operator.so", ), "0"), (("lock", ), "0"),
                                         (("an_operator.so", "lock"), "0")], ids=str)
def test_a_single_rank_says_that_it_compiles_and_then_waits(kind, files, rank, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", rank)
    for name in ("_PATIENCE", "_SHORT_PATIENCE"):
        monkeypatch.setattr(operator_build, name, 0.1)
    folder = tmp_path / "an_operator"
    folder.mkdir()
    for file in files:
        (folder / file).touch()
    register()
    try:
        with pytest.raises(RuntimeError, match="not being compatible"):
            kind().jit_load(False)
    finally:
        unregister()
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("ds_layerwise")]
    expected = [COMPILES] * ("an_operator.so" not in files) + [WAITS] * (kind is Slow)
    assert told == [f"ds_layerwise: {line.format(folder=folder)}" for line in expected if rank == "0"]


@pytest.mark.parametrize("lock, running, soon",
                         [(True, "python", True), (True, "ninja", False), (False, "python", False)])
def test_a_lock_is_named_at_once_where_nothing_compiles(lock, running, soon, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(operator_build, "_SHORT_PATIENCE", 0.1)
    monkeypatch.setattr(psutil, "process_iter", lambda attrs: [
        SimpleNamespace(info={"name": name}) for name in ("python", running)])
    (tmp_path / "an_operator").mkdir()
    if lock:
        (tmp_path / "an_operator" / "lock").touch()
    register()
    try:
        with pytest.raises(RuntimeError, match="not being compatible"):
            Slow().jit_load(False)
    finally:
        unregister()
    assert (WAITS.format(folder=tmp_path / "an_operator") in capsys.readouterr().out) is soon


def test_nothing_is_said_or_made_for_what_cannot_be_compiled(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    register()
    try:
        with pytest.raises(RuntimeError, match="not being compatible"):
            Unfit(after=0).jit_load(False)
    finally:
        unregister()
    assert "compiles" not in capsys.readouterr().out and not list(tmp_path.iterdir())
