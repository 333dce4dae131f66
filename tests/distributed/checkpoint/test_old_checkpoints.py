"""Checkpoints that earlier versions have written, in every format of theirs, are loaded with each value."""

from pathlib import Path

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from tests.old_checkpoints import CLIENT_STATE, GAS, STATES, STEPS, known, start
from tests.support.harness import DistributedTest
from tests.support.rooms import rooms
from tests.support.training import allow_fp16

pytestmark = rooms("regular", "universal", "single_file", "dcp", "manifest")

FIXTURES = Path(__file__).parents[2] / "fixtures"
PATHS = sorted(path for version in FIXTURES.iterdir() for path in version.iterdir())


class TestOldCheckpoints(DistributedTest):

    @pytest.mark.world_size([1, 2])
    @pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path.parent.name}-{path.stem}")
    def test_every_value(self, path):
        allow_fp16()
        engine = start(5.0)
        if path.suffix:
            engine.optimizer.load_state_dict_from_file(path)
        elif path.name == "sharded":
            engine.optimizer.load_sharded_state_dict(path)
        else:
            _, client_state = engine.load_checkpoint(path.parent, tag=path.name)
            assert CLIENT_STATE.items() <= client_state.items()
            # Of a step that was not over nothing counts.
            assert engine.global_steps == STEPS and engine.micro_steps % GAS == 0
            assert engine.lr_scheduler.last_batch_iteration == STEPS - 1
        assert engine.optimizer.step_count == STEPS and engine.optimizer.loss_scale == 16
        for name, keys in STATES.items():
            param = engine.module.get_parameter(name)
            expected = known(name, "fp32", param.shape)
            assert torch.equal(safe_get_full_fp32_param(param), expected) and torch.equal(param, expected.half()), name
            for key in keys:
                found = safe_get_full_optimizer_state(param, key)
                assert torch.equal(found, known(name, key, param.shape)), (name, key)
        # One file has nothing that is not trained.
        fill = 5.0 if path.suffix else 1.0
        assert torch.equal(engine.module.frozen.weight, torch.full((2, 3), fill).half())
        assert engine.module.seen.tolist() == [fill, 2 * fill]
