"""Mistakes of users, told by the right words; ``python -m tests.mistakes`` plays all of them under the launcher."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from deepspeed.utils import logger
from torch import nn

import ds_layerwise
from ds_layerwise.engine import final_error
from ds_layerwise.errors import ConfigError, LayerWiseError
from ds_layerwise.ranks.comm import comm, object_gather
from ds_layerwise.zero import step_progress
from tests import mistakes
from tests.support.harness import DistributedTest, free_port
from tests.support.rooms import rooms

pytestmark = rooms("final_error", "config_hook", "step_progress", "object_gather", "saving")

#: Those of which other tests do not look at the words.
HERE = ("top-level-misspelt", "fp16-misspelt", "optimizer-misspelt", "bucket-misspelt", "offload-misspelt",
        "save-key-misspelt", "batch-sizes", "overlap-without-a-last-pass", "qk-clip-glob", "fused-adam", "muon-object",
        "no-optimizer", "around-the-engine", "client-state-lambda", "no-matrix")


class TestMistakes(DistributedTest):
    def test_a_mistake_is_told_by_its_words(self, class_tmpdir):
        for name in HERE:
            case = mistakes.MISTAKES[name]
            with pytest.raises(LayerWiseError) as caught:
                case.play(class_tmpdir)
            told = final_error.framed(caught.value)
            assert [word for word in case.says if word not in told] == []
            assert [word for word in case.never if word in told] == []
            assert f"at {mistakes.__file__}:" in told and len(told.splitlines()) <= mistakes.MOST_LINES

    def test_a_rank_that_is_missed_is_told_in_words_of_the_script(self, class_tmpdir, monkeypatch):
        """Save on rank 0 as ``save-on-rank-0`` of the tool does, where the other rank has come to its end."""
        def closed(*_):
            raise RuntimeError("[pair.cc:553] Connection closed by peer\nat frame #0")

        engine = mistakes.start()
        monkeypatch.setattr(object_gather, "_of_all", closed)
        says = r"within the timeout of .* call save_checkpoint\(\), .* on every rank, not only on rank 0$"
        with pytest.raises(LayerWiseError, match=says):
            engine.save_checkpoint(class_tmpdir)
        # A rank that has an error of its own tells that.
        with pytest.raises(ZeroDivisionError), comm.errors_on_all_ranks():
            1 / 0

    def test_the_hook_comes_on_top_of_torchs_and_goes(self):
        of_torch = sys.excepthook
        mistakes.start()
        assert sys.excepthook is not of_torch
        ds_layerwise.unregister()
        assert sys.excepthook is of_torch


class TestInVain(DistributedTest):
    @staticmethod
    def warned(monkeypatch):
        found = []
        monkeypatch.setattr(logger, "warning", lambda text, *_: found.append(text))
        step_progress.warn_once.cache_clear()
        return found

    @pytest.mark.parametrize("own", [True, False])
    def test_a_loop_without_a_step_of_the_engine_is_told_once(self, own, monkeypatch):
        warned, model = self.warned(monkeypatch), mistakes.net()
        other = torch.optim.AdamW(model.parameters())
        engine = mistakes.start(model=model)
        for _ in range(40):
            other.zero_grad()
            (engine if own else model)(mistakes.batch()).sum().backward()
            other.step()
        assert [text.split(";")[0] for text in warned] == (["ds_layerwise: 16 backward passes so far, and no "
                                                            "engine.step(): no weight has moved, and global_steps is 0"]
                                                           if engine.global_rank == 0 else [])

    def test_a_step_of_the_optimizer_is_told_once_and_one_of_the_engine_is_not(self, monkeypatch):
        warned, engine = self.warned(monkeypatch), mistakes.start()
        mistakes.train(engine, 20)
        assert warned == []
        for _ in range(2):
            engine.backward(engine(mistakes.batch()).sum())
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        assert len(warned) == (engine.global_rank == 0) and all("call engine.step()" in text for text in warned)

    def test_a_clipping_of_the_script_is_told_once(self, monkeypatch):
        warned, engine = self.warned(monkeypatch), mistakes.start()
        other = nn.Linear(2, 2)
        other(torch.ones(1, 2)).sum().backward()
        norm = torch.stack([param.grad.norm() for param in other.parameters()]).norm()
        assert torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0) == norm and warned == []
        for _ in range(2):
            engine.backward(engine(mistakes.batch()).sum())
            assert torch.nn.utils.clip_grad_norm_(engine.module.parameters(), max_norm=1.0) == 0
            engine.step()
        assert len(warned) == (engine.global_rank == 0) and all("gradient_clipping" in text for text in warned)


def test_under_the_launcher_rank_0_alone_tells_it_last():
    code, output = mistakes.launched("one-rank-wrong", free_port())
    assert mistakes.wrong_with("one-rank-wrong", code, output) == [], output


class TestHook:
    @pytest.fixture(autouse=True)
    def _hook(self, monkeypatch):
        self.earlier = []
        monkeypatch.setattr(sys, "excepthook", self.take)
        monkeypatch.delenv("RANK", raising=False)
        final_error.begin()

    def take(self, *error):
        self.earlier.append(error)
        print("a traceback", file=sys.stderr)

    @staticmethod
    def raised(error):
        try:
            raise error
        except type(error):
            sys.excepthook(*sys.exc_info())

    def test_an_error_of_this_package_is_framed_with_the_line_of_the_script(self, capsys):
        self.raised(ConfigError("lr is wrong"))
        lines = capsys.readouterr().err.splitlines()
        assert lines[0] == lines[-1] == mistakes.BAR and lines[1] == "ds_layerwise: ConfigError: lr is wrong"
        assert lines[2].startswith(f"at {__file__}:") and lines[2].endswith("in raised: raise error")
        assert len(lines) == 5 and [str(error) for _, error, _ in self.earlier] == ["lr is wrong"]

    def test_a_script_in_a_folder_whose_name_begins_like_this_package(self):
        path = f"{Path(final_error.__file__).parents[1]}_runs/train.py"
        try:
            exec(compile("raise ConfigError('wrong')", path, "exec"))
        except ConfigError as error:
            assert f"at {path}:1, in <module>" in final_error.framed(error)

    def test_others_and_all_in_development_mode_go_to_the_hook_that_was_there(self, monkeypatch, capsys):
        self.raised(ValueError("not ours"))
        monkeypatch.setattr(sys, "flags", SimpleNamespace(dev_mode=True))
        self.raised(ConfigError("ours"))
        assert [str(error) for _, error, _ in self.earlier] == ["not ours", "ours"]
        assert capsys.readouterr().err == "a traceback\n" * 2

    def test_a_rank_that_is_alone_with_its_error_tells_it(self, monkeypatch, capsys):
        monkeypatch.setenv("RANK", "1")
        slept = []
        monkeypatch.setattr(final_error.time, "sleep", slept.append)
        self.raised(ConfigError("mine alone"))
        assert slept == [10] and "mine alone" in capsys.readouterr().err

    def test_it_is_put_there_once_and_taken_away(self):
        ours = sys.excepthook
        final_error.begin()
        assert sys.excepthook is ours
        final_error.end()
        self.raised(ConfigError("plain"))
        assert len(self.earlier) == 1
