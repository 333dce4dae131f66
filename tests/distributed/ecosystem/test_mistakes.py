"""Mistakes of users, told by the right words: each plays the script that makes it."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from deepspeed.ops.adam import FusedAdam
from deepspeed.utils import logger
from torch import nn

import ds_layerwise
from ds_layerwise.engine import final_error
from ds_layerwise.errors import ConfigError, LayerWiseError
from ds_layerwise.ranks.comm import comm, object_gather
from tests.support.harness import DistributedTest, free_port
from tests.support.rooms import rooms

pytestmark = rooms("final_error", "config_hook", "step_progress", "object_gather", "saving")

MOST_LINES = 12
BAR = "=" * 100


def config(**changes):
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1},
            "optimizer": {"type": "LayerWiseMuon", "params": {"lr": 0.01, "muon_lr": 0.02}}, **changes}


def net():
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 4))


def start(ds_config=None, model=None, **kwargs):
    model = net() if model is None else model
    return ds_layerwise.initialize(model=model, config=ds_config or config(), model_parameters=model.parameters(),
                                   **kwargs)[0]


def batch():
    return torch.ones(2, 8)


def train(engine, steps=1):
    for _ in range(steps):
        engine.backward(engine(batch()).sum())
        engine.step()
    return engine


def with_config(**changes):
    return lambda folder: train(start(config(**changes)))


def with_optimizer(make):
    def play(folder):
        model = net()
        start({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, "layerwise": {}}, model,
              optimizer=make(model))
    return play


class Muon(torch.optim.SGD):
    """Keeps more than its base, and uses it in its steps."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, lr)
        self.state[self.param_groups[0]["params"][0]]["use_muon"] = True

    def step(self, closure=None):
        return self.state[self.param_groups[0]["params"][0]]["use_muon"]


def fused_adam(model):
    made = FusedAdam.__new__(FusedAdam)
    super(FusedAdam, made).__init__(model.parameters(), {"lr": 1e-3})
    return made


def a_glob_of_more_than_attentions(folder):
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({
        "n1": nn.LayerNorm(8), "attn": nn.ModuleDict({"qkv": nn.Linear(8, 24)})})])})
    start(config(layerwise={"qk_clip": {"attention": [{"name": "blocks.*", "heads": 2, "qkv": "attn.qkv"}]}}), model)


def around_the_engine(folder):
    engine = start(model=(model := net()))
    model(batch()).sum().backward()
    engine.step()


#: Mistakes whose words no other test looks at: the script, words of its message, and words that are not in it.
MISTAKES = [
    (with_config(bf61={"enabled": True}), ["bf61", "did you mean 'bf16'"], []),
    (lambda folder: start({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, "optimiser": {
        "type": "LayerWiseMuon"}}), ["optimiser", "did you mean 'optimizer'"], []),
    (with_config(checkpoint={"use_node_local_storag": True}), ["use_node_local_storag", "'use_node_local_storage'"],
     []),
    (with_config(managed_gradient_accumulation=False, zero_optimization={"stage": 1, "overlap_comm": True}),
     ["overlap_comm to false", "managed_gradient_accumulation", "stage to 2"], []),
    (a_glob_of_more_than_attentions, ["'blocks.*'", "blocks.0.n1", "blocks.*.attn"], ["say where it is"]),
    (with_optimizer(fused_adam), ["FusedAdam", "torch.optim.AdamW"], ["offloading"]),
    (with_optimizer(lambda model: Muon(model.parameters())),
     ["Muon", "remove the Muon", "optimizer.type 'LayerWiseMuon'"], []),
    (with_optimizer(lambda model: "adamw"), ["torch.optim.Optimizer", "builtins.str"], []),
    (around_the_engine, ["engine(inputs)", "engine.backward(loss)"], ["an exception"]),
    (lambda folder: train(start()).save_checkpoint(folder, client_state={"now": lambda: 0}), ["client_state"], []),
    (lambda folder: start(model=nn.ParameterDict({"vera_lambda_b": nn.Parameter(batch()[0])})),
     ['{"name": "*", "optimizer": "scalar"}'], []),
]

#: A script that does not know this package, with a wrong setting on one rank.
ONE_RANK_WRONG = """
import os, torch, deepspeed
model = torch.nn.Linear(8, 8)
deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
    "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1},
    "optimizer": {"type": "LayerWiseMuon", "params": {"muon_lr": 0.02, "lr": 0.01,
                                                      "momentum": 0.9 + int(os.environ["RANK"])}}})
"""


class TestMistakes(DistributedTest):
    def test_a_mistake_is_told_by_its_words(self, class_tmpdir):
        for play, says, never in MISTAKES:
            with pytest.raises(LayerWiseError) as caught:
                play(class_tmpdir)
            told = final_error.framed(caught.value)
            assert [word for word in says if word not in told] == []
            assert [word for word in never if word in told] == []
            assert f"at {__file__}:" in told and len(told.splitlines()) <= MOST_LINES

    def test_a_rank_that_is_missed_is_told_in_words_of_the_script(self, class_tmpdir, monkeypatch):
        """Save on rank 0 alone, where the other rank has come to its end."""
        def closed(*_):
            raise RuntimeError("[pair.cc:553] Connection closed by peer\nat frame #0")

        engine = start()
        monkeypatch.setattr(object_gather, "_of_all", closed)
        says = r"within the timeout of .* call save_checkpoint\(\), .* on every rank, not only on rank 0$"
        with pytest.raises(LayerWiseError, match=says):
            engine.save_checkpoint(class_tmpdir)
        # A rank that has an error of its own tells that.
        with pytest.raises(ZeroDivisionError), comm.errors_on_all_ranks():
            1 / 0

    def test_the_hook_comes_on_top_of_torchs_and_goes(self):
        of_torch = sys.excepthook
        start()
        assert sys.excepthook is not of_torch
        ds_layerwise.unregister()
        assert sys.excepthook is of_torch


class TestInVain(DistributedTest):
    @staticmethod
    def warned(monkeypatch):
        found = []
        monkeypatch.setattr(logger, "warning", lambda text, *_: found.append(text))
        comm.warn_once.cache_clear()
        return found

    @pytest.mark.parametrize("own", [True, False])
    def test_a_loop_without_a_step_of_the_engine_is_told_once(self, own, monkeypatch):
        warned, model = self.warned(monkeypatch), net()
        other = torch.optim.AdamW(model.parameters())
        engine = start(model=model)
        for _ in range(40):
            other.zero_grad()
            (engine if own else model)(batch()).sum().backward()
            other.step()
        assert [text.split(";")[0] for text in warned] == (["ds_layerwise: 16 backward passes so far, and no "
                                                            "engine.step(): no weight has moved, and global_steps is 0"]
                                                           if engine.global_rank == 0 else [])

    def test_a_step_of_the_optimizer_is_told_once_and_one_of_the_engine_is_not(self, monkeypatch):
        warned, engine = self.warned(monkeypatch), start()
        train(engine, 20)
        assert warned == []
        for _ in range(2):
            engine.backward(engine(batch()).sum())
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        assert len(warned) == (engine.global_rank == 0) and all("call engine.step()" in text for text in warned)

    def test_a_clipping_of_the_script_is_told_once(self, monkeypatch):
        warned, engine = self.warned(monkeypatch), start()
        other = nn.Linear(2, 2)
        other(torch.ones(1, 2)).sum().backward()
        norm = torch.stack([param.grad.norm() for param in other.parameters()]).norm()
        assert torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0) == norm and warned == []
        for _ in range(2):
            engine.backward(engine(batch()).sum())
            assert torch.nn.utils.clip_grad_norm_(engine.module.parameters(), max_norm=1.0) == 0
            engine.step()
        assert len(warned) == (engine.global_rank == 0) and all("gradient_clipping" in text for text in warned)


def test_under_the_launcher_rank_0_alone_tells_it_last(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(ONE_RANK_WRONG)
    env = {**os.environ, "PYTHONPATH": str(Path(ds_layerwise.__file__).parents[1]), "LOCAL_SIZE": "2"}
    done = subprocess.run(["deepspeed", "--num_accelerators", "2", "--master_port", str(port := free_port()),
                           "--module", "ds_layerwise.run", script], cwd=tmp_path, env=env, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=180)
    # An operator of DeepSpeed leaves these 140 MB where a rank ends with an error.
    for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
        left.unlink()
    lines = [line for line in done.stdout.splitlines() if line.strip() and not line.startswith("[")]
    ours = lines[lines.index(BAR):]
    assert done.returncode and lines.count(BAR) == 2 and ours[-1] == BAR, done.stdout
    assert "rank 1 failed" in ours[1] and "momentum" in ours[1] and "Traceback" not in done.stdout, done.stdout


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
        assert lines[0] == lines[-1] == BAR and lines[1] == "ds_layerwise: ConfigError: lr is wrong"
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
