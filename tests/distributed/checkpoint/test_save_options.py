"""Options of ``save_checkpoint`` and ``load_checkpoint``, and DeepSpeed's ways to write files."""

import errno
import json
import math
import os
import subprocess
import sys
import textwrap
from contextlib import ExitStack
from pathlib import Path

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from ds_layerwise.checkpoint import atomic
from ds_layerwise.checkpoint.manifest import Manifest
from ds_layerwise.errors import LayerWiseError
from tests.support import internals
from tests.support.checkpoints import assert_equal_states, loaded, masters, on_rank_0, states
from tests.support.harness import DistributedTest, free_port
from tests.support.rooms import rooms
from tests.support.training import (
    BF16,
    Net,
    assert_same_on_all_ranks,
    ds_config,
    from_all_ranks,
    start,
    start_adamw,
    train_engine,
    weights,
)

pytestmark = rooms("saving", "loading", "save_snapshot", "exit_saves")

WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.003, "warmup_num_steps": 8}}


def folders(path):
    return sorted(p.name for p in path.iterdir() if p.is_dir())


class Mine:
    """An object that a script puts into a checkpoint, and only its own code can read."""


class Still:
    """A script's scheduler, which has nothing to remember."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        """Part of what an engine calls."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        assert state == {}

    def get_last_lr(self):
        return [group["lr"] for group in self.optimizer.param_groups]


class TestSaving(DistributedTest):
    def test_tags(self, tmp_path):
        engine, other = start(Net(), ds_config()), start(Net(), ds_config())
        for step, tag in enumerate((None, "mine", 7, "deep/er", "a[1]*?"), start=1):
            train_engine(engine, 1, first=step)
            assert engine.save_checkpoint(tmp_path, tag=tag)
            expected = "global_step1" if tag is None else str(tag)
            assert (tmp_path / "latest").read_text() == expected
            assert (tmp_path / expected / "mp_rank_00_model_states.pt").exists()
            path, _ = other.load_checkpoint(tmp_path)
            assert path == str(tmp_path / expected / "mp_rank_00_model_states.pt")
            assert_equal_states(states(other), states(engine))

    def test_the_same_tag_again_and_latest_left_alone(self, tmp_path):
        engine = train_engine(start(Net(), ds_config()), 1)
        engine.save_checkpoint(tmp_path, tag="first")
        engine.save_checkpoint(tmp_path, tag="again", save_latest=False)
        train_engine(engine, 1, first=1)
        engine.save_checkpoint(tmp_path, tag="again", save_latest=False)
        assert (tmp_path / "latest").read_text() == "first"
        assert folders(tmp_path) == ["again", "first"]
        other = loaded(start(Net(), ds_config()), tmp_path, tag="again")
        assert other.global_steps == 2
        assert_equal_states(states(other), states(engine))

    def test_a_wrong_argument_on_one_rank_raises_on_all_before_anything_is_written(self, tmp_path):
        engine = start(Net(), ds_config())
        for folder, tag in (("", "tag"), (tmp_path, ""), (tmp_path, "a/"), (tmp_path, "a\nb")):
            told = (folder, tag) if dist.get_rank() else (tmp_path, "tag")
            with pytest.raises((LayerWiseError, ValueError),
                               match="save_dir must be a non-empty string|the checkpoint's tag"):
                engine.save_checkpoint(told[0], tag=told[1])
        with pytest.raises(LayerWiseError, match="the checkpoint's tag differs between ranks: rank 0 has 0, rank 1 ha"):
            engine.save_checkpoint(tmp_path, tag=dist.get_rank())
        dist.barrier()
        assert not list(tmp_path.iterdir())
        on_rank_0(lambda: (tmp_path / "file").write_text(""))
        with pytest.raises(LayerWiseError, match="file is not a folder, but a save of tag needs"):
            engine.save_checkpoint(tmp_path / "file" / "below", tag="tag")
        train_engine(engine, 1)

    def test_no_regular_checkpoint_takes_the_place_of_a_universal_one(self, tmp_path):
        engine = train_engine(start(Net(), ds_config(layerwise={"save_universal": True})), 1)
        engine.save_checkpoint(tmp_path, tag="a")
        with pytest.raises(LayerWiseError, match="a_universal holds a universal checkpoint, and this save would put a"):
            engine.save_checkpoint(tmp_path, tag="a_universal")
        plain = start(Net(), ds_config())
        plain.save_checkpoint(tmp_path, tag="b_universal")
        with pytest.raises(LayerWiseError, match="b_universal holds a regular checkpoint, and this save would put"):
            engine.save_checkpoint(tmp_path, tag="b")
        assert folders(tmp_path) == ["a", "a_universal", "b_universal"]

    @pytest.mark.parametrize("fsync", [True, False])
    def test_every_file_on_the_disk_before_it_counts(self, fsync, tmp_path, monkeypatch):
        engine = start(Net(), ds_config(layerwise={"fsync": fsync, "save_universal": True}))
        flushed, flush, publish = set(), atomic.flush, atomic.publish
        committed = []
        monkeypatch.setattr(atomic, "flush", lambda path: flushed.add(path.name) or flush(path))
        monkeypatch.setattr(atomic, "publish", lambda *args, **options: committed.append(set(flushed)) or publish(
            *args, **options))
        engine.save_checkpoint(tmp_path, tag="tag")
        everyone = from_all_ranks(flushed)
        written = {p.name for p in tmp_path.glob("tag*/**/*") if p.suffix == ".pt"}
        assert len(written) > 5
        assert written <= everyone[0] | everyone[1] if fsync else not written & (everyone[0] | everyone[1])
        if dist.get_rank() == 0:
            assert len(committed) == 2 and (not fsync or "mp_rank_00_model_states.pt" in committed[1])

    def test_frozen_parameters_left_out(self, tmp_path, capsys):
        engine = start(Net(frozen=True), ds_config())
        engine.save_checkpoint(tmp_path, tag="all")
        engine.save_checkpoint(tmp_path, tag="trained", exclude_frozen_parameters=True)
        full, trained = (torch.load(tmp_path / tag / "mp_rank_00_model_states.pt", weights_only=False)
                         for tag in ("all", "trained"))
        frozen = {"tall.weight", "norm.bias"}
        assert full["module"].keys() - trained["module"].keys() == frozen
        assert full["frozen_param_shapes"].keys() == full["frozen_param_fragments"].keys() == frozen
        assert trained["frozen_param_shapes"] is None and trained["frozen_param_fragments"] is None
        other = start(Net(frozen=True), ds_config())
        before = weights(other.module).clone()
        with pytest.raises(LayerWiseError, match="the checkpoint lacks norm.bias, tall.weight.*load_module_strict"):
            other.load_checkpoint(tmp_path, tag="trained")
        assert torch.equal(weights(other.module), before)
        train_engine(engine, 1)
        engine.save_checkpoint(tmp_path, tag="trained", exclude_frozen_parameters=True)
        nn.init.constant_(other.module.tall.weight, 3)
        capsys.readouterr()
        other.load_checkpoint(tmp_path, tag="trained", load_module_strict=False)
        told = "lacks norm.bias, tall.weight, which the model has: these keep their own values"
        assert capsys.readouterr().out.count(told) == (dist.get_rank() == 0)
        assert_equal_states(states(other), states(engine))
        assert bool((other.module.tall.weight == 3).all())

    @pytest.mark.parametrize("exclude", [False, True])
    def test_half_precision_weights_alone(self, exclude, tmp_path):
        engine = start(Net(frozen=True), ds_config(bf16={"enabled": True}, layerwise={"overlap_param_gather": True}))
        train_engine(engine, 1)
        assert engine.save_16bit_model(tmp_path, exclude_frozen_parameters=exclude)
        dist.barrier()
        found = torch.load(tmp_path / "pytorch_model.bin")
        expected = {name: value for name, value in engine.module.state_dict().items()
                    if not exclude or name not in ("tall.weight", "norm.bias")}
        assert found.keys() == expected.keys()
        assert all(found[name].dtype == torch.bfloat16 and torch.equal(found[name], expected[name]) for name in found)


class TestLoading(DistributedTest):
    def saved(self, folder, **config):
        engine = train_engine(start(Net(), ds_config(scheduler=WARMUP, **config)), 3)
        engine.save_checkpoint(folder, client_state={"epoch": 4, "seen": [1, 2]})
        return engine

    def test_everything(self, tmp_path, monkeypatch):
        engine = self.saved(tmp_path)
        other = start(Net(), ds_config(scheduler=WARMUP))
        load, mapped = torch.load, {}
        monkeypatch.setattr(torch, "load", lambda file, *args, **kwargs: mapped.update({
            Path(file).name: kwargs.get("mmap")}) or load(file, *args, **kwargs))
        _, client = other.load_checkpoint(tmp_path)
        # DeepSpeed reads the model's file.
        assert mapped.pop("mp_rank_00_model_states.pt", None) is None
        assert mapped and all(mapped.values()), "a file was read into memory"
        assert client["epoch"] == 4 and client["seen"] == [1, 2]
        assert (other.global_steps, other.get_lr()) == (3, engine.get_lr())
        assert_equal_states(states(other), states(engine))

    @pytest.mark.parametrize("kind", ["none", "regular", "universal", "with a client's object", "loaded by a function"])
    def test_a_scheduler_of_another_kind_starts_afresh(self, kind, tmp_path, capsys):
        def steps(optimizer):
            return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

        tag = "tag_universal" if kind in ("universal", "with a client's object") else "tag"
        options = {"custom_load_fn": lambda src, dst: dst.load_state_dict(src)} if "function" in kind else {}
        engine = train_engine(start(Net(), ds_config(layerwise={"save_universal": True}),
                                    lr_scheduler=None if kind == "none" else steps), 3)
        engine.save_checkpoint(tmp_path, tag="tag", client_state={"mine": Mine()} if "object" in kind else {})
        other = start(Net(), ds_config(scheduler=WARMUP))
        schedule = other.lr_scheduler.state_dict()
        capsys.readouterr()
        other.load_checkpoint(tmp_path, tag=tag, **options)
        if dist.get_rank() == 0:
            assert capsys.readouterr().out.count("WarmupLR starts afresh, because the checkpoint has no state") == 1
        assert torch.equal(weights(other.module), weights(engine.module))
        assert_equal_states(states(other), states(engine))
        assert other.lr_scheduler.state_dict() == schedule and other.global_steps == 3
        train_engine(other, 1, first=3)

    def test_a_scheduler_without_any_state(self, tmp_path):
        engine, other = (start(Net(), ds_config(), lr_scheduler=Still) for _ in range(2))
        train_engine(engine, 1)
        engine.save_checkpoint(tmp_path)
        other.load_checkpoint(tmp_path)
        assert_equal_states(states(other), states(engine))

    @pytest.mark.parametrize("options", [{"load_optimizer_states": False}, {"load_module_only": True}])
    def test_no_optimizer_states(self, options, tmp_path):
        engine = self.saved(tmp_path, bf16={"enabled": True})
        # Other buckets have other owners.
        other = start(Net(), ds_config(scheduler=WARMUP, bf16={"enabled": True}, bucket_numel=10**9))
        other.load_checkpoint(tmp_path, **options)
        assert torch.equal(weights(other.module), weights(engine.module))
        for name, value in masters(other).items():
            assert torch.equal(value, engine.module.get_parameter(name).detach().float()), name
        assert not any(value.any() for value in states(other).values())
        assert other.global_steps == (0 if "load_module_only" in options else 3)

    @pytest.mark.parametrize("sections", [{}, BF16, {
        "bf16": {"enabled": True}, "layerwise": {"master_dtype": "bfloat16+remainder"}}])
    def test_weights_that_the_users_own_function_changes_are_trained_from(self, sections, tmp_path):
        """The states are the checkpoint's, on all ranks alike; what it leaves keeps the masters' precision."""
        engine = self.saved(tmp_path, **sections)
        other = start(Net(), ds_config(scheduler=WARMUP, **sections))

        def halve_embedding(src, dst):
            dst.load_state_dict({name: value / 2 if name == "embed.weight" else value for name, value in src.items()})

        other.load_checkpoint(tmp_path, custom_load_fn=halve_embedding)
        assert_same_on_all_ranks(other.module)
        before, kept = engine.module.state_dict(), masters(engine)
        for name, value in masters(other).items():
            halved = name == "embed.weight"
            assert torch.equal(value, before[name].float() / 2 if halved else kept[name]), name
            assert torch.equal(other.module.get_parameter(name), before[name] / (2 if halved else 1)), name
        assert_equal_states(states(other), states(engine))
        train_engine(other, 1, first=3)
        assert_same_on_all_ranks(other.module)

        def fill_with_twos(src, dst):
            dst.load_state_dict({name: torch.full_like(value, 2) for name, value in src.items()})

        other.load_checkpoint(tmp_path, custom_load_fn=fill_with_twos, load_optimizer_states=False)
        assert bool((weights(other.module) == 2).all())
        assert all(bool((value == 2).all()) for value in masters(other).values())

    def test_a_function_of_the_users_own_is_refused_where_it_would_not_be_called(self, tmp_path):
        engine = self.saved(tmp_path, layerwise={"save_universal": True})
        before = weights(engine.module).clone()
        with pytest.raises(LayerWiseError, match="is a universal checkpoint.*would not call custom_load_fn"):
            engine.load_checkpoint(tmp_path, tag="global_step3_universal", custom_load_fn=lambda src, dst: None)
        assert torch.equal(weights(engine.module), before)

    @pytest.mark.parametrize("options", [{"load_optimizer_states": False}, {"load_module_only": True}])
    def test_weights_alone_in_mid_step_forget_the_gradients_of_others(self, stage, options, tmp_path):
        saved = train_engine(start(Net(), ds_config(gas=2, stage=stage)), 2, gas=2)
        saved.save_checkpoint(tmp_path)
        engine, fresh = (start(Net(), ds_config(gas=2, stage=stage)) for _ in range(2))
        train_engine(engine, 1, gas=2)
        engine.backward(engine((1, 0, dist.get_rank())) * 64)
        engine.step()
        for each in (engine, fresh):
            each.load_checkpoint(tmp_path, **options)
            for value in internals.states(each).values():
                for state in value.values():
                    state.zero_()
            each.optimizer.progress.updates = 0
            train_engine(each, 1, gas=2, first=3)
        assert engine.micro_steps % 2 == fresh.micro_steps % 2 == 0
        assert torch.equal(weights(engine.module), weights(fresh.module))

    @pytest.mark.parametrize("sections", [{}, BF16])
    def test_two_values_for_what_is_one_parameter_here(self, sections, tmp_path):
        self.saved(tmp_path, **sections)
        other = start(Net(tied=True), ds_config(scheduler=WARMUP, **sections))
        before = weights(other.module).clone()
        with pytest.raises(LayerWiseError, match="embed.weight and head.weight are one parameter here, but differ"):
            other.load_checkpoint(tmp_path)
        assert torch.equal(weights(other.module), before) and other.global_steps == 0
        # As torch does, the last of them; there is no master that would be another.
        other.load_checkpoint(tmp_path, load_optimizer_states=False)
        assert_same_on_all_ranks(other.module)
        for name, value in masters(other).items():
            assert torch.equal(value, other.module.get_parameter(name).float()), name

    def test_a_value_that_is_no_number_is_the_same_under_both_names(self, tmp_path):
        engine, other = (start(Net(tied=True), ds_config()) for _ in range(2))
        with torch.no_grad():
            engine.module.embed.weight[0, 0] = math.nan
        train_engine(engine, 1)
        engine.save_checkpoint(tmp_path)
        other.load_checkpoint(tmp_path)
        assert torch.equal(other.module.head.weight.isnan(), engine.module.embed.weight.isnan())

    @pytest.mark.parametrize("differ", [False, True])
    def test_values_of_two_dtypes_for_what_is_one_parameter_here(self, differ, tmp_path):
        module = Net()
        module.head.bfloat16()
        with torch.no_grad():
            module.embed.weight.copy_(module.head.weight)
            module.embed.weight[0, 0] += differ
        start(module, ds_config()).save_checkpoint(tmp_path)
        other = start(Net(tied=True), ds_config(layerwise={"on_missing_state": "fresh"}))
        if differ:
            with pytest.raises(LayerWiseError, match="embed.weight and head.weight are one parameter here, but differ"):
                other.load_checkpoint(tmp_path)
        else:
            other.load_checkpoint(tmp_path)
            assert torch.equal(other.module.head.weight, module.embed.weight)

    @pytest.mark.parametrize("how", ["universal", "one file"])
    def test_two_values_for_what_is_one_parameter_here_where_the_engine_loads_nothing(self, how, tmp_path):
        engine = start(Net(), ds_config(layerwise={"save_universal": True}))
        other = start(Net(tied=True), ds_config(checkpoint={"load_universal": True}))
        before = weights(other.module).clone()
        if how == "universal":
            save, load, lenient = engine.save_checkpoint, other.load_checkpoint, {"load_module_strict": False}
        else:
            save, load = engine.optimizer.save_state_dict_to_file, other.optimizer.load_state_dict_from_file
            lenient = {"strict": False}
        save(tmp_path / "saved")
        with pytest.raises(LayerWiseError, match="embed.weight and head.weight are one parameter here, but differ"):
            load(tmp_path / "saved")
        assert torch.equal(weights(other.module), before)
        load(tmp_path / "saved", **lenient)
        assert torch.equal(other.module.head.weight, engine.module.embed.weight)
        with torch.no_grad():
            engine.module.head.weight.copy_(engine.module.embed.weight)
        engine.optimizer.refresh_fp32_params()
        save(tmp_path / "saved")
        load(tmp_path / "saved")
        assert torch.equal(other.module.head.weight, engine.module.embed.weight)

    def test_a_model_with_other_parameters_or_a_tag_that_is_not_there(self, tmp_path):
        engine = self.saved(tmp_path)
        other = start(Net(odd=True), ds_config(scheduler=WARMUP))
        before = weights(other.module).clone()
        with pytest.raises(LayerWiseError, match="the checkpoint lacks empty, transposed, unused.bias, unused.weight"):
            other.load_checkpoint(tmp_path)
        assert torch.equal(weights(other.module), before)
        smaller = start(nn.Sequential(nn.Linear(4, 4)), ds_config(scheduler=WARMUP))
        with pytest.raises(LayerWiseError, match="the checkpoint lacks 0.bias, 0.weight, which the model has"):
            smaller.load_checkpoint(tmp_path)
        with pytest.raises(LayerWiseError, match="global_step9 does not exist; .* holds global_step3"):
            engine.load_checkpoint(tmp_path, tag="global_step9")
        on_rank_0(lambda: (tmp_path / "latest").write_text(""))
        with pytest.raises(LayerWiseError, match="latest holds ''; write"):
            engine.load_checkpoint(tmp_path)

    def test_files_in_the_older_form_of_torch(self, tmp_path):
        config = ds_config(checkpoint={"checkpoint_serialization": False})
        engine = train_engine(start(Net(), config), 2)
        engine.save_checkpoint(tmp_path)
        other = loaded(start(Net(), ds_config()), tmp_path)
        assert_equal_states(states(other), states(engine))
        path = tmp_path / "global_step2" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        on_rank_0(lambda: path.write_bytes(content))
        with pytest.raises(LayerWiseError, match=f"{path.name} is damaged"):
            other.load_checkpoint(tmp_path)


class TestWhatOneRankMeetsAlone(DistributedTest):
    """DeepSpeed's own reading; the others neither wait for that rank nor go on without it."""

    @pytest.mark.parametrize("what", ["read", "look", "class", "function", "universal", "module"])
    def test_is_an_error_on_all_of_them(self, what, tmp_path, monkeypatch):
        engine = train_engine(start(Net(), ds_config(layerwise={"save_universal": True}, scheduler=WARMUP)), 1)
        engine.save_checkpoint(tmp_path, tag="tag", client_state={"mine": Mine()} if what == "class" else {})
        expected = states(engine)
        other = start(Net(), ds_config(scheduler=WARMUP))
        schedule = other.lr_scheduler.state_dict()
        options = {"tag": "tag_universal" if what == "universal" else "tag", "load_module_only": what == "module"}
        if what == "function":
            options["custom_load_fn"] = lambda src, dst: 1 // (1 - dist.get_rank()) and dst.load_state_dict(src)
        with monkeypatch.context() as now, pytest.raises(Exception) as error:
            if dist.get_rank() == 1:
                self.break_it(what, now)
            other.load_checkpoint(tmp_path, **options)
        assert dist.get_rank() == 1 or "rank 1 failed: " in str(error.value)
        # The engine may have counted before the ranks agreed once more.
        assert (other.global_steps, other.global_samples, other.lr_scheduler.state_dict()) == (0, 0, schedule)
        # Ranks are not out of step.
        other.load_checkpoint(tmp_path, tag="tag_universal" if what == "universal" else "tag")
        assert_equal_states(states(other), expected)

    def break_it(self, what, now):
        load, exists = torch.load, os.path.exists

        def fails(path, *args, **options):
            if options.get("weights_only") is False and "model_states" in str(path):
                raise OSError(errno.EIO, "Input/output error")
            return load(path, *args, **options)

        if what in ("read", "universal", "module"):
            now.setattr(torch, "load", fails)
        elif what == "look":
            now.setattr(os.path, "exists", lambda path: "model_states" not in str(path) and exists(path))
        elif what == "class":
            now.delattr(sys.modules[__name__], "Mine")


WRITER = {"type": "PYTHON", "decoupled": True, "data_parallel": "replica"}

#: Ranks of all runs are forks of one process that has imported everything; each ends as a process of its own does.
SCRIPT = """
    import json
    import multiprocessing
    import os
    import signal
    import sys
    import time
    from datetime import timedelta

    import deepspeed
    import torch

    from tests.support.training import Net, ds_config, start, train_engine

    def main(folder, end, count, writer):
        torch.set_num_threads(1)
        # Only inference uses this operator, and building it takes a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed("gloo", timeout=timedelta(seconds=250))
        rank, store = torch.distributed.get_rank(), torch.distributed.distributed_c10d._get_default_store()
        assert store.timeout == timedelta(seconds=250)
        engines = [start(Net(), ds_config(checkpoint={"writer": eval(writer)})) for _ in range(int(count))]
        for number, engine in enumerate(engines):
            train_engine(engine, 1)
            engine.save_checkpoint(f"{folder}/{number}")
        if end == "no groups":
            torch.distributed.destroy_process_group()
        elif end == "no writer" and rank == 0:
            engines[0].checkpoint_engine.ckpt_process.kill()
            engines[0].checkpoint_engine.ckpt_process.join()
        elif end.startswith("error") and rank == 1:
            raise RuntimeError("mine")
        elif end in ("late", "Ctrl-C"):
            if rank == 0:
                time.sleep(10)
            elif end == "late":
                store.set_timeout(timedelta(seconds=2))
            else:
                signal.signal(signal.SIGALRM, signal.default_int_handler)
                signal.alarm(3)

    if __name__ == "__main__":
        pids = []
        for args, env, log in json.loads(sys.argv[1]):
            pids.append(os.fork())
            if not pids[-1]:
                break
        if all(pids):
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
            print(json.dumps(codes), flush=True)
            os._exit(0)
        os.environ.update(env)
        for number in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        if args[1].endswith("process"):
            process = multiprocessing.get_context("spawn").Process(target=main, args=args)
            process.start()
            process.join()
            sys.exit(process.exitcode)
        main(*args)
"""

#: By how a script ends, why nothing is committed.
ENDS = {"nothing": "", "no groups": "the process groups are gone", "no writer": "checkpoint process is not running",
        "error": "an error has ended the script of rank 1", "late": "rank 1 has given up waiting",
        "Ctrl-C": "rank 1 has given up waiting", "a process": "",
        "error in a process": "an error has ended the script of rank 1"}


@pytest.mark.parametrize("ends", [
    ("nothing", "error"),
    pytest.param(tuple(end for end in ENDS if end not in ("nothing", "error")), marks=pytest.mark.thorough)])
def test_a_script_that_does_not_destroy_its_engines(ends, tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    env = {"CROSS_SIZE": "1", "CROSS_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    ranks = []
    for end in ends:
        port = str(free_port())
        for rank in ("0", "1"):
            args = [str(tmp_path / end), end, str(count_of(end)), str(WRITER)]
            ranks.append((args, {**env, "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank},
                          str(tmp_path / f"{end} {rank}")))
    done = subprocess.run([sys.executable, tmp_path / "script.py", json.dumps(ranks)], capture_output=True, text=True,
                          timeout=400, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])})
    codes = json.loads(done.stdout.splitlines()[-1])
    for number, end in enumerate(ends):
        said = [(tmp_path / f"{end} {rank}").read_text() for rank in range(2)]
        assert codes[2 * number:2 * number + 2] == ([1, 1] if ENDS[end] else [0, 0]), said
        # Where one save has failed, the other is committed all the same.
        engines = count_of(end)
        whole = [(tmp_path / end / str(engine) / "latest").exists() for engine in range(engines)]
        assert whole == [not ENDS[end], not ENDS[end] or end == "no writer"][:engines], said
        for rank, text in enumerate(said):
            told = [line for line in text.splitlines() if "not committed at the end of the script" in line]
            # Of an error that all have, the first tells.
            assert len(told) == (1 - rank if end == "no writer" else engines * bool(ENDS[end])), said
            assert all(f"rank {rank}: " in line and ENDS[end] in line
                       and line.count("what was saved before is still there") == 1 for line in told), said


def count_of(end):
    """The number of engines of a script."""
    return 2 if end == "no writer" or os.environ.get("THOROUGH") == "1" else 1


class TestDeepSpeedsWriters(DistributedTest):
    @pytest.fixture(autouse=True)
    def one_node(self, monkeypatch):
        """Set what a launcher sets where there is a single node."""
        monkeypatch.setenv("CROSS_SIZE", "1")
        monkeypatch.setenv("CROSS_RANK", "0")

    @pytest.mark.parametrize("decoupled", [False, True])
    def test_a_checkpoint_appears_when_it_is_whole(self, decoupled, tmp_path):
        # Without data_parallel, DeepSpeed 0.19.8 looks for an attribute that it does not have.
        config = ds_config(checkpoint={"writer": {**WRITER, "decoupled": decoupled}})
        engine = train_engine(start(Net(), config), 2)
        engine.save_checkpoint(tmp_path)
        expected = states(engine)
        assert (tmp_path / "latest").exists() is not decoupled
        train_engine(engine, 1, first=2)
        assert (tmp_path / "latest").read_text() == "global_step2" and folders(tmp_path) == ["global_step2"]
        engine.save_checkpoint(tmp_path)
        at_three = states(engine)
        engine.destroy()
        assert (tmp_path / "latest").read_text() == "global_step3"
        assert folders(tmp_path) == ["global_step2", "global_step3"]
        other = loaded(start(Net(), ds_config()), tmp_path)
        assert_equal_states(states(other), at_three)
        other.load_checkpoint(tmp_path, tag="global_step2")
        assert_equal_states(states(other), expected)
        Manifest.read(tmp_path / "global_step3").check(tmp_path / "global_step3")

    def test_a_load_waits_for_the_last_save(self, tmp_path):
        engine = start(Net(), ds_config(checkpoint={"writer": WRITER}))
        for tag in ("a", None, "b"):
            train_engine(engine, 2)
            engine.save_checkpoint(tmp_path, tag="a" if tag is None else tag)
            saved = states(engine)
            path, _ = engine.load_checkpoint(tmp_path, tag=tag)
            assert path is not None
            assert_equal_states(states(engine), saved)
        engine.destroy()

    def test_a_file_that_one_rank_cannot_read_is_an_error_on_all_and_the_processes_end(self, tmp_path, monkeypatch):
        """Nobody destroys the engine that loads, and nothing waits for the process that would write for it."""
        engine, other = start(Net(), ds_config()), start(Net(), ds_config(checkpoint={"writer": WRITER}))
        train_engine(engine, 1)
        engine.save_checkpoint(tmp_path)
        load = torch.load

        def fails(path, *args, **options):
            # As DeepSpeed's engine of this kind reads.
            if "weights_only" not in options and "model_states" in str(path):
                raise OSError(errno.EIO, "Input/output error")
            return load(path, *args, **options)

        with monkeypatch.context() as now, pytest.raises((LayerWiseError, OSError)) as error:
            if dist.get_rank() == 1:
                now.setattr(torch, "load", fails)
            other.load_checkpoint(tmp_path)
        assert ("rank 1 failed: OSError" if dist.get_rank() == 0 else "Input/output error") in str(error.value)
        other.load_checkpoint(tmp_path)
        assert_equal_states(states(other), states(engine))

    def test_the_writer_gets_a_copy(self, tmp_path):
        """The process that writes has not even begun to read when everything it was given is overwritten."""
        config = ds_config(bf16={"enabled": True}, gas=2)
        engine = start(Net(), {**config, "checkpoint": {"writer": WRITER}})
        engine.module.register_buffer("seen", torch.ones(3))
        train_engine(engine, 2, gas=2)
        engine.backward(engine((2, 0, dist.get_rank())))
        expected, held = states(engine), {name: value.clone() for name, value in engine.module.state_dict().items()}
        mine = Mine()
        mine.average, client_state = torch.ones(3), {"mine": mine, "loss": torch.ones(2, requires_grad=True) * 2}
        engine.save_checkpoint(tmp_path, client_state=client_state)
        live = [*engine.module.state_dict().values(), mine.average, client_state["loss"]]
        for piece in internals.owned(engine).record():
            live += [piece.master, *piece.state.values()]
        with torch.no_grad():
            for tensor in live:
                tensor.fill_(77)
        engine.destroy()
        other = start(Net(), config)
        other.module.register_buffer("seen", torch.zeros(3))
        _, client_state = other.load_checkpoint(tmp_path)
        assert_equal_states(states(other), expected)
        for name, value in other.module.state_dict().items():
            assert torch.equal(value, held[name]), name
        assert client_state["mine"].average.tolist() == [1] * 3 and client_state["loss"].tolist() == [2, 2]

    def test_a_process_that_died_is_an_error_on_all_ranks(self, tmp_path):
        engine = train_engine(start(Net(), ds_config(checkpoint={"writer": WRITER})), 1)
        if dist.get_rank() == 1:
            engine.checkpoint_engine.ckpt_process.kill()
            engine.checkpoint_engine.ckpt_process.join()
        for first in (1, 2):
            engine.save_checkpoint(tmp_path)
            engine.backward(engine((first, 0, dist.get_rank())))
            with pytest.raises(LayerWiseError, match="the process that writes checkpoints beside the training has fai"):
                engine.step()
            engine.step()
        assert not (tmp_path / "latest").exists()
        engine.destroy()

    @pytest.mark.parametrize("stage", [1, 2])
    def test_a_pass_that_an_exception_ended_on_one_rank_leaves_the_last_save_whole(self, stage, tmp_path):
        """The other ranks are in the reduction of their pass when that rank comes to its step."""
        def interrupt(_):
            raise KeyboardInterrupt

        engine = train_engine(start(Net(), ds_config(stage=stage, checkpoint={"writer": WRITER})), 1)
        engine.save_checkpoint(tmp_path)
        saved = states(engine)
        with ExitStack() as failing:
            if dist.get_rank() == 0:
                failing.enter_context(pytest.raises(KeyboardInterrupt))
                failing.callback(engine.module.tall.weight.register_hook(interrupt).remove)
            engine.backward(engine((1, 0, dist.get_rank())))
        with pytest.raises(LayerWiseError, match="an exception has ended a backward pass of this step"):
            engine.step()
        engine.zero_grad()
        assert not (tmp_path / "latest").exists()
        train_engine(engine, 1, first=1)
        other = loaded(start(Net(), ds_config(stage=stage)), tmp_path)
        assert_equal_states(states(other), saved)
        train_engine(other, 1, first=1)
        assert_equal_states(states(engine), states(other))
        engine.destroy()

    def test_an_engine_that_another_has_succeeded_ends_its_save(self, tmp_path):
        module = Net()
        old = start(module, ds_config(checkpoint={"writer": WRITER}))
        train_engine(old, 1)
        old.save_checkpoint(tmp_path)
        _new = train_engine(start(module, ds_config()), 1)
        assert not (tmp_path / "latest").exists()
        old.destroy()
        assert (tmp_path / "latest").read_text() == "global_step1" and folders(tmp_path) == ["global_step1"]

    def test_an_engine_whose_construction_failed_can_be_destroyed(self):
        start_adamw(Net())
        unfinished, done = DeepSpeedEngine.__new__(DeepSpeedEngine), []
        torch.nn.Module.__init__(unfinished)
        unfinished._release_deepcompile_compiled_backward_state = lambda: done.append(True)
        unfinished._release_deepcompile_dynamo_config = unfinished.is_deepcompile_active = lambda: False
        unfinished.destroy()
        assert done

    def test_an_engine_of_stock_saves_as_it_did(self, tmp_path):
        stock = start_adamw(Net())
        train_engine(stock, 1)
        stock.save_checkpoint(tmp_path, client_state={"epoch": 1})
        assert sorted(os.listdir(tmp_path / "global_step1")) == [
            "mp_rank_00_model_states.pt", *(f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in (0, 1))]
        before = weights(stock.module).clone()
        train_engine(stock, 1)
        _, client = stock.load_checkpoint(tmp_path)
        assert torch.equal(weights(stock.module), before) and client["epoch"] == 1
