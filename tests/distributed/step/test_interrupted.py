"""An update that an exception ends on one rank, and that the script survives; see test_faults.py for
gradients."""

import gc
import os
import weakref
from contextlib import nullcontext
from pathlib import Path

import deepspeed.comm as dist
import pytest
import torch

from ds_layerwise.errors import LayerWiseError, StepError
from ds_layerwise.optimizers.rules import muon_family
from ds_layerwise.ranks.owned.host_memory import HostMemory
from ds_layerwise.ranks.sync import transfer
from ds_layerwise.ranks.sync.bucket_transfers import Wire
from tests.support.checkpoints import assert_same_run, states
from tests.support.harness import DistributedTest
from tests.support.rooms import rooms
from tests.support.training import Net, assert_same_on_all_ranks, ds_config, start, train_engine
from tests.support.transports import plan_in_cuts

pytestmark = rooms("step_progress", "update")

#: Arguments of ``ds_config``, and the function and the number of its call that finds no memory in a step.
CASES = {
    "first bucket, stage 1": ({"stage": 1}, "newton_schulz", 0),
    "later bucket, late wait, stage 2": ({"stage": 2, "layerwise": {"overlap_param_gather": True}}, "newton_schulz", 1),
    "on the host": ({"stage": 1, "bf16": {"enabled": True}}, "newton_schulz", 1),
    "before the first": ({"stage": 1, "bf16": {"enabled": True}}, "slots", 0),
    "what travels": ({"stage": 1}, "gather", 1),
    "what travels in cuts": ({"stage": 2}, "to_cuts in cuts", 0),
    "what travels after a round": ({"stage": 1}, "gather in cuts", 0),
    "what has arrived in a round": ({"stage": 1}, "unpack in cuts", 0),
    "shards that are masters": ({"stage": 3, "bf16": {"enabled": True}}, "newton_schulz", 0),
    "cuts of stage 3": ({"stage": 3, "bf16": {"enabled": True}}, "unpack", 0),
}

PLACES = {"newton_schulz": (muon_family, "newton_schulz"), "slots": (HostMemory, "__enter__"),
          "gather": (Wire, "gather"), "to_cuts": (transfer.Transfer, "to_cuts"), "unpack": (transfer, "unpack")}


class OutOfMemory:
    """``original``, and once no memory at the call that is counted down to."""

    def __init__(self, original):
        self.original, self.left, self.taken = original, None, None

    def __call__(self, *args, **kwargs):
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left, self.taken = None, torch.zeros(1)
                of_the_frame = self.taken  # noqa: F841
                raise torch.OutOfMemoryError("tried to allocate 2 GiB\nand much more")
        return self.original(*args, **kwargs)


def hooked(where, monkeypatch):
    place, name = PLACES[where.partition(" ")[0]]
    memory = OutOfMemory(getattr(place, name))
    # Not itself: what is no function is no method either.
    monkeypatch.setattr(place, name, lambda *args, **kwargs: memory(*args, **kwargs))
    return memory


class TestInterrupted(DistributedTest):
    @pytest.mark.parametrize("case", CASES)
    def test_all_ranks_refuse_until_a_checkpoint_is_loaded(self, case, tmp_path, monkeypatch):
        settings, where, calls = CASES[case]
        config = ds_config(clip=1.0, wall_clock_breakdown=True, **settings)
        if settings["stage"] == 1 and "bf16" in settings:
            config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        if where.endswith("in cuts"):
            plan_in_cuts(monkeypatch)
        healthy, engine = start(Net(), config), start(Net(), config)
        train_engine(healthy, 4)
        memory = hooked(where, monkeypatch)
        train_engine(engine, 2)
        engine.save_checkpoint(str(tmp_path))
        engine.backward(engine((2, 0, dist.get_rank())))
        if dist.get_rank() == 1:
            memory.left = calls
            with pytest.raises(torch.OutOfMemoryError, match="2 GiB"):
                engine.step()
            taken, memory.taken = weakref.ref(memory.taken), None
            gc.collect()
            assert taken() is None, "the error of a step that is over holds on to memory"
        else:
            engine.step()
        engine.backward(engine((3, 0, dist.get_rank())))
        for _ in range(2):
            with pytest.raises(LayerWiseError, match=r"the update of step 3 was interrupted by OutOfMemoryError: tried "
                               r"to allocate 2 GiB; some parameters are updated and others are not; load a checkpoint"):
                engine.step()
            with pytest.raises(LayerWiseError, match="the update of step 3 was interrupted"):
                engine.save_checkpoint(str(tmp_path), tag="half")
            assert Path(tmp_path, "latest").read_text() == "global_step2"
            assert not [name for name in os.listdir(tmp_path) if name.startswith("half")]
        with pytest.raises(StepError) if dist.get_rank() == 1 else nullcontext():
            engine.optimizer.state_dict()
        engine.load_checkpoint(str(tmp_path))
        train_engine(engine, 2, first=2)
        for each in (engine, healthy):
            each.optimizer.wait_for_params()
        assert_same_run(engine, healthy, of=states)
        assert_same_on_all_ranks(engine.module)
        engine.save_checkpoint(str(tmp_path), tag="whole")

    def test_weights_alone_do_not_make_it_whole(self, tmp_path, monkeypatch):
        engine = start(Net(), ds_config())
        memory = hooked("newton_schulz", monkeypatch)
        engine.save_checkpoint(str(tmp_path))
        engine.backward(engine((0, 0, dist.get_rank())))
        memory.left = 0
        with pytest.raises(torch.OutOfMemoryError):
            engine.step()
        for options in ({"load_module_only": True}, {"load_optimizer_states": False}):
            engine.load_checkpoint(str(tmp_path), **options)
            engine.zero_grad()
            engine.backward(engine((0, 0, dist.get_rank())))
            with pytest.raises(LayerWiseError, match="the update of step 1 was interrupted"):
                engine.step()

    def test_an_error_that_the_user_can_mend_leaves_no_timer_running(self):
        """The same for what is found before anything was updated."""
        engine = start(Net(), ds_config(wall_clock_breakdown=True))
        with pytest.raises(LayerWiseError, match="no backward pass"):
            engine.step()
        train_engine(engine, 1)
