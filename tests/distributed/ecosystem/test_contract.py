"""Names that are found in the code of DeepSpeed, on an engine that is there."""

from deepspeed.accelerator import get_accelerator

from ds_layerwise.engine.contract.contract import CONTRACT, ON_INSTANCES
from tests.support.deepspeed_names import USED
from tests.support.harness import DistributedTest
from tests.support.rooms import rooms
from tests.support.training import Net, ds_config, start, train_engine

pytestmark = rooms("contract", "patches")


class TestALiveEngine(DistributedTest):
    world_size = 1

    def test_it_has_what_is_read_of_it(self):
        engine = train_engine(start(Net(), ds_config()), 1)
        objects = {
            "DeepSpeedEngine": engine, "DeepSpeedConfig": engine._config, "ZeROOptimizer": engine.optimizer,
            "BackwardHookStateManager": engine.optimizer._backward_hook_state, "EngineTimers": engine.engine_timers,
            "DeepSpeedZeroConfig": engine._config.zero_config, "DeepSpeedBF16Config": engine._config.bfloat16_config,
            "TPTrainingConfig": engine.tensor_parallel_config(), "LossScalerBase": engine.optimizer.loss_scaler,
            "TPConfig": engine.tensor_parallel_config().tensor_parallel, "CheckpointEngine": engine.checkpoint_engine,
            "DeepSpeedAccelerator": get_accelerator(),
        }
        import deepspeed
        release = deepspeed.__version__
        named = [*(name for name in CONTRACT if name.parameters is not None), *ON_INSTANCES,
                 *(name for name in USED if name.kind == "read" and name.is_in(release))]
        read = [(objects[name.path.split(".")[-2]], name.key) for name in named if name.path.split(".")[-2] in objects]
        assert len(read) > 100
        assert not [name for owner, name in read if not hasattr(owner, name)]
        answered = [name.key for name in USED if name.kind == "asked" and "DeepSpeedEngine" in name.path]
        assert not [name for name in answered if not hasattr(engine.optimizer, name)]
