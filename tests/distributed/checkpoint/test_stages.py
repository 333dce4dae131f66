"""Checkpoints of each ZeRO stage, resumed at each, on any number of ranks; what DeepSpeed's scripts make of them."""

import itertools
import shutil
import subprocess
import sys

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
import torch.distributed.checkpoint as dcp

from ds_layerwise.engine.checkpoints import loading
from ds_layerwise.errors import LayerWiseError
from tests.support import internals
from tests.support.checkpoints import assert_equal_states, assert_same_run, loaded, on_rank_0, whole_states
from tests.support.cli import run
from tests.support.harness import DistributedTest, made_once
from tests.support.rooms import rooms
from tests.support.training import PRECISIONS, Net, ds_config, start, train_engine, weights, whole
from tests.support.universal import convert

pytestmark = rooms("stage3_files", "cut_sync", "loading", "saving", "verify")


def make(frozen=False):
    """A model with parameters without dimensions, which have one at stage 3."""
    net = Net(tied=True, frozen=frozen)
    net.norm.scale = torch.nn.Parameter(torch.tensor(2.0))
    net.norm.shift = torch.nn.Parameter(torch.tensor(3.0), requires_grad=not frozen)
    net.register_buffer("counter", torch.arange(3.0))
    return net


def config_of(stage, precision="bf16", **layerwise):
    return ds_config(stage=stage, clip=5.0, layerwise=layerwise, **PRECISIONS[precision])


def values_of(model):
    """Every parameter, whole, and every buffer, 1-D."""
    return {**{name: whole(param).cpu().flatten() for name, param in model.named_parameters()},
            **{name: buffer.flatten() for name, buffer in model.named_buffers()}}


def whole_ones(engine):
    """The parameters that are whole now."""
    return [name for name, param in engine.module.named_parameters() if param.numel() == param.ds_numel]


def save(folder, frozen=False):
    """A checkpoint of each stage and precision, and beside it what is in it."""
    num_ranks = dist.get_world_size()
    for stage in (1, 2, 3):
        for precision in PRECISIONS:
            config = config_of(stage, precision, save_universal=stage == 3)
            engine = train_engine(start(make(frozen), config), 2)
            engine.module.counter.add_(stage)
            tag = f"stage{stage}-{precision}-{num_ranks}ranks"
            engine.save_checkpoint(str(folder), tag=tag)
            states, values = whole_states(engine), values_of(engine.module)
            on_rank_0(lambda: torch.save((states, values), folder / f"{tag}.pt"))
            engine.destroy()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of all checkpoints of :func:`save`, which several classes read."""
    return tmp_path_factory.mktemp("stages")


def saved_by(folder, frozen=True):
    """Checkpoints of 2 and 3 ranks; made once."""
    return made_once(folder / f"frozen {frozen}", [2, 3], save, frozen=frozen)


class TestAllPairs(DistributedTest):
    world_size = [1, 2, 3, 4]
    thorough_on = (1, 3, 4)

    @pytest.fixture
    def saved(self, folder, frozen):
        return saved_by(folder, frozen)

    @pytest.mark.parametrize("frozen, precision, into", [
        pytest.param(*case, marks=[pytest.mark.thorough] * (
            case not in [(False, "fp32", 1), (True, "bf16", 2), (True, "bf16", 3)]))
        for case in itertools.product([False, True], ["fp32", "bf16"], [1, 2, 3])])
    def test_masters_states_and_weights_bit_for_bit(self, saved, frozen, precision, into):
        engine, other = (start(make(frozen), config_of(into, precision)) for _ in range(2))
        train_engine(engine, 1)
        for num_ranks in (2, 3):
            for stage in (1, 2, 3) if into == 3 else (3, ):
                tag = f"stage{stage}-{precision}-{num_ranks}ranks"
                states, values = torch.load(saved / f"{tag}.pt", weights_only=True)
                for form in ("_universal", "")[stage < 3:]:
                    loaded(engine, str(saved), tag=tag + form)
                    assert not internals.written_weights(engine)
                    assert_equal_states(whole_states(engine), states, tag + form)
                    assert_equal_states(values_of(engine.module), values, tag + form)
                    assert engine.global_steps == 2
                assert_same_run(*(train_engine(each, 1, first=2) for each in (engine, loaded(other, str(saved),
                                                                                             tag=tag))))


class TestWeightsAlone(DistributedTest):
    world_size = [2, 3]

    @pytest.fixture
    def saved(self, folder):
        return saved_by(folder)

    @pytest.mark.parametrize("into", [1, 2, 3])
    def test_they_are_there(self, saved, into):
        engine = start(make(True), config_of(into))
        for stage, form in {1: [(3, "_universal")], 2: [(3, "")], 3: [(3, ""), (2, ""), (3, "_universal")]}[into]:
            for options in ({"load_module_only": True}, {"load_optimizer_states": False}):
                train_engine(engine, 1)
                tag = f"stage{stage}-bf16-2ranks"
                _, values = torch.load(saved / f"{tag}.pt", weights_only=True)
                before = {key: value for key, value in whole_states(engine).items() if key[1] != "fp32"}
                loaded(engine, str(saved), tag=tag + form, **options)
                where = (stage, form, options)
                assert_equal_states(values_of(engine.module), values, where)
                found = {key: value for key, value in whole_states(engine).items() if key[1] != "fp32"}
                assert_equal_states(found, before, where)
                train_engine(engine, 1, first=2)
                assert not torch.equal(weights(engine.module)[:9], values["embed.weight"].float().flatten()[:9])

    @pytest.mark.parametrize("options", [{"load_module_only": True}, {"load_optimizer_states": False}], ids=str)
    def test_damage_is_found(self, saved, options, tmp_path):
        tag = "stage3-bf16-2ranks"
        on_rank_0(lambda: shutil.copytree(saved / tag, tmp_path / tag))
        path = tmp_path / tag / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
        on_rank_0(lambda: path.write_bytes(path.read_bytes()[:-200] + bytes(200)))
        with pytest.raises(LayerWiseError, match="damaged"):
            start(make(True), config_of(3)).load_checkpoint(str(tmp_path), tag=tag, **options)

    def test_files_that_are_gone_are_named(self, saved, tmp_path):
        engine = start(make(True), config_of(3))
        before = values_of(engine.module)
        for number, (tag, gone, told) in enumerate([
                ("stage3-bf16-2ranks", ["*_rank_1_*_optim_states.pt"], "rank_1_mp_rank_00_optim_states.pt is missing"),
                ("stage3-bf16-2ranks", ["*_optim_states.pt"], "optim_states.pt is missing"),
                ("stage3-bf16-2ranks", ["*_optim_states.pt", "*.json"], "no files named .*optim_states.pt"),
                ("stage3-bf16-2ranks", ["mp_rank*"], "mp_rank_00_model_states.pt is missing"),
                ("stage1-bf16-2ranks", ["mp_rank*", "*.json"], "has no mp_rank_00_model_states.pt"),
                ("stage3-bf16-2ranks_universal", ["zero"], "zero/.* is missing")]):
            folder = tmp_path / str(number)

            def take_away(folder=folder, tag=tag, gone=gone):
                shutil.copytree(saved / tag, folder / tag)
                for path in itertools.chain(*map((folder / tag).glob, gone)):
                    path.unlink() if path.is_file() else shutil.rmtree(path)

            on_rank_0(take_away)
            for options in ({"load_module_only": True}, {"load_module_only": True, "load_module_strict": False},
                            {"load_optimizer_states": False}):
                with pytest.raises(LayerWiseError, match=told):
                    engine.load_checkpoint(str(folder), tag=tag, **options)
                assert_equal_states(values_of(engine.module), before)


class TestPartsOfACheckpoint(DistributedTest):
    world_size = 2

    @pytest.fixture
    def saved(self, folder):
        return saved_by(folder)

    @staticmethod
    def load(src, dst):
        with deepspeed.zero.GatheredParameters(list(dst.parameters()), modifier_rank=0):
            dst.load_state_dict({name: src[name].view_as(value) for name, value in dst.state_dict().items()})

    @pytest.mark.parametrize("stage", [2, 3])
    def test_an_error_on_one_rank_leaves_all_as_they_were(self, saved, stage, monkeypatch):
        engine = train_engine(start(make(True), config_of(3)), 1)
        stay = whole_ones(engine)
        states, values = whole_states(engine), values_of(engine.module)

        def wrong(*_, **__):
            raise LayerWiseError("of rank 1 alone")

        if dist.get_rank() == 1:
            monkeypatch.setattr(loading, "_check_names_and_shapes", wrong)
        with pytest.raises(LayerWiseError, match="of rank 1 alone"):
            engine.load_checkpoint(str(saved), tag=f"stage{stage}-bf16-2ranks")
        assert whole_ones(engine) == stay != []
        assert_equal_states(whole_states(engine), states)
        assert_equal_states(values_of(engine.module), values)

    @pytest.mark.parametrize("stage, into", [(3, 3), (3, 2), (2, 3)])
    def test_a_layer_that_is_not_in_it_keeps_its_weights(self, saved, stage, into, capsys):
        net = make(True)
        net.more = torch.nn.Linear(12, 12)
        engine = start(net, config_of(into))
        before = values_of(engine.module)
        capsys.readouterr()
        loaded(engine, str(saved), tag=f"stage{stage}-bf16-2ranks", load_module_strict=False)
        told = "lacks more.bias, more.weight, which the model has: these keep their own values"
        assert capsys.readouterr().out.count(told) == (dist.get_rank() == 0)
        _, values = torch.load(saved / f"stage{stage}-bf16-2ranks.pt", weights_only=True)
        expected = {name: values.get(name, before[name]) for name in before}
        assert before["more.weight"].any()
        assert_equal_states(values_of(engine.module), expected)

    def test_a_custom_load_of_stage_2_at_stage_3(self, saved):
        _, values = torch.load(saved / "stage2-bf16-2ranks.pt", weights_only=True)
        engine = start(make(True), config_of(3))
        for options in ({"load_module_only": True}, {"load_optimizer_states": False}):
            # Rank 0 waits for the error of rank 1 before it fetches what it has loaded.
            with pytest.raises((LayerWiseError, ZeroDivisionError), match="by zero"):
                engine.load_checkpoint(str(saved), tag="stage2-bf16-2ranks", **options,
                                       custom_load_fn=lambda src, dst: 1 // (1 - dist.get_rank()))
        engine.load_checkpoint(str(saved), tag="stage2-bf16-2ranks", custom_load_fn=self.load)
        assert_equal_states(values_of(engine.module), values)
        train_engine(engine, 1, first=2)

    @pytest.mark.parametrize("into", [2, 3])
    def test_a_custom_load_of_stage_3_is_refused(self, saved, into):
        engine = start(make(True), config_of(into))
        with pytest.raises(LayerWiseError, match="was saved at ZeRO stage 3, or in another number"):
            engine.load_checkpoint(str(saved), tag="stage3-bf16-2ranks", custom_load_fn=self.load)


class OwnStateDict(Net):
    """A module that makes something else of its state."""

    def __init__(self, kind):
        super().__init__(frozen=True)
        self.kind = kind

    def state_dict(self, *args, **kwargs):
        found = super().state_dict(*args, **kwargs)
        if self.kind == "raises on rank 0" and dist.get_rank() == 0:
            raise ValueError("of rank 0 alone")
        if self.kind != "as it is":
            found = {name: value.clone() for name, value in found.items()}
        return {f"x.{name}": value for name, value in found.items()} if "renamed" in self.kind else found


class TestStateDictsOfModels(DistributedTest):
    world_size = 2

    def test_copies_are_known_by_their_names(self, tmp_path):
        engine = train_engine(start(OwnStateDict("copies"), config_of(3)), 2)
        engine.save_checkpoint(str(tmp_path), tag="t")
        for load_module_only in (False, True):
            other = start(OwnStateDict("copies"), config_of(3))
            other.load_checkpoint(str(tmp_path), tag="t", load_module_only=load_module_only)
            assert_equal_states(values_of(other.module), values_of(engine.module))

    @pytest.mark.parametrize("kind, message", [
        ("renamed copies", "gives x.experts without elements"), ("raises on rank 0", "of rank 0 alone")])
    def test_a_state_that_cannot_be_saved(self, kind, message, tmp_path):
        engine = train_engine(start(OwnStateDict("as it is"), config_of(3)), 1)
        engine.module.kind = kind
        with pytest.raises((LayerWiseError, ValueError), match=message):
            engine.save_checkpoint(str(tmp_path), tag="t")
        assert not list(tmp_path.glob("t/*"))
        engine.module.kind = "as it is"
        engine.save_checkpoint(str(tmp_path), tag="t")


class Renamed(torch.nn.Module):
    """The same model under a longer name, or with one layer more."""

    def __init__(self, more=False):
        super().__init__()
        self.inner = make(True)
        if more:
            self.more = torch.nn.Linear(4, 4)

    def forward(self, place):
        return self.inner(place)


class TestOtherModels(DistributedTest):
    """A run that trains, or names, other things than what was saved."""

    world_size = 2

    @pytest.fixture
    def saved(self, folder):
        return saved_by(folder)

    @pytest.mark.parametrize("stage, into, options", [
        (3, 3, {}), (3, 2, {}), (2, 3, {}), (3, 2, {"load_module_only": True}), (3, 3, {"load_module_strict": False})],
        ids=str)
    def test_trained_parameters_are_frozen_and_the_reverse(self, saved, stage, into, options):
        _, values = torch.load(saved / f"stage{stage}-bf16-3ranks.pt", weights_only=True)
        net = make()
        net.square.weight.requires_grad = net.embed.weight.requires_grad = False
        engine = start(net, config_of(into))
        engine.load_checkpoint(str(saved), tag=f"stage{stage}-bf16-3ranks", **options)
        assert_equal_states(values_of(engine.module), values)
        train_engine(engine, 1, first=2)

    @pytest.mark.parametrize("stage, into", [(3, 3), (3, 2), (2, 3)])
    def test_names(self, saved, stage, into):
        tag = f"stage{stage}-bf16-3ranks"
        _, values = torch.load(saved / f"{tag}.pt", weights_only=True)
        engine = start(Renamed(), config_of(into))
        with pytest.raises(LayerWiseError, match="inner.conv.bias"):
            engine.load_checkpoint(str(saved), tag=tag)
        config = config_of(into) | {"layerwise": {"rename": {"*": "inner.*"}}}
        engine = start(Renamed(), config)
        engine.load_checkpoint(str(saved), tag=tag)
        assert_equal_states(values_of(engine.module.inner), values)
        engine = start(Renamed(more=True), config)
        with pytest.raises(LayerWiseError, match="more.bias"):
            engine.load_checkpoint(str(saved), tag=tag)
        engine.load_checkpoint(str(saved), tag=tag, load_module_strict=False)
        assert_equal_states(values_of(engine.module.inner), values)
        engine = start(make(True), config_of(into) | {"layerwise": {"rename": {"nothing": "else"}}})
        with pytest.raises(LayerWiseError, match="matches no name in the checkpoint"):
            engine.load_checkpoint(str(saved), tag=tag)

    @pytest.mark.parametrize("into", [2, 3])
    def test_two_values_for_what_is_one_parameter_here(self, into, tmp_path):
        engine = train_engine(start(Net(), config_of(3)), 2)
        engine.save_checkpoint(str(tmp_path), tag="t")
        with pytest.raises(LayerWiseError, match="embed.weight and head.weight are one parameter here"):
            start(Net(tied=True), config_of(into)).load_checkpoint(str(tmp_path), tag="t")


class TestWithoutFrozenOnes(DistributedTest):
    world_size = 2

    def test_nothing_of_them_is_gathered(self, tmp_path, monkeypatch):
        engine = train_engine(start(make(True), config_of(3)), 2)
        engine.empty_partition_cache()
        frozen = engine.module.tall.weight
        monkeypatch.setattr(frozen, "all_gather", lambda *args, **kwargs: pytest.fail("gathered"))
        engine.save_checkpoint(str(tmp_path), tag="t", exclude_frozen_parameters=True)
        monkeypatch.undo()
        other = loaded(start(make(True), config_of(3)), str(tmp_path), tag="t", load_module_strict=False)
        assert_same_run(other, engine)


class TestUniversal(DistributedTest):
    world_size = 2

    def test_it_needs_what_is_frozen(self, tmp_path):
        engine = train_engine(start(make(True), config_of(3) | {"layerwise": {"save_universal": True}}), 1)
        with pytest.raises(LayerWiseError, match="^exclude_frozen_parameters is true, and a universal checkpoint"):
            engine.save_checkpoint(str(tmp_path), exclude_frozen_parameters=True)
        assert not list(tmp_path.iterdir())


class TestFilesOfWholeParameters(DistributedTest):
    """Checkpoints of each stage are loaded at each, also on another number of ranks."""

    @staticmethod
    def save(folder):
        for stage in (2, 3):
            engine = train_engine(start(make(True), config_of(stage)), 2)
            engine.optimizer.save_state_dict_to_file(folder / f"{stage}.safetensors")
            dcp.save(engine.optimizer.sharded_state_dict(), checkpoint_id=str(folder / f"{stage}"))
            states, values = whole_states(engine), values_of(engine.module)
            on_rank_0(lambda: torch.save((states, values), folder / f"{stage}.pt"))
            engine.destroy()

    @pytest.fixture
    def saved(self, class_tmpdir):
        return made_once(class_tmpdir / "saved", [3], self.save)

    @pytest.mark.parametrize("stage, into", [(3, 3), (3, 2), (2, 3)])
    def test_they_come_back(self, saved, stage, into):
        states, values = torch.load(saved / f"{stage}.pt", weights_only=True)
        engine = start(make(True), config_of(into))
        for sharded in (False, True):
            train_engine(engine, 1)
            with deepspeed.zero.GatheredParameters(engine.module.tall.weight, modifier_rank=0):
                # In one file there is nothing that is frozen.
                engine.module.tall.weight.data.mul_(2 if sharded else 1)
            if sharded:
                engine.optimizer.load_sharded_state_dict(str(saved / f"{stage}"))
            else:
                engine.optimizer.load_state_dict_from_file(saved / f"{stage}.safetensors")
            assert_equal_states(whole_states(engine), states, sharded)
            assert_equal_states(values_of(engine.module), values, sharded)


class TestDeepSpeedsScripts(DistributedTest):
    world_size = 1

    @pytest.fixture
    def saved(self, folder):
        return saved_by(folder)

    def test_zero_to_fp32(self, saved, tmp_path):
        states, values = torch.load(saved / "stage3-bf16-3ranks.pt", weights_only=True)
        subprocess.run([sys.executable, saved / "zero_to_fp32.py", saved, tmp_path, "-t", "stage3-bf16-3ranks"],
                       check=True, capture_output=True)
        found = torch.load(tmp_path / "pytorch_model.bin", weights_only=True) if (
            tmp_path / "pytorch_model.bin").exists() else deepspeed_weights(tmp_path)
        for (name, key), master in states.items():
            if key == "fp32":
                assert torch.equal(found[name].flatten(), master), name
        for name in ("tall.weight", "norm.bias", "norm.shift"):
            assert torch.equal(found[name].flatten().to(values[name]), values[name])
        assert torch.equal(found["counter"], values["counter"])

    def test_ds_to_universal(self, saved, tmp_path):
        states, _ = torch.load(saved / "stage3-fp32-3ranks.pt", weights_only=True)
        convert(saved / "stage3-fp32-3ranks", tmp_path / "new", inject=True)
        for stage in (2, 3):
            engine = loaded(start(make(True), config_of(stage, "fp32")), str(tmp_path), tag="new")
            assert_equal_states(whole_states(engine), states)

    def test_ours(self, saved):
        code, out, _ = run("verify", saved / "stage3-bf16-3ranks")
        assert code == 0 and out.splitlines()[-1] == "ok"


def deepspeed_weights(folder):
    """The weights that ``zero_to_fp32.py`` wrote as safetensors."""
    from safetensors.torch import load_file

    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found
