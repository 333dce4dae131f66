"""Ranks agree before a step: on parameters that are left out of it, and on the error of a rank that cannot take it."""

from contextlib import ExitStack

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from torch import nn

from ds_layerwise.errors import LayerWiseError, StepError
from ds_layerwise.ranks.owned import weight_writes
from tests.distributed.parallel.test_experts import ExpertNet
from tests.distributed.parallel.test_tensor_parallel import part_of
from tests.support import internals
from tests.support.expected import assert_trained_as, oracle_step, start_oracle
from tests.support.harness import DistributedTest
from tests.support.reference import Reference, trainable, whole_number_gradients, whole_number_loss
from tests.support.rooms import rooms
from tests.support.tensor_parallel import Mpu
from tests.support.tensor_parallel import Net as CutNet
from tests.support.training import (
    Net,
    assert_same_on_all_ranks,
    ds_config,
    raises_on_rank_1,
    recipe_for,
    relative_error,
    start,
    train_engine,
    weights,
)
from tests.support.versions import needs

pytestmark = rooms("step_agreement", "comm", "param_guard", "pre_step")

STEPS = 3

WITHOUT_NORM = needs("deepspeed>=0.19.7", "it has no compute_grad_norm")


class Turns(Net):
    """Trains every second parameter at a time: which, ``turn`` says for a (step, micro-batch, rank). ``square.weight``
    is frozen from the first forward pass on."""

    def __init__(self, turn):
        super().__init__()
        self.turn = turn

    def forward(self, place):
        for index, (name, param) in enumerate(self.named_parameters()):
            param.requires_grad_(index % 2 == self.turn(*place) and name != "square.weight")
        return whole_number_loss(self, place)


#: The function of each turn, by what it looks at: the micro-batch, the rank, all.
TURNS = {"micro": lambda step, micro, rank: micro % 2, "rank": lambda step, micro, rank: rank % 2,
         "all": lambda step, micro, rank: (step + micro + rank) % 2}


class TestFrozenInTurn(DistributedTest):
    def oracle(self, turn, gas):
        """Plain sums of what each micro-batch of each rank trains."""
        module = Net()
        start_at = {name: p for name, p in trainable(module).items() if name != "square.weight"}
        recipe = recipe_for(module, gas=gas, clip=5.0)
        del recipe.matrices["square.weight"]
        reference, numbers = Reference(start_at, recipe), {n: i for i, (n, _) in enumerate(module.named_parameters())}
        for step in range(STEPS):
            reference.step([[{name: whole_number_gradients(name, p.shape, step, micro, rank) / gas
                              for name, p in start_at.items() if numbers[name] % 2 == turn(step, micro, rank)}
                             for micro in range(gas)] for rank in range(2)])
        return reference.params

    @pytest.mark.parametrize("stage, overlap", [(1, True), (1, False), (2, True), (2, False)])
    def test_a_gradient_of_any_micro_batch_or_rank_updates_its_parameter(self, stage, overlap):
        initial = Net().square.weight.detach()
        for gas, turn in ((2, "micro"), (1, "rank"), (2, "all")):
            engine = start(Turns(TURNS[turn]), ds_config(stage=stage, gas=gas, overlap=overlap, clip=5.0))
            expected = self.oracle(TURNS[turn], gas)
            train_engine(engine, STEPS, gas=gas)
            for name, value in expected.items():
                assert relative_error(engine.module.get_parameter(name).detach(), value) < 1e-5, (turn, name)
            # Neither weight decay nor momentum moves what is frozen everywhere.
            assert torch.equal(engine.module.square.weight, initial)
            assert_same_on_all_ranks(engine.module)
            engine.destroy()

    @pytest.mark.parametrize("compute_grad_norm", [True, pytest.param(False, marks=WITHOUT_NORM)])
    def test_frozen_parameters_cost_one_small_sum_more_and_others_none(self, compute_grad_norm, monkeypatch):
        config = ds_config()
        if not compute_grad_norm:
            config["zero_optimization"]["compute_grad_norm"] = False
        engine, sums = start(Net(), config), []
        reduce = dist.all_reduce
        monkeypatch.setattr(dist, "all_reduce", lambda t, *args, **kwargs: (sums.append(t.numel()),
                                                                            reduce(t, *args, **kwargs))[1])
        for frozen in (False, True):
            engine.module.experts.requires_grad_(not (frozen and dist.get_rank()))
            train_engine(engine, 1)
        assert len(sums) == 3 and sums[0] == sums[1] <= 8 and sums[2] == len(internals.specs(engine))


class Numbered(ExpertNet):
    """The same parameters, with whole numbers for gradients."""

    def forward(self, place):
        return whole_number_loss(self, place)


class TestFrozenExperts(DistributedTest):
    world_size = 4

    def test_experts_are_frozen_each_for_itself(self, stage):
        """Ranks 0 and 2 hold the same experts, 1 and 3 others. Frozen on 0, 1 and 3, they are trained where 2 has a
        gradient, and stay where nobody has one."""
        found = []
        for frozen_on in ((), (0, 1, 3)):
            engine = start(Numbered(2), ds_config(stage=stage))
            experts = {name: p for name, p in engine.module.named_parameters() if is_moe_param(p)}
            before = {name: p.detach().clone() for name, p in experts.items()}
            for p in experts.values():
                p.requires_grad_(dist.get_rank() not in frozen_on)
            # Rank 0 has no gradients of experts in either run: those of rank 2 are all that there is.
            skipped = set(experts) if dist.get_rank() == 0 else set()
            engine.backward(whole_number_loss(engine.module, (0, 0, dist.get_rank()), skipped))
            engine.step()
            found.append({name: p.detach().clone() for name, p in experts.items()})
            engine.destroy()
        assert len(before) == 16
        for name, value in before.items():
            assert torch.equal(found[1][name], value if dist.get_rank() % 2 else found[0][name]), name
            assert not torch.equal(found[0][name], value)


class CutOnWholeNumbers(CutNet):
    """Parts of the same whole numbers on all ranks, but for what is frozen."""

    def forward(self, data):
        whole, mpu = data
        return sum((p * part_of(whole_number_gradients(name, whole[name], 0, 0, 0), name, mpu)).sum()
                   for name, p in self.named_parameters() if p.requires_grad)


class TestFrozenParts(DistributedTest):
    @pytest.mark.parametrize("tp_mode", ["duplicated", "distributed", "owner"])
    def test_peers_update_a_matrix_together_or_not_at_all(self, tp_mode):
        mpu, whole = Mpu(2), {name: p.shape for name, p in CutNet().named_parameters()}
        whole_module = CutNet()
        matrices = {"tall_rows.weight": (1, 40, 12), "flat_cols.weight": (1, 12, 40)}
        for frozen_on in ((1, ), (0, 1)):
            module = CutOnWholeNumbers(mpu)
            engine = start(module, ds_config(params={"muon_tp_mode": tp_mode}), mpu=mpu)
            for name in matrices:
                module.get_parameter(name).requires_grad_(mpu.get_model_parallel_rank() not in frozen_on)
            engine.backward(engine((whole, mpu)))
            engine.step()
            recipe = recipe_for(nn.Linear(1, 1))
            for name, view in matrices.items():
                before = whole_module.get_parameter(name)
                if len(frozen_on) == 1:
                    # The other rank has no gradient of a frozen part, which counts as zeros.
                    gradient = whole_number_gradients(name, before.shape, 0, 0, 0)
                    gradient.chunk(2, 0 if "rows" in name else 1)[1].zero_()
                    oracle = Reference({name: before}, type(recipe)(matrices={name: view}, muon_lr=0.02,
                                                                    weight_decay=0.1))
                    oracle.step([[{name: gradient}]])
                    assert relative_error(module.get_parameter(name).detach(),
                                          part_of(oracle.params[name], name, mpu)) < 1e-5, name
                else:
                    assert torch.equal(module.get_parameter(name), part_of(before.detach(), name, mpu)), name
            engine.destroy()


def replace_a_parameter(engine):
    kept = engine.module.tall.weight.data
    engine.module.tall.weight.data = kept.clone()
    return lambda: setattr(engine.module.tall.weight, "data", kept)


def leave_a_gradient(engine):
    engine.module.experts.grad = torch.ones_like(engine.module.experts)
    return lambda: setattr(engine.module.experts, "grad", None)


def offload(engine):
    # A single rank does this here, and engine.offload_states is for all ranks.
    parking, kind = engine.optimizer.offloading.parking, OffloadStateTypeEnum.optim_states
    parking.park(parking.find_room({kind.value: engine.optimizer.offloading.memory()[kind]}, pin_memory=False))
    return parking.unpark


ERRORS = {replace_a_parameter: "tall.weight was replaced since", leave_a_gradient: "experts.grad was set after",
          offload: "are offloaded"}


class TestOneRankAlone(DistributedTest):
    @pytest.mark.parametrize("stage, compute_grad_norm", [
        (1, True), pytest.param(1, False, marks=WITHOUT_NORM), (2, True)])
    def test_an_error_of_one_rank_is_one_on_all_and_mended_it_goes_on(self, stage, compute_grad_norm):
        module = Net()
        config = ds_config(stage=stage)
        if not compute_grad_norm:
            config["zero_optimization"]["compute_grad_norm"] = False
        engine, oracle = start(module, config), start_oracle(Net())
        for step, (wrong, message) in enumerate(ERRORS.items()):
            engine.backward(engine((step, 0, dist.get_rank())))
            mend = wrong(engine) if dist.get_rank() == 1 else lambda: None
            with raises_on_rank_1(StepError, f".*{message}"):
                engine.step()
            mend()
            engine.step()
            oracle_step(oracle, step)
        assert_trained_as(module, oracle)

    @pytest.mark.parametrize("where", ["the norm", "a checksum"])
    def test_no_memory_for_what_is_compared(self, stage, where, monkeypatch):
        def no_memory(*args, **kwargs):
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")

        engine, plain = start(Net(), ds_config(stage=stage)), start(Net(), ds_config(stage=stage))
        for each in (engine, plain):
            with torch.no_grad():
                each.module.tall.weight.mul_(2)
            each.backward(each((0, 0, dist.get_rank())))
        with monkeypatch.context() as patch:
            if dist.get_rank() == 1:
                of, name = {"the norm": (internals.owned(engine).reduced, "sum_of_squares"),
                            "a checksum": (weight_writes, "checksum_of")}[where]
                patch.setattr(of, name, no_memory)
            with raises_on_rank_1(torch.OutOfMemoryError, "tried to allocate"):
                engine.step()
        for each in (engine, plain):
            each.step()
        assert torch.equal(weights(engine.module), weights(plain.module))

    def test_a_parameter_that_must_not_be_unused(self, stage):
        config = ds_config(stage=stage, gas=2)
        config["zero_optimization"]["ignore_unused_parameters"] = False
        engine, oracle = start(Net(), config), start_oracle(Net(), gas=2)
        # Each rank uses all in one of its micro-batches, but what is frozen; rank 1 never uses two of them in step 1.
        engine.module.norm.bias.requires_grad_(False)
        del oracle.params["norm.bias"]
        for step in range(3):
            for micro in range(2):
                missing = {"tall.weight"} if micro != dist.get_rank() else set()
                missing |= {"tall.weight", "experts"} if (step, dist.get_rank()) == (1, 1) else set()
                engine.backward(whole_number_loss(engine.module, (step, micro, dist.get_rank()), missing))
                if (step, micro) == (1, 1):
                    message = "^(rank 1 failed: StepError: )?experts, tall.weight got no gradient in this step"
                    with pytest.raises(LayerWiseError, match=message):
                        engine.step()
                    engine.zero_grad()
                else:
                    engine.step()
            if step != 1:
                oracle.step([[{name: whole_number_gradients(name, p.shape, step, micro, rank) / 2
                               for name, p in oracle.params.items() if name != "tall.weight" or micro == rank}
                              for micro in range(2)] for rank in range(2)])
        assert_trained_as(engine.module, oracle)

    @pytest.mark.parametrize("stage, gas, missed", [
        (1, 1, {1: [0]}), (2, 1, {1: [0]}), (1, 2, {0: [1], 1: [0], 2: [0, 1]}), (2, 2, {0: [1], 1: [0], 2: [0, 1]}),
        (2, 4, {1: [0, 1, 3]})])
    def test_a_loss_that_reaches_nothing_that_is_trained(self, stage, gas, missed):
        oracle = start_oracle(Net(), gas=gas)
        for step in range(4):
            oracle.step([[{name: torch.zeros(p.shape) if rank and micro in missed.get(step, [])
                           else whole_number_gradients(name, p.shape, step, micro, rank) / gas
                           for name, p in oracle.params.items()} for micro in range(gas)] for rank in range(2)])
        for backward in (lambda loss: engine.backward(loss), lambda loss: (loss / gas).backward(),
                         lambda loss: engine.scale(loss).backward()):
            engine = start(Net(), ds_config(stage=stage, gas=gas))
            for step in range(4):
                for micro in range(gas):
                    alone = dist.get_rank() == 1 and micro in missed.get(step, [])
                    backward(torch.zeros((), requires_grad=True) * 2 if alone
                             else engine((step, micro, dist.get_rank())))
                    engine.step()
            assert_trained_as(engine.module, oracle)
            engine.destroy()

    def test_a_pass_that_an_exception_ended_beside_one_that_nobody_noticed(self, stage, overlap):
        engine, oracle = start(Net(), ds_config(stage=stage, overlap=overlap)), start_oracle(Net())

        def fail(gradient):
            raise ValueError("no gradient")

        if dist.get_rank() == 0:
            hook = engine.module.tall.weight.register_hook(fail)
            with pytest.raises(ValueError, match="no gradient"):
                engine.backward(engine((40, 0, 0)))
            hook.remove()
        else:
            (torch.zeros((), requires_grad=True) * 2).backward()
        with pytest.raises(LayerWiseError, match="before the gradients were reduced"):
            engine.step()
        engine.zero_grad()
        train_engine(engine, 2)
        for step in range(2):
            oracle_step(oracle, step)
        assert_trained_as(engine.module, oracle)

    @pytest.mark.parametrize("stage, overlap", [(1, True), (1, False), (2, True), (2, False), (3, True), (3, False)])
    def test_a_pass_that_an_exception_ended_is_an_error_of_its_step(self, stage, overlap, monkeypatch):
        """In any micro-batch; on one rank alone, but at stage 3, where ranks fetch parameters together. After
        ``zero_grad`` the step begins again."""
        def fail(*_, **__):
            raise KeyboardInterrupt

        engine, oracle = start(Net(), ds_config(stage=stage, gas=2, overlap=overlap)), start_oracle(Net(), gas=2)
        for step, (broken, way) in enumerate([(0, "engine"), (1, "by hand"), (0, "directly"), (1, "its reduction")]):
            for micro in range(2):
                loss = (engine.module if way == "directly" else engine)((40, micro, dist.get_rank()))
                with monkeypatch.context() as patch, ExitStack() as failing:
                    if micro == broken and (dist.get_rank() == 0 or stage == 3):
                        failing.enter_context(pytest.raises(KeyboardInterrupt))
                        if way == "its reduction":
                            patch.setattr(internals.grad_sync(engine)._scheduler, "_advance", fail)
                        else:
                            failing.callback(engine.module.tall.weight.register_hook(fail).remove)
                    loss.backward() if way == "by hand" else engine.backward(loss)
                if micro == 0:
                    engine.step()
            with pytest.raises(LayerWiseError, match="an exception has ended a backward pass of this step"):
                engine.step()
            engine.zero_grad()
            train_engine(engine, 1, gas=2, first=step)
            oracle_step(oracle, step, gas=2)
        assert_trained_as(engine.module, oracle)

    @pytest.mark.parametrize("before", ["a step without a pass", "a load"])
    def test_reductions_of_a_step_that_is_begun_again_do_not_count(self, stage, before, tmp_path):
        engine = start(Net(), ds_config(stage=stage, gas=2))
        train_engine(engine, 1, gas=2)
        saved, counted = weights(engine.module).clone(), engine.micro_steps
        if before == "a load":
            engine.save_checkpoint(tmp_path)
            engine.backward(engine((1, 0, dist.get_rank())))
            engine.step()
            engine.load_checkpoint(tmp_path)
        else:
            with pytest.raises(LayerWiseError, match="before the gradients were reduced"):
                engine.optimizer.step()
        assert engine.micro_steps == counted and torch.equal(weights(engine.module), saved)
        for each in (0, 1):
            if dist.get_rank():
                (torch.zeros((), requires_grad=True) * 2).backward()
            else:
                engine.backward(engine((1, each, 0)))
            engine.step()
        assert not torch.equal(weights(engine.module), saved)
        assert_same_on_all_ranks(engine.module)

    def test_gradients_that_one_rank_has_dropped(self, stage):
        engine = start(Net(), ds_config(stage=stage))
        engine.backward(engine((0, 0, dist.get_rank())))
        if dist.get_rank():
            engine.zero_grad()
        with pytest.raises(LayerWiseError, match="before the gradients were reduced"):
            engine.step()

    def test_a_gradient_that_one_rank_asks_for(self, stage, overlap):
        engine, oracle = start(Net(), ds_config(stage=stage, overlap=overlap)), start_oracle(Net())
        for step in range(2):
            if (dist.get_rank(), step) == (0, 0):
                torch.autograd.grad(engine((50, 0, 0)), engine.module.square.weight)
                torch.autograd.grad(2 * (loss := engine((50, 0, 0))), loss)
            engine.backward(engine((step, 0, dist.get_rank())))
            if (dist.get_rank(), step) == (1, 1):
                torch.autograd.grad(engine((50, 0, 1)), [engine.module.experts])
            engine.step()
            oracle_step(oracle, step)
        assert_trained_as(engine.module, oracle)

    @pytest.mark.parametrize("direct", [True, False])
    def test_a_forward_pass_that_reaches_no_parameter_on_one_rank(self, stage, direct):
        """The others wait for its zeros inside their backward pass."""
        engine, oracle = start(Net(), ds_config(stage=stage)), start_oracle(Net())
        leaf = torch.ones(2, requires_grad=True)
        forward = engine.module.forward
        if dist.get_rank() == 0:
            engine.module.forward = lambda place: leaf.sum()
        loss = engine((0, 0, dist.get_rank()))
        loss.backward() if direct else engine.backward(loss)
        engine.step()
        engine.module.forward = forward
        oracle.step([[{}], [{name: whole_number_gradients(name, p.shape, 0, 0, 1)
                             for name, p in oracle.params.items()}]])
        assert_trained_as(engine.module, oracle)
