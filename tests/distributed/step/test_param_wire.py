"""``layerwise.param_wire`` "mxfp8": masters as without it, and the same weights of fewer bits on all ranks."""

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from torch import nn

from ds_layerwise.ranks.comm import comm
from tests.support import internals
from tests.support.checkpoints import ONE_FILE, assert_equal_states, assert_same_run, go_on_from, masters, whole_states
from tests.support.cli import run
from tests.support.harness import DistributedTest, made_once
from tests.support.microscaling import weights_of
from tests.support.reference import trainable, whole_number_loss
from tests.support.rooms import rooms
from tests.support.training import (
    BF16,
    MATRICES,
    Net,
    arrive_late,
    assert_same_on_all_ranks,
    ds_config,
    start,
    train_engine,
    train_engines,
    whole,
)
from tests.support.transports import plan_in_cuts

pytestmark = rooms("mxfp8", "masters", "weight_writes", "bucket_transfers", "transfer", "param_sync", "sent",
                   "checkpointing", "state_access", "first_step")


def config(in_mxfp8=True, *, layerwise=None, ratio=0, **changes):
    made = ds_config(layerwise={"alignment": 512, **({"param_wire": "mxfp8"} if in_mxfp8 else {}),
                                **(layerwise or {})}, **{**BF16, "clip": 5.0, **changes})
    if ratio:
        made["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "ratio": ratio}
    return made


def net():
    made = Net(odd=True)
    # DeepSpeed cannot make a parameter without elements whole at ZeRO stage 3.
    del made.empty
    return made


def started(in_mxfp8=True, **changes):
    return start(net(), config(in_mxfp8, **changes))


@pytest.fixture(params=[1, 3])
def stage(request):
    return request.param


CHECKED = {"check_writes": 1, "verify_first_step": True}


def assert_weights_are_masters(engine):
    """Weights are masters in MXFP8, of what is no matrix in bfloat16; the same on all ranks."""
    engine.optimizer.wait_for_params()
    params = dict(engine.module.named_parameters())
    for name, value in masters(engine).items():
        expected = weights_of(value) if name in MATRICES else value.bfloat16()
        assert torch.equal(whole(params[name]), expected), name
    assert_same_on_all_ranks(engine.module)


def assert_same_masters(engine, plain):
    """Masters and states are those of a run that sends bfloat16, bit for bit."""
    assert_equal_states(whole_states(engine), whole_states(plain))
    assert_weights_are_masters(engine)


class Matrices(nn.Module):
    """Matrices alone, with gradients that are whole numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        for number in range(6):
            setattr(self, f"w{number}", nn.Parameter(torch.randn(64, 96)))

    def forward(self, place):
        return whole_number_loss(self, place, set())


def bytes_of_step(engine, monkeypatch):
    """Return the bytes of buckets that this rank hands to other ranks in a step."""
    sent = []

    def counting(name, count):
        call = getattr(comm, name)

        def counted(*args, group, **kwargs):
            sent.append(count(*args, size=comm.size_of(group), rank=comm.rank_of(group), **kwargs))
            return call(*args, group=group, **kwargs)
        monkeypatch.setattr(comm, name, counted)

    def of_parts(out, value, *, size, rank, received=None, sent_to=None):
        to_self = value.numel() // size if sent_to is None else sent_to[rank]
        return (value.numel() - to_self) * value.itemsize

    counting("all_to_all", of_parts)
    counting("all_gather", lambda out, own, *, size, rank: own.nbytes * (size - 1))
    counting("broadcast", lambda value, *, out_of, size, rank: value.nbytes * (size - 1) * (out_of == rank))
    train_engine(engine, 1)
    engine.optimizer.wait_for_params()
    monkeypatch.undo()
    return sum(sent)


class TestTheSameRun(DistributedTest):
    world_size = 3

    @pytest.mark.parametrize("stage, cuts, ratio, layerwise", [
        pytest.param(1, False, 0, CHECKED, marks=pytest.mark.thorough), (2, True, 0.5, CHECKED),
        pytest.param(1, True, 0, {"overlap_param_gather": True}, marks=pytest.mark.thorough), (3, False, 0, CHECKED),
        pytest.param(3, False, 0.5, {}, marks=pytest.mark.world_size([2]))])
    def test_over_steps(self, stage, cuts, ratio, layerwise, monkeypatch, capsys):
        if cuts:
            plan_in_cuts(monkeypatch)
            arrive_late(monkeypatch)
        engine, plain = started(stage=stage, ratio=ratio, layerwise=layerwise), started(False, stage=stage)
        assert_weights_are_masters(engine)
        for step in range(3):
            train_engines((engine, plain), 1, first=step)
            assert_same_masters(engine, plain)
        assert not internals.owned(engine).written
        said = "the first update was verified" in capsys.readouterr().out
        assert said == (layerwise is CHECKED and dist.get_rank() == 0)

    @pytest.mark.world_size([1])
    def test_on_one_rank(self):
        engine, plain = started(), started(False)
        train_engines((engine, plain), 2)
        assert_same_masters(engine, plain)


class TestBytes(DistributedTest):
    world_size = 3

    @pytest.mark.parametrize("stage, cuts", [(1, False), (2, True), (2, False), (3, False)])
    def test_they_are_those_of_the_plan_and_at_most_76_percent(self, stage, cuts, monkeypatch):
        if cuts:
            plan_in_cuts(monkeypatch)
        engines = [start(Matrices(), config(each, stage=stage, bucket_numel=15_000)) for each in (True, False)]
        monkeypatch.undo()
        found = [bytes_of_step(engine, monkeypatch) for engine in engines]
        (few, ), (many, ) = (engine.optimizer.forecast().sent.values() for engine in engines)
        rank = dist.get_rank()
        # DeepSpeed gathers the cuts of all parameters twice, as before.
        fetched = (stage == 3) * 2 * 2 * (2 * 6 * 64 * 96 // 3)
        for each, sent in zip(found, (few, many), strict=True):
            assert each == sent.gradients[rank] + sent.parameters[rank] - fetched
        assert few.gradients == many.gradients
        assert [64 * each for each in few.parameters] == [33 * each for each in many.parameters]
        if stage < 3 and not cuts:
            few, many = (comm.sum_over_ranks(torch.tensor(each), group=None) for each in found)
            assert float(few / many) <= 0.76


class TestWrites(DistributedTest):
    world_size = 3

    def test_blocks_of_written_weights_follow_as_they_are_and_are_rounded_when_they_are_sent(self, stage, capsys):
        engine, plain = started(stage=stage, layerwise={"check_writes": 1}), started(False, stage=stage)
        train_engines((engine, plain), 2)
        before = masters(engine)
        with torch.no_grad():
            engine.module.tall.weight.data.view(-1)[70] = 0.3
            engine.module.embed.weight[5] = 0.25
        found = {name: safe_get_full_fp32_param(p) for name, p in trainable(engine.module).items()}
        # At stage 3, weights that are their masters do not wait at owners.
        assert {*internals.written_weights(engine)} <= {"tall.weight"}
        weight = engine.module.tall.weight.detach().float().flatten()
        expected = before["tall.weight"].flatten().clone()
        expected[64:96] = weight[64:96]
        assert torch.equal(found["tall.weight"].flatten(), expected) and expected[70] == torch.tensor(0.3).bfloat16()
        assert torch.equal(found["square.weight"], before["square.weight"])
        for name, p in trainable(plain.module).items():
            safe_set_full_fp32_param(p, found[name])
        for _ in range(2):
            # The weights stay as they were written, which is no second write.
            engine.optimizer.reload_weights()
            assert_equal_states(whole_states(engine), whole_states(plain))
        train_engines((engine, plain), 2, first=2)
        assert_same_masters(engine, plain)
        assert capsys.readouterr().out.count("weights were written between two steps") == (dist.get_rank() == 0)

    def test_masters_that_are_set_keep_their_precision(self, stage):
        engine, plain = started(stage=stage), started(False, stage=stage)
        train_engines((engine, plain), 1)
        draw = torch.Generator().manual_seed(5)
        for each in zip(trainable(engine.module).items(), trainable(plain.module).values(), strict=True):
            (name, p), twin = each
            value = torch.randn(internals.shapes(engine)[name], generator=draw)
            safe_set_full_fp32_param(p, value)
            safe_set_full_fp32_param(twin, value)
            assert torch.equal(safe_get_full_fp32_param(p), value), name
        assert_weights_are_masters(engine)
        train_engines((engine, plain), 2, first=1)
        assert_same_masters(engine, plain)
        assert not internals.owned(engine).written


class TestCheckpoints(DistributedTest):
    """Masters are exact, so that a run with MXFP8 and one without go on from each other."""

    world_size = 3

    @pytest.fixture
    def saved(self, class_tmpdir):
        return made_once(class_tmpdir / "saved", [3], self.save)

    def save(self, folder):
        for in_mxfp8 in (True, False):
            engine = started(in_mxfp8, layerwise={"save_universal": True})
            train_engine(engine, 3)
            engine.save_checkpoint(folder, tag=f"{in_mxfp8}")
            engine.optimizer.save_state_dict_to_file(folder / f"{in_mxfp8}_{ONE_FILE}")
            states = whole_states(engine)
            if dist.get_rank() == 0:
                torch.save(states, folder / "states.pt")

    @pytest.mark.parametrize("was, stage", [
        (True, 2), pytest.param(False, 1, marks=pytest.mark.thorough), (True, 3)])
    def test_a_run_goes_on_bit_for_bit(self, saved, was, stage):
        if dist.get_rank() == 0:
            code, out, err = run("verify", saved / f"{was}")
            assert code == 0 and not err, (out, err)
        engine = train_engine(started(stage=stage), 3)
        # What is loaded replaces what is there.
        other = started(stage=stage)
        for tag in (f"{was}", f"{was}_universal", None):
            train_engine(other, 1, first=8)
            if tag is None:
                other.optimizer.load_state_dict_from_file(saved / f"{was}_{ONE_FILE}")
            else:
                go_on_from(other, saved, tag)
            assert_same_run(other, engine, tag)
        train_engines((engine, other), 2, first=3)
        assert_same_run(other, engine)

    @pytest.mark.world_size([1, 2])
    def test_on_other_ranks(self, saved):
        engine, plain = (started(each, bucket_numel=300, layerwise={"layout": "lpt"}) for each in (True, False))
        for each in (engine, plain):
            train_engine(each, 1, first=8)
            each.load_checkpoint(saved, tag="True")
            assert_equal_states(whole_states(each), torch.load(saved / "states.pt"))
        for step in range(2):
            assert_same_masters(engine, plain)
            train_engines((engine, plain), 1, first=3 + step)
        assert_same_masters(engine, plain)
        assert_same_on_all_ranks(plain.module)

    @pytest.mark.world_size([2])
    def test_weights_alone_are_rounded_as_later_ones(self, saved, stage):
        without_masters = config(stage=stage)
        without_masters["zero_optimization"]["load_from_fp32_weights"] = False
        expected = {name: value.bfloat16().float() for (name, key), value
                    in torch.load(saved / "states.pt").items() if key == "fp32"}
        for made, options in ((config(stage=stage, layerwise=CHECKED), {"load_module_only": True}),
                              (config(stage=stage), {"load_optimizer_states": False}), (without_masters, {})):
            engine = start(net(), made)
            engine.load_checkpoint(saved, tag="False", **options)
            assert_equal_states({name: value.flatten() for name, value in masters(engine).items()}, expected, options)
            assert_weights_are_masters(engine)
            train_engine(engine, 1)

    @pytest.mark.world_size([2])
    def test_masters_stay_where_another_optimizer_rounds_weights_otherwise(self, tmp_path):
        entries = {True: [], False: [{"name": "tall.weight", "optimizer": "adamw"}]}
        for is_matrix in (True, False):
            first, then = (started(layerwise={"overrides": entries[now], "on_optimizer_change": "reset"})
                           for now in (is_matrix, not is_matrix))
            train_engine(first, 1).save_checkpoint(tmp_path, tag=f"{is_matrix}")
            then.load_checkpoint(tmp_path, tag=f"{is_matrix}")
            found, expected = (safe_get_full_fp32_param(each.module.tall.weight) for each in (then, first))
            assert torch.equal(found, expected)
