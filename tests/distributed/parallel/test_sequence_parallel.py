"""Sequence parallelism: ranks that see parts of one sequence against the model that sees all of it."""

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import groups, safe_get_full_grad
from torch import nn

import ds_layerwise
from ds_layerwise.errors import ConfigError
from tests.support.checkpoints import assert_equal_states, loaded, on_rank_0, states, whole_states
from tests.support.expected import assert_trained_as
from tests.support.harness import DistributedTest, made_once
from tests.support.models import TINY_GPT_MATRICES, attend, tiny_gpt, token_batch, token_loss
from tests.support.reference import Recipe, train, trainable, whole_number_gradients
from tests.support.rooms import rooms
from tests.support.training import (
    Net,
    assert_same_on_all_ranks,
    ds_config,
    reduced_gradients,
    start,
    train_engine,
    weights,
    whole_gradients,
)
from tests.support.versions import needs

pytestmark = rooms("sequence", "config_hook")

SP, STEPS, GAS = 2, 5, 2

#: The gradient of a key's bias is nothing but rounding, which Adam would make as large as every other.
EPS = 1e-4


def sequence_groups(how):
    """The arguments of ``initialize`` to know the sequence groups; ``how`` is one of the ways that DeepSpeed has."""
    shape = (dist.get_world_size() // SP, SP)
    if how == "mpu":
        if parallel_state_sp._SEQUENCE_PARALLEL_GROUP is None:
            parallel_state_sp.initialize_sequence_parallel(SP)
        return {"mpu": parallel_state_sp}
    return {"mesh_param": shape} if how == "mesh" else {}


def keys(how):
    """The keys of the config for sequence groups."""
    return {"data_parallel_size": dist.get_world_size() // SP, "sequence_parallel_size": SP} if how == "config" else {}


class PartOfASequence(nn.Module):
    """A language model of which every rank sees its part of each sequence, and its share of the mean loss."""

    def __init__(self, seed=0):
        super().__init__()
        self.inner = tiny_gpt(tied=True, seed=seed)
        for block in self.inner.blocks:
            block.attend = self.attend

    def attend(self, q, k, v):
        exchange = DistributedAttention(attend, groups._get_sequence_parallel_group(), scatter_idx=2, gather_idx=1)
        return exchange(q, k, v, 0)

    def forward(self, place):
        step, micro, rank = place
        part = rank % SP
        tokens = token_batch(step, micro, rank // SP)
        inputs, targets = (t.chunk(SP, dim=1)[part] for t in (tokens[:, :-1], tokens[:, 1:]))
        self.inner.first_position = part * inputs.shape[1]
        logits = self.inner(inputs)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum") / targets.numel() / SP


def recipe():
    return Recipe(matrices=TINY_GPT_MATRICES, world_size=dist.get_world_size() // SP, gas=GAS, clip=0.3, muon_lr=0.02,
                  adam_lr=0.003, weight_decay=0.1, eps=EPS)


def config(how="mpu", **changes):
    return ds_config(gas=GAS, clip=0.3, params={"eps": EPS}, **keys(how), **changes)


class TestAgainstTheWholeSequence(DistributedTest):
    world_size = [2, 4]
    thorough_on = (2,)

    @pytest.mark.parametrize("how", ["mpu", pytest.param("mesh", marks=pytest.mark.thorough)])
    def test_training(self, how):
        # Both give the same mesh.
        how = "config" if how == "mesh" and dist.get_world_size() == 2 else how
        expected = train(lambda: tiny_gpt(tied=True), token_batch, token_loss, recipe(), STEPS)
        assert expected.steps[0].clip_factor > 2
        for stage in (1, 2, 3):
            # Every rank starts from other weights, and has to get rank 0's.
            module = PartOfASequence(seed=dist.get_rank())
            batch = GAS * dist.get_world_size() // SP
            engine = start(module, config(how, stage=stage, train_batch_size=batch), **sequence_groups(how))
            assert engine.optimizer.layout.world_size == dist.get_world_size()
            assert engine.train_batch_size() == batch

            def check(step, gradients):
                for name, (first, values) in gradients.items():
                    wanted = expected.steps[step].grads[name.removeprefix("inner.")].flatten()[first:]
                    torch.testing.assert_close(values, wanted[:values.numel()], rtol=1e-4, atol=2e-6)

            for step in range(STEPS):
                train_engine(engine, 1, gas=GAS, first=step, check=check if step < 3 else None)
                assert engine.get_global_grad_norm() == pytest.approx(expected.steps[step].norm, rel=1e-5)
            assert_trained_as(module.inner, expected, where=stage)
            assert_same_on_all_ranks(module)


class TestTheScaleOfAGradient(DistributedTest):
    world_size = 4

    @pytest.mark.parametrize("how", ["mpu", "mesh"])
    def test_it_is_the_sum_over_a_sequence_and_the_mean_over_sequences(self, how):
        """Whole numbers add up exactly; Muon and Adam would forget a factor."""
        world_size = dist.get_world_size()
        for stage in (1, 2, 3):
            module = Net(tied=True)
            engine = start(module, ds_config(stage=stage, clip=5.0), **sequence_groups(how))
            loss = engine((0, 0, dist.get_rank()))
            engine.backward(loss)
            gradients, squares = whole_gradients(engine), 0.0
            for name, p in trainable(module).items():
                wanted = sum(whole_number_gradients(name, p.shape, 0, 0, r) for r in range(world_size)) / (
                    world_size // SP)
                assert torch.equal(gradients[name], wanted.flatten()), name
                squares += float(wanted.double().square().sum())
            engine.step()
            assert engine.get_global_grad_norm() == pytest.approx(squares**0.5, rel=1e-6)
            engine.destroy()

    def test_stock_has_the_same(self):
        given = sequence_groups("mpu")
        stock_config = ds_config(optimizer={"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}})
        del stock_config["layerwise"]
        found = []
        for ds_settings in (stock_config, ds_config()):
            module = Net()
            engine = start(module, ds_settings, **given)
            engine.backward(engine((0, 0, dist.get_rank())))
            found.append({name: safe_get_full_grad(p) for name, p in module.named_parameters()})
            engine.destroy()
        assert_equal_states(*found)


class OneWeight(nn.Module):
    """A weight whose gradient has more digits than bfloat16."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=False)

    def forward(self, _):
        return (self.layer.weight * (1 + 2**-10)).sum()


class TestKeys(DistributedTest):
    def test_the_dtype_that_gradients_travel_in(self):
        with pytest.raises(ConfigError, match="sequence_parallel_size is 2, but the engine has sequence groups of 1; "
                                              "set data_parallel_size, too"):
            start(OneWeight(), ds_config(sequence_parallel_size=2))
        for keys_given, wanted in (({}, 1 + 2**-10), ({"seq_parallel_communication_data_type": "bf16"}, 1.0)):
            engine = start(OneWeight(), ds_config(**keys_given), **sequence_groups("mpu"))
            engine.backward(engine(0))
            for _, values in reduced_gradients(engine).values():
                assert values.unique().tolist() == [2 * wanted]
            engine.destroy()
        with pytest.raises(ConfigError, match="communication_data_type is 'bf16', which sequence parallelism does n"):
            start(OneWeight(), ds_config(communication_data_type="bf16"), **sequence_groups("mpu"))

    def test_groups_of_an_earlier_engine_are_refused(self):
        start(OneWeight(), ds_config(), **sequence_groups("mesh")).destroy()
        with pytest.raises(ConfigError, match="sequence groups of 2 are left from an earlier engine of this process"):
            start(OneWeight(), ds_config())


class TestWithoutAnOptimizer(DistributedTest):
    def test_sequences_are_counted(self):
        engine, *_ = ds_layerwise.initialize(model=OneWeight(), config=ds_config(stage=3, train_batch_size=1),
                                             **sequence_groups("mesh"))
        assert engine.train_batch_size() == 1 and engine(0).isfinite()


class TestBeforeDeepSpeedConnects(DistributedTest):
    init_distributed = False

    def test_zero_init_counts_sequences(self):
        torch.distributed.init_process_group(get_accelerator().communication_backend_name())
        ds_layerwise.register()
        with deepspeed.zero.Init(config_dict_or_path=ds_config(stage=3, train_batch_size=1, sequence_parallel_size=SP)):
            assert OneWeight().layer.weight.ds_tensor.numel() == 64 // dist.get_world_size()


class TestCheckpoints(DistributedTest):
    """Saved on four ranks, two a sequence, inside a step."""

    @pytest.fixture
    def run_of_4(self, class_tmpdir):
        """A checkpoint, the gradients of the step that it is inside of, and what comes of the steps after it."""
        return made_once(class_tmpdir / "run", [4], self.save)

    def save(self, folder):
        engine = self.start_4()
        train_engine(engine, 3, gas=GAS)
        engine.backward(engine((3, 0, dist.get_rank())))
        engine.step()
        engine.save_checkpoint(folder)
        gradients = self.go_on(engine, 1)
        torch.save((states(engine), weights(engine.module)), folder / f"later_{dist.get_rank()}.pt")
        on_rank_0(lambda: torch.save(gradients, folder / "gradients.pt"))

    def start_4(self):
        return start(PartOfASequence(), config(layerwise={"save_universal": True}), **sequence_groups("mesh"))

    def go_on(self, engine, first_micro):
        """Do the step from this micro-batch on, and train for three more; the gradients of the first."""
        for micro in range(first_micro, GAS):
            engine.backward(engine((3, micro, dist.get_rank())))
            if micro == GAS - 1:
                gradients = whole_gradients(engine)
            engine.step()
        train_engine(engine, 3, gas=GAS, first=4)
        return gradients

    @pytest.mark.world_size(4)
    def test_resume_bit_for_bit(self, run_of_4):
        resumed = self.start_4()
        train_engine(resumed, 2, gas=GAS, first=70)
        resumed.load_checkpoint(run_of_4)
        assert resumed.global_steps == resumed.optimizer.step_count == 3
        assert_equal_states(self.go_on(resumed, 0), torch.load(run_of_4 / "gradients.pt"))
        later_states, later_weights = torch.load(run_of_4 / f"later_{dist.get_rank()}.pt")
        assert_equal_states(states(resumed), later_states)
        assert torch.equal(weights(resumed.module), later_weights)

    @needs("deepspeed>=0.19.8", "its load takes the place in a sequence for a part of the model")
    @pytest.mark.world_size(2)
    @pytest.mark.parametrize("stage", [2, 3])
    def test_resume_on_fewer_sequences(self, stage, run_of_4):
        """The two ranks stand in for four: each of their micro-batches is the mean of those that the four had."""
        engine = loaded(start(PartOfASequence(), config(stage=stage), **sequence_groups("mpu")), run_of_4)
        saved = whole_states(engine)
        for micro in range(GAS):
            losses = [engine((3, micro, dist.get_rank() + SP * sequence)) for sequence in range(2)]
            engine.backward((losses[0] + losses[1]) / 2)
            if micro < GAS - 1:
                engine.step()
        expected = torch.load(run_of_4 / "gradients.pt")
        for name, value in whole_gradients(engine).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)
        engine.optimizer.zero_grad()
        engine.load_checkpoint(run_of_4, tag="global_step3_universal")
        assert_equal_states(whole_states(engine), saved)
