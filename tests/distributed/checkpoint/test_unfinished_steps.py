"""Saves at every point of a step: a resumed run repeats the step, and does what the unbroken run did, bit for bit."""

from __future__ import annotations

import os
import re
import signal
from contextlib import nullcontext

import deepspeed.comm as dist
import pytest
from deepspeed.utils import logger

from ds_layerwise.checkpoint import regular
from ds_layerwise.errors import LayerWiseError, StepError
from tests.support import internals
from tests.support.checkpoints import assert_same_run, states
from tests.support.harness import DistributedTest
from tests.support.rooms import rooms
from tests.support.training import Net, ds_config, start, train_engine
from tests.support.transports import plan_in_cuts

pytestmark = rooms("step_progress", "checkpointing")

GAS = 4


def run(engine, until, *, at=None, gas=GAS):
    """Train up to micro-batch ``until`` of the whole run, from where the engine says that it is.

    ``at`` is called with the number of a micro-batch and the name of each point of it.
    """
    at = at or (lambda *_: None)
    first = engine.global_steps * gas + engine.micro_steps % gas
    for number in range(first, until):
        step, micro = divmod(number, gas)
        at(number, "before")
        loss = engine((step, micro, dist.get_rank()))
        at(number, "after forward")
        engine.backward(loss)
        at(number, "after backward")
        engine.step()
        at(number, "after step")


def assert_as_far(one, other):
    assert_same_run(one, other, of=states)
    assert one.global_steps == other.global_steps and one.global_samples == other.global_samples
    assert one.optimizer.step_count == other.optimizer.step_count


def assert_goes_on(resumed, folder, unbroken, *, gas=GAS, steps=1, tag=None):
    """Load what was saved within a step, after ``steps`` of them; the run repeats that one and ends as ``unbroken``."""
    resumed.load_checkpoint(folder, tag=tag)
    assert resumed.global_steps == steps and resumed.micro_steps % gas == 0
    run(resumed, unbroken.global_steps * gas, gas=gas)
    assert_as_far(resumed, unbroken)


class TestEveryPoint(DistributedTest):
    def test_a_step_of_four_micro_batches_is_repeated(self, stage, tmp_path, capsys):
        config = ds_config(stage=stage, gas=GAS)
        unbroken, saves, resumed, broken = (start(Net(), config) for _ in range(4))
        run(unbroken, 3 * GAS)

        def save(number, point):
            if GAS <= number < 2 * GAS:
                saves.save_checkpoint(tmp_path / f"{number - GAS} {point}")

        run(saves, 3 * GAS, at=save)
        assert_as_far(saves, unbroken)
        for micro in range(GAS):
            for point in ("before", "after forward", "after backward", "after step"):
                folder = tmp_path / f"{micro} {point}"
                capsys.readouterr()
                resumed.load_checkpoint(folder)
                begun = micro > 0 or point.startswith("after backward")
                over = (micro, point) == (GAS - 1, "after step")
                assert resumed.micro_steps % GAS == 0 and resumed.global_steps == 1 + over, (micro, point)
                if dist.get_rank() == 0:
                    said = "was saved within a step: no gradients are loaded" in capsys.readouterr().out
                    assert said == ((begun or point == "after step") and not over), (micro, point)
                run(resumed, 3 * GAS)
                assert_as_far(resumed, unbroken)
            # An engine that is within a step may go back, too.
            run(broken, broken.global_steps * GAS + 1 + micro)
            broken.load_checkpoint(folder)
            run(broken, 3 * GAS)
            assert_as_far(broken, unbroken)

    def test_it_is_said_once_a_run(self, tmp_path, monkeypatch):
        told = []
        monkeypatch.setattr(logger, "warning", told.append)
        engine = start(Net(), ds_config(gas=2))
        run(engine, 3, gas=2)
        for tag in ("a", "b"):
            engine.save_checkpoint(tmp_path, tag=tag)
        said = [line for line in told if "a resumed run repeats the step from its first micro-batch" in line]
        assert len(said) == (dist.get_rank() == 0)

    def test_inside_a_backward_pass_the_step_is_repeated(self, stage, tmp_path):
        """A signal handler runs between two hooks; the pass that it interrupts goes on."""
        config = ds_config(stage=stage, gas=2, overlap=False)
        unbroken, engine, resumed = (start(Net(), config) for _ in range(3))
        run(unbroken, 6, gas=2)
        signal.signal(signal.SIGUSR2, lambda *_: engine.save_checkpoint(tmp_path))
        run(engine, 3, gas=2)
        handle = engine.module.square.weight.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGUSR2))
        run(engine, 4, gas=2)
        handle.remove()
        run(engine, 6, gas=2)
        assert_as_far(engine, unbroken)
        assert_goes_on(resumed, tmp_path, unbroken, gas=2)

    def test_inside_a_backward_pass_before_its_first_gradient_is_within_a_step(self):
        engine, said = start(Net(), ds_config()), []
        loss = engine((0, 0, dist.get_rank()))
        loss.register_hook(lambda grad: said.append(engine.optimizer.checkpointing.header().repeats))
        engine.backward(loss)
        assert said == ["within a step"]

    def test_after_a_backward_pass_that_an_exception_ended_the_step_is_repeated(self, stage, tmp_path):
        """An exception handler may save before it gives up."""
        config = ds_config(stage=stage, gas=2, overlap=False)
        unbroken, engine, resumed = (start(Net(), config) for _ in range(3))
        run(unbroken, 6, gas=2)
        run(engine, 3, gas=2)
        engine.module.square.weight.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(engine, 4, gas=2)
        engine.save_checkpoint(tmp_path)
        assert_goes_on(resumed, tmp_path, unbroken, gas=2)

    def test_inside_an_update_it_is_refused_on_every_rank(self, tmp_path):
        engine = train_engine(start(Net(), ds_config()), 1)
        update = internals.owned(engine).update

        def interrupted(*args, **options):
            update(*args, **options)
            engine.save_checkpoint(tmp_path)

        internals.owned(engine).update = interrupted
        engine.backward(engine((1, 0, dist.get_rank())))
        with pytest.raises(StepError, match=re.escape("cannot be saved inside engine.step(), or after")):
            engine.step()
        internals.owned(engine).update = update
        with pytest.raises(StepError, match="some parameters are updated and others are not; load a checkpoint"):
            engine.save_checkpoint(tmp_path)
        assert not (tmp_path / "latest").exists() and not list(tmp_path.iterdir())

    def test_after_a_step_that_failed_before_it_moved_anything(self, tmp_path):
        engine, other = start(Net(), ds_config()), start(Net(), ds_config())
        train_engine(engine, 1)
        with pytest.raises(StepError, match="no backward pass reached the boundary"):
            engine.step()
        engine.save_checkpoint(tmp_path)
        other.load_checkpoint(tmp_path)
        assert_as_far(other, engine)

    def test_ranks_at_different_points_repeat_the_step(self, tmp_path):
        config = ds_config(gas=GAS)
        unbroken, engine, resumed = (start(Net(), config) for _ in range(3))
        run(unbroken, 2 * GAS)
        run(engine, GAS + 1 + dist.get_rank())
        engine.save_checkpoint(tmp_path)
        assert_goes_on(resumed, tmp_path, unbroken)

    def test_a_rank_alone_asks_for_its_state_or_forgets_its_gradients(self, tmp_path, monkeypatch):
        """At stage 2 the sums of buckets in cuts take all ranks to be put together; no rank waits for another here."""
        plan_in_cuts(monkeypatch)
        unbroken, engine, resumed = (start(Net(), ds_config(stage=2, gas=2)) for _ in range(3))
        run(unbroken, 4, gas=2)
        run(engine, 3, gas=2)
        if dist.get_rank() == 1:
            assert engine.optimizer.state_dict()[regular.KEY]["repeats"] == "within a step"
        # The ranks would meet in different collectives here.
        dist.barrier()
        run(engine, 4, gas=2)
        assert_as_far(engine, unbroken)
        run(unbroken, 6, gas=2)
        run(engine, 5, gas=2)
        if dist.get_rank() == 1:
            engine.optimizer.zero_grad()
        engine.save_checkpoint(tmp_path)
        assert_goes_on(resumed, tmp_path, unbroken, gas=2, steps=2)

    def test_ranks_at_different_steps_are_refused(self, tmp_path):
        engine = start(Net(), ds_config())
        engine.global_steps += dist.get_rank()
        with pytest.raises(LayerWiseError, match=r"the step of save_checkpoint\(\) differs between ranks: "
                                                 "rank 0 has steps 0, rank 1"):
            engine.save_checkpoint(tmp_path, tag="tag")
        assert not list(tmp_path.iterdir())


class TestOtherWaysToAccumulate(DistributedTest):
    def assert_repeated(self, config, passes, moments, folder):
        """``passes(engine, save)`` makes a step and calls ``save(moment)`` in it, where one of ``moments`` saves.

        Returns the last engine that saved, and the one that was resumed from that.
        """
        unbroken = start(Net(), config)
        passes(unbroken, lambda moment: None)
        for chosen in moments:
            engine, resumed = start(Net(), config), start(Net(), config)
            passes(engine, lambda moment: moment == chosen and engine.save_checkpoint(folder))
            assert_as_far(engine, unbroken)
            resumed.load_checkpoint(folder)
            assert resumed.optimizer.progress.passes == resumed.micro_steps == 0
            passes(resumed, lambda moment: None)
            assert_as_far(resumed, unbroken)
        return engine, resumed

    def test_no_sync(self, tmp_path):
        """Passes without communication, and one with, make a step; the engine counts none of them before ``step``."""
        def passes(engine, save):
            for number in range(4):
                with engine.no_sync() if number < 3 else nullcontext():
                    engine.backward(engine((7, number, dist.get_rank())))
                    save(number)
            engine.step()

        self.assert_repeated(ds_config(), passes, [1], tmp_path)

    def test_a_boundary_by_hand(self, stage, tmp_path, capsys):
        """Three backward passes, one ``step``; where four micro-batches would make a step."""
        def passes(engine, save):
            for number in range(3):
                engine.set_gradient_accumulation_boundary(number == 2)
                engine.backward(engine((7, number, dist.get_rank())))
                save(number)
            engine.step()

        config = ds_config(gas=GAS, stage=stage, overlap=False)
        engine, resumed = self.assert_repeated(config, passes, [1, 2], tmp_path)
        # Between two steps no step has begun, whatever micro_steps counts.
        engine.save_checkpoint(tmp_path, tag="whole")
        capsys.readouterr()
        resumed.load_checkpoint(tmp_path, tag="whole")
        assert "within a step" not in capsys.readouterr().out

    def test_steps_that_the_script_ends(self, stage, tmp_path):
        def passes(engine, save):
            for number in range(3):
                engine.backward(engine((7, number, dist.get_rank())))
                save(number)
            engine.step()

        config = ds_config(gas=GAS, stage=stage, overlap=False, managed_gradient_accumulation=False)
        self.assert_repeated(config, passes, [0, 2], tmp_path)

    def test_a_block_of_coalesced_passes_is_repeated(self, stage, tmp_path):
        def passes(engine, save):
            with engine.coalesce_grad_reduction():
                for number in range(2):
                    engine.backward(engine((7, number, dist.get_rank())))
                    save(number)
            save("after")
            engine.step()

        self.assert_repeated(ds_config(stage=stage), passes, [0, 1, "after"], tmp_path)

    def test_two_losses_a_micro_batch(self, stage, tmp_path):
        """Passes are not micro-batches where a script has several for one ``step``."""
        def passes(engine, save):
            for number in range(GAS):
                for loss in range(1 if number == GAS - 1 else 2):
                    engine.backward(engine((7, 2 * number + loss, dist.get_rank())))
                save(number)
                engine.step()

        self.assert_repeated(ds_config(gas=GAS, stage=stage, overlap=False), passes, [1], tmp_path)

    def test_a_step_whose_first_gradients_were_forgotten(self, tmp_path, capsys):
        """``zero_grad`` in the middle of a step takes no micro-batch off it, and the step is repeated."""
        config = ds_config(gas=GAS)
        unbroken, engine, resumed = (start(Net(), config) for _ in range(3))
        run(unbroken, GAS)
        run(engine, 2)
        engine.zero_grad()
        engine.save_checkpoint(tmp_path)
        capsys.readouterr()
        assert_goes_on(resumed, tmp_path, unbroken, steps=0)
        assert ("was saved within a step" in capsys.readouterr().out) == (dist.get_rank() == 0)


class TestUniversal(DistributedTest):
    def test_a_universal_checkpoint_says_that_the_step_is_repeated(self, tmp_path, capsys):
        config = ds_config(gas=GAS, layerwise={"save_universal": True})
        unbroken, engine, resumed = (start(Net(), config) for _ in range(3))
        run(unbroken, 2 * GAS)
        run(engine, GAS + 2)
        engine.save_checkpoint(tmp_path, tag="tag")
        capsys.readouterr()
        assert_goes_on(resumed, tmp_path, unbroken, tag="tag_universal")
        if dist.get_rank() == 0:
            assert "was saved within a step: no gradients are loaded" in capsys.readouterr().out
