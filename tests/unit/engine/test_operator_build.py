"""The line that says that DeepSpeed compiles an operator, or waits for a lock."""

import os
import time

import pytest
from deepspeed.ops.op_builder.builder import OpBuilder

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
WAITS = ("DeepSpeed waits for another process to compile an_operator; if there is none, because an earlier start was "
         "killed, stop this one and delete {folder}/lock")


@pytest.mark.parametrize("files, rank, says", [
    ((), "0", COMPILES), ((), "1", None), (("an_operator.so", ), "0", None), (("old lock", ), "0", WAITS),
    # Another rank has begun.
    (("lock", ), "0", COMPILES),
    # Every start locks it for a moment; one that was killed leaves the lock.
    (("an_operator.so", "lock"), "0", None), (("an_operator.so", "old lock"), "0", WAITS)],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else None)
def test_one_rank_says_what_is_compiled_or_waited_for(files, rank, says, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", rank)
    folder = tmp_path / "an_operator"
    folder.mkdir()
    for file in files:
        (folder / file.removeprefix("old ")).touch()
        if file == "old lock":
            os.utime(folder / "lock", (time.time() - 70, ) * 2)
    register()
    try:
        with pytest.raises(RuntimeError, match="not being compatible"):
            Unfit().jit_load(False)
    finally:
        unregister()
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("ds_layerwise")]
    assert told == ([f"ds_layerwise: {says.format(folder=folder)}"] if says else [])


def test_nothing_is_said_or_made_for_what_cannot_be_compiled(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    register()
    try:
        with pytest.raises(RuntimeError, match="not being compatible"):
            Unfit(after=0).jit_load(False)
    finally:
        unregister()
    assert "compiles" not in capsys.readouterr().out and not list(tmp_path.iterdir())
