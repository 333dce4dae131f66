"""Features that meet in one run: narrow masters and states, QK-clip, norm groups, reports, the first step
beside a plain one, an optimizer of the script, checkpoints of torch."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.optim import SGD, Adafactor, AdamW

import ds_layerwise
from ds_layerwise.errors import ConfigError
from tests.distributed.step.test_client_optimizer import config as client_config
from tests.distributed.step.test_client_optimizer import start as start_client
from tests.distributed.step.test_qk_clip import engine_of
from tests.support import internals
from tests.support.checkpoints import assert_equal_states, whole_states
from tests.support.harness import DistributedTest, made_once
from tests.support.rooms import rooms
from tests.support.training import BF16, Net, assert_same_on_all_ranks, ds_config, start, train_engine, weights

pytestmark = rooms("owned", "update", "first_step", "attention_logits", "masters", "forms", "dcp",
                   "whole_states", "client_groups")

REMAINDERS = {"master_dtype": "bfloat16+remainder"}
NARROW = {"momentum_dtype": "bfloat16", "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16",
          "stochastic_rounding": True}
TOLD = {"monitor": {"update_rms": True, "momentum_norm": True}, "log_num_zeros_in_grad": True,
        "norm_groups": {"vectors": {"ndim": 1, "gradient_clipping": 0.5}}}
VERIFY = {"verify_first_step": True}


class TestTheFirstStep(DistributedTest):
    """The check of a right first step passes, and changes nothing."""

    @pytest.mark.parametrize("changes", [{}, {**BF16, "layerwise": REMAINDERS}], ids=["float32", "remainders"])
    def test_with_queries_that_are_clipped(self, changes):
        layerwise, found = changes.get("layerwise", {}), []
        for verify in (VERIFY, {}):
            engine = engine_of("grouped, with biases", **{**changes, "layerwise": {**layerwise, **verify}})
            train_engine(engine, 1)
            assert max(engine.optimizer.max_attention_logits.values()) > 7.5
            assert not verify or not internals.is_first_step_due(engine)
            found.append(weights(engine.module).clone())
            engine.destroy()
        assert torch.equal(*found)

    @pytest.mark.parametrize("make", [lambda m: AdamW(m.parameters(), lr=0.02), lambda m: Adafactor(m.parameters())],
                             ids=["AdamW", "Adafactor"])
    def test_with_an_optimizer_of_the_script(self, make):
        found = []
        for verify in (VERIFY, {}):
            module = Net()
            engine = start_client(module, make(module), client_config(
                layerwise={**verify, **TOLD, **REMAINDERS}, **BF16))
            train_engine(engine, 2)
            assert not verify or not internals.is_first_step_due(engine)
            found.append((weights(engine.module).clone(), engine.optimizer.report()))
            engine.destroy()
        assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]


class TestQkClip(DistributedTest):
    def test_narrow_masters_are_clipped_to_the_bits_of_others(self):
        found = []
        for kept in ({}, REMAINDERS):
            engine = engine_of("grouped, with biases", layerwise=kept, **BF16)
            train_engine(engine, 3)
            assert max(engine.optimizer.max_attention_logits.values()) > 7.5
            assert_same_on_all_ranks(engine.module)
            found.append(whole_states(engine))
            engine.destroy()
        assert_equal_states(*found)


class TestShardedCheckpoints(DistributedTest):
    """Float32 in the file, whatever it is kept in."""

    changes = {"stage": 1, **BF16}
    narrow = {"params": {**NARROW, "stochastic_rounding": False}, "layerwise": REMAINDERS}
    codes = {"params": {"momentum_dtype": "8bit", "exp_avg_dtype": "8bit"}, "layerwise": {"alignment": 256}}

    @pytest.fixture
    def saved(self, class_tmpdir):
        return made_once(class_tmpdir / "saved", [2], self.save)

    def save(self, folder):
        for name in ("narrow", "codes"):
            engine = train_engine(start(Net(), ds_config(**self.changes, **getattr(self, name))), 3)
            dcp.save(engine.optimizer.sharded_state_dict(), checkpoint_id=str(folder / name))
            expected = whole_states(engine)
            if engine.global_rank == 0:
                torch.save(expected, folder / f"{name}.expected")

    @pytest.mark.world_size([2, 3])
    @pytest.mark.parametrize("name", ["narrow", "codes"])
    @pytest.mark.parametrize("back", [True, False], ids=["as it was", "float32"])
    def test_a_run_goes_on_from_it(self, saved, name, back):
        engine = start(Net(), ds_config(bucket_numel=10**6, **self.changes, **(getattr(self, name) if back else {})))
        train_engine(engine, 1, first=40)
        engine.optimizer.load_sharded_state_dict(saved / name)
        expected = torch.load(saved / f"{name}.expected")
        assert_equal_states({key: value.float() for key, value in whole_states(engine).items()},
                            {key: value.float() for key, value in expected.items()})


class TestRefused(DistributedTest):
    def test_another_width_of_an_optimizer_of_the_script(self):
        module = Net()
        with pytest.raises(ConfigError, match="layerwise.mup has no effect with an optimizer passed to"):
            start_client(module, SGD(module.parameters(), lr=0.1),
                         client_config(layerwise={"mup": {"base_width": 8, "width": 16}}))
        # The refused one leaves nothing behind.
        assert ds_layerwise.initialize(model=module, model_parameters=module.parameters(), config=ds_config())[0]
