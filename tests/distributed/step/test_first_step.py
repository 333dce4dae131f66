"""``layerwise.verify_first_step``: silent on what is right, and the end of what is not, by the name of a parameter."""

import re
from contextlib import nullcontext

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.utils import logger, safe_get_full_grad, safe_set_full_grad
from torch import nn

from ds_layerwise.errors import ConfigError, LayerWiseError, StepError
from ds_layerwise.optimizers.recipe import UpdateError
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.sync import bucket_transfers
from ds_layerwise.zero.step import clip
from tests.distributed.parallel.test_experts import ExpertNet
from tests.distributed.parallel.test_pipeline import config as pipeline_config
from tests.distributed.parallel.test_pipeline import pipeline
from tests.distributed.parallel.test_tensor_parallel import OnWholeNumbers
from tests.support import internals
from tests.support.harness import DistributedTest
from tests.support.reference import trainable
from tests.support.rooms import rooms
from tests.support.tensor_parallel import Mpu
from tests.support.training import (
    BF16,
    ON_HOST,
    Net,
    allow_fp16,
    ds_config,
    from_all_ranks,
    start,
    train_engine,
    weights,
)

pytestmark = rooms("first_step")

VERIFY = {"verify_first_step": True}


NARROW = {"momentum_dtype": "bfloat16", "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16",
          "stochastic_rounding": True}
KEPT_AND_TOLD = {"master_dtype": "bfloat16+remainder", "monitor": {"update_rms": True, "momentum_norm": True},
                 "log_num_zeros_in_grad": True, "norm_groups": {"vectors": {"ndim": 1, "gradient_clipping": 0.5}}}


class Real(Net):
    """Gradients that are no whole numbers, of few directions: sums of them round, and matrices are nearly singular."""

    def forward(self, place):
        step, micro, rank = place
        generator = torch.Generator().manual_seed(step + 10 * micro + 100 * rank)
        loss = 0.0
        for name in trainable(self):
            p = self.get_parameter(name)
            if p.requires_grad:
                factors = [torch.randn(size, generator=generator) for size in p.shape]
                grad = factors[0]
                for factor in factors[1:]:
                    grad = grad.unsqueeze(-1) * factor
                loss = loss + (p * grad.to(p)).float().sum()
        return loss


is_armed = internals.is_first_step_due


class TestRight(DistributedTest):
    world_size = [1, 2, 3]

    @pytest.mark.parametrize("stage, gas, changes", [
        (1, 1, {}), (2, 2, BF16), (1, 3, {**BF16, "layerwise": {"reduction": "native", "overlap_param_gather": True}}),
        (1, 2, {**BF16, "data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "bf16"}),
        (1, 1, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
        (2, 1, {"fp16": {"enabled": True, "initial_scale_power": 4}, "clip": 0.5, "layerwise": {
            "norm_groups": {"late": {"name": "flat.weight", "gradient_clipping": 0.25}, "told": {"ndim": 1}}}}),
        (1, 1, {**BF16, **ON_HOST}), (2, 1, {**BF16, "clip": 1.0, "params": NARROW, "layerwise": KEPT_AND_TOLD}),
        (3, 2, BF16), (3, 1, {"clip": 0.5, "layerwise": {"layout": "lpt"}}),
        (3, 1, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}})])
    def test_a_right_step_passes_and_is_as_without(self, stage, gas, changes, monkeypatch):
        allow_fp16()
        changes, results, said = dict(changes), [], []
        monkeypatch.setattr(comm, "announce", said.append)
        layerwise = changes.pop("layerwise", {})
        for verify in (VERIFY, {}):
            net = Real(odd=True, tied=True)
            if stage == 3:
                del net.empty
            engine = start(net, ds_config(stage=stage, gas=gas, layerwise={**layerwise, **verify}, **changes))
            assert not verify or is_armed(engine)
            train_engine(engine, 2, gas=gas)
            assert not verify or not is_armed(engine)
            engine.optimizer.wait_for_params()
            results.append(weights(engine.module).clone())
            engine.destroy()
        assert torch.equal(*results)
        assert [line.partition(":")[2].partition(":")[0] for line in said] == [
            " the first update was verified"][:dist.get_rank() == 0]


#: A rule of every kind: whole, cut, with factors, with parts, of anybody.
RULES = [
    {"matrix_optimizer": "normuon", "muon_lr": 0.02, "ns_dtype": "bf16", "ns_method": "gram"},
    {"matrix_optimizer": "adamuon", "muon_lr": 0.02, "scalar_optimizer": "lion"},
    {"matrix_optimizer": "soap", "muon_lr": 0.003, "scalar_optimizer": "pytorch_optimizer:SignSGD"},
    {"matrix_optimizer": "shampoo", "muon_lr": 0.003, "scalar_optimizer": "pytorch_optimizer:AdEMAMix"},
    {"matrix_optimizer": "torch.optim:Adafactor", "muon_lr": 0.003, "scalar_optimizer": "pytorch_optimizer:LaProp"},
    {"matrix_optimizer": "torch.optim:RAdam", "muon_lr": 0.003, "scalar_optimizer": "torch.optim:NAdam"},
    {"matrix_optimizer": "scion", "muon_lr": 0.02, "weight_decay": 0.0, "scalar_optimizer": "sgd"},
]


class TestRules(DistributedTest):
    @pytest.mark.parametrize("params", RULES, ids=[each["matrix_optimizer"] for each in RULES])
    def test_every_rule_passes(self, params, tmp_path):
        params = {"lr": 0.003, "weight_decay": 0.1, **params}
        parts = [{"name": "tall.weight", "split": {"q": 10, "k": 25, "v": 5}}, {"name": "flat.weight", "num_heads": 3}]
        if params["matrix_optimizer"] in ("shampoo", "torch.optim:RAdam", "torch.optim:Adafactor"):
            parts = []
        config = ds_config(bf16={"enabled": True}, layerwise={**VERIFY, "overrides": parts})
        config["optimizer"] = {"type": "LayerWise", "params": params}
        engine = start(Real(), config)
        train_engine(engine, 2)
        assert not is_armed(engine)
        # After a load, with states that are no zeros and masters that no weight rounds to.
        engine.save_checkpoint(tmp_path, tag="two")
        assert not is_armed(engine)
        engine.load_checkpoint(tmp_path, tag="two")
        assert is_armed(engine)
        train_engine(engine, 1, first=2)
        assert not is_armed(engine)


def shifted(original):
    """A sum whose parts lie one element from where they belong."""
    def average(rows, out, divide_by, spare):
        original(rows, out, divide_by, spare)
        out.copy_(out.roll(1))
    return average


def halved(original):
    def average(rows, out, divide_by, spare):
        original(rows, out, divide_by * 2, spare)
    return average


class TestWrong(DistributedTest):
    world_size = [2, 3]

    def first_error(self, engine, steps=1, **options):
        with pytest.raises(StepError) as error:
            train_engine(engine, steps, **options)
        everyone = from_all_ranks(str(error.value))
        assert len(set(everyone)) == 1 and everyone[0].startswith("the first step differs from that of a single")
        found = re.search(r"process: ([\w.]+): (.*) \(found by rank (\d)\); (.*)\. If", everyone[0])
        return found.groups()

    # Of two ranks, the last one also sums a cut of a matrix of the first, and none calls average().
    @pytest.mark.world_size(3)
    @pytest.mark.parametrize("stage, sections", [(1, {}), (2, BF16), (3, BF16)])
    @pytest.mark.parametrize("fault", [shifted, halved])
    def test_a_wire_of_one_rank(self, stage, sections, fault, monkeypatch):
        engine = start(Real(), ds_config(stage=stage, layerwise=VERIFY, **sections))
        last, before = dist.get_world_size() - 1, weights(engine.module).clone()
        if dist.get_rank() == last:
            monkeypatch.setattr(bucket_transfers, "average", fault(bucket_transfers.average))
        name, told, rank, state = self.first_error(engine)
        # Pieces of the last rank, of which the first one in the order of the model.
        held = {piece.name for piece in engine.optimizer.layout.pieces(last)}
        assert name == next(each for each, _ in engine.module.named_parameters() if each in held)
        assert int(rank) == last and told.startswith("averaged gradient: element ")
        assert state == "nothing was updated" and torch.equal(weights(engine.module), before)
        assert engine.optimizer.step_count == 0

    def test_a_single_element(self):
        engine = start(Real(), ds_config(layerwise=VERIFY, bf16={"enabled": True}))
        finish = internals.grad_sync(engine).finish

        def finish_and_lose(**options):
            finish(**options)
            if dist.get_rank() == 0:
                piece = internals.pieces(engine)[0]
                internals.reduced(engine, piece.name)[3] *= 1.05

        internals.grad_sync(engine).finish = finish_and_lose
        name, told, rank, _ = self.first_error(engine)
        piece = engine.optimizer.layout.pieces(0)[0]
        assert name == piece.name and told.startswith(
            f"averaged gradient: element {piece.param_start + 3} is ") and ", as are 1 of " in told

    @pytest.mark.parametrize("key, value, what", [
        ("lr", 0.006, "weights after the update"), ("momentum", 0.9, "momentum_buffer after the update"),
        ("weight_decay", 0.5, "weights after the update"), ("betas", (0.8, 0.95), "exp_avg after the update")])
    def test_a_setting_of_one_rank(self, key, value, what):
        engine = start(Real(), ds_config(layerwise=VERIFY))
        if dist.get_rank() == 1:
            engine.optimizer.param_groups[0][key] = value
        _, told, _, state = self.first_error(engine)
        assert told.startswith(f"{what}: element ") and state.startswith("the update was made")

    def test_weights_that_one_rank_has_got_wrong(self):
        engine = start(Real(), ds_config(layerwise=VERIFY, bf16={"enabled": True}))
        sync = internals.param_sync(engine)
        if dist.get_rank() == 1:
            finish = sync.finish
            embed = engine.module.embed.weight.data

            def finish_and_slip():
                was_under_way = bool(internals.gathers_under_way(engine))
                finish()
                if was_under_way:
                    embed.view(-1)[-9:] = embed.view(-1)[-9:].roll(1)

            sync.finish = finish_and_slip
        name, told, rank, _ = self.first_error(engine)
        assert (name, rank) == ("embed.weight", "1") and told.endswith("according to the float32 master of its owner")
        assert told.startswith(f"weights: element {17 * 12 - 9} is ")

    @pytest.mark.parametrize("name", ["square.weight", "embed.weight"])
    def test_cuts_that_one_rank_has_got_wrong(self, name):
        engine = start(Real(), ds_config(stage=3, layerwise=VERIFY, bf16={"enabled": True}))
        sync = internals.param_sync(engine)
        if dist.get_rank() == 1:
            finish, cut = sync.finish, engine.module.get_parameter(name).ds_tensor.data

            def finish_and_slip():
                finish()
                if engine.optimizer.step_count:
                    cut[:9] = cut[:9].roll(1)

            sync.finish = finish_and_slip
        found, told, *_ = self.first_error(engine)
        assert found == name and told.endswith("according to the float32 master of its owner")

    def test_a_clip_of_another_size(self, monkeypatch):
        engine = start(Real(), ds_config(clip=0.5, layerwise=VERIFY))
        monkeypatch.setattr(clip, "_CLIP_EPS", 10.0)
        with pytest.raises(StepError, match="process: gradients would be multiplied by .*, but their norm, .*, gives "):
            train_engine(engine, 1)


class TestWhen(DistributedTest):
    def test_gradients_from_elsewhere_are_waited_for(self, monkeypatch):
        warned = []
        engine = start(Real(), ds_config(layerwise=VERIFY))
        monkeypatch.setattr(logger, "warning", warned.append)
        engine.backward(engine((0, 0, dist.get_rank())))
        param = engine.module.square.weight
        safe_set_full_grad(param, 2 * safe_get_full_grad(param))
        engine.step()
        assert is_armed(engine) and len([1 for line in warned if "waits for the next step" in line]) == (
            dist.get_rank() == 0)
        train_engine(engine, 1, first=1)
        assert not is_armed(engine)

    def test_a_skipped_step_does_not_count_as_the_first(self):
        engine = start(Real(), ds_config(layerwise=VERIFY))
        engine.backward(engine((0, 0, dist.get_rank())) * float("nan"))
        engine.step()
        assert is_armed(engine) and engine.skipped_steps == 1
        engine.backward(engine((0, 0, dist.get_rank())))
        engine.optimizer.zero_grad()
        train_engine(engine, 1, first=1)
        assert not is_armed(engine)

    def test_a_step_that_is_repeated_after_a_load(self, tmp_path):
        """Nothing that was kept of the passes before the load counts in it."""
        for first in (0, 5):
            engine = start(Real(), ds_config(gas=2, layerwise=VERIFY))
            engine.backward(engine((first, 0, dist.get_rank())))
            engine.step()
            if not first:
                engine.save_checkpoint(tmp_path, tag="half")
        engine.load_checkpoint(tmp_path, tag="half")
        train_engine(engine, 1, gas=2)
        assert engine.optimizer.step_count == 1 and not is_armed(engine)

    def test_frozen_parameters_and_those_of_one_rank(self):
        engine = start(Real(frozen=True), ds_config(layerwise=VERIFY))
        engine.module.square.weight.requires_grad = False
        loss = engine((0, 0, dist.get_rank()))
        if dist.get_rank() == 1:
            loss = loss - sum((p * 0).sum() for p in engine.module.parameters())
        else:
            loss = engine.module.tall.bias.sum() * 2
        engine.backward(loss)
        engine.step()
        assert not is_armed(engine)

    def test_several_passes_before_anything_is_sent(self):
        engine = start(Real(), ds_config(stage=2, layerwise=VERIFY))
        with engine.coalesce_grad_reduction():
            for micro in range(3):
                engine.backward(engine((0, micro, dist.get_rank())))
        engine.step()
        assert not is_armed(engine)

    @pytest.mark.parametrize("monitor", [{}, {"monitor": {"update_rms": True}}], ids=["alone", "with a monitor"])
    def test_an_update_that_fails_on_one_rank_leaves_nobody_waiting(self, monitor, tmp_path):
        engine = start(Real(), ds_config(layerwise={**VERIFY, **monitor}))
        engine.save_checkpoint(str(tmp_path))
        own, update = internals.owned(engine), internals.owned(engine).update
        if dist.get_rank() == 1:
            def fail(*_args, **_more):
                raise MemoryError("no memory left")
            own.update = fail
        with pytest.raises(MemoryError) if dist.get_rank() == 1 else nullcontext():
            train_engine(engine, 1)
        assert is_armed(engine)
        with pytest.raises(LayerWiseError, match="was interrupted by MemoryError"):
            train_engine(engine, 1, first=1)
        own.update = update
        engine.load_checkpoint(str(tmp_path))
        train_engine(engine, 1)
        assert not is_armed(engine)

    def test_a_rule_that_refuses_in_one_process_names_the_parameter(self, monkeypatch):
        engine = start(Real(), ds_config(layerwise=VERIFY))

        def refuse(*_args):
            raise UpdateError(0, "it has no eigenvectors")
        internals.replace_plain_update(engine, "square.weight", refuse, monkeypatch)
        with pytest.raises(LayerWiseError, match="square.weight: it has no eigenvectors"):
            train_engine(engine, 1)
        assert engine.optimizer.step_count == 0

    def test_an_error_of_the_scripts_optimizer_in_one_process_is_raised_everywhere(self, monkeypatch):
        engine = start(Real(), ds_config(layerwise=VERIFY))

        def fail(*_args):
            raise KeyError("tall.weight")
        internals.replace_plain_update(engine, "tall.weight", fail, monkeypatch)
        with pytest.raises((KeyError, LayerWiseError), match="tall.weight"):
            train_engine(engine, 1)

    def test_experts(self):
        engine = start(ExpertNet(2), ds_config(clip=0.1, params={"eps": 1e-8}, layerwise={
            **VERIFY, "norm_groups": {"experts": {"name": "*deepspeed_experts*", "gradient_clipping": 0.01}}}))
        torch.manual_seed(dist.get_rank())
        engine.backward(engine(torch.randn(8, 6)))
        engine.step()
        assert not is_armed(engine)


class TestRefusals(DistributedTest):
    def test_models_that_are_cut(self):
        with pytest.raises(ConfigError, match="layerwise.verify_first_step is true, and tensor or pipeline"):
            mpu = Mpu(2)
            start(OnWholeNumbers(mpu), ds_config(layerwise=VERIFY), mpu=mpu)

    @pytest.mark.filterwarnings("ignore:c10d")
    def test_stages(self):
        with pytest.raises(ConfigError, match="layerwise.verify_first_step is true, and tensor or pipeline"):
            start(pipeline(2), pipeline_config(layerwise=VERIFY))

    def test_a_model_of_one_matrix_is_fine(self):
        engine = start(nn.Linear(4, 4), ds_config(layerwise=VERIFY))
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        assert not is_armed(engine)
