"""DeepSpeed's monitors write the right values of a training on this backend, read back from their files."""

import csv
from importlib.util import find_spec

import deepspeed.comm as dist
import numpy as np
import pytest

from tests.distributed.step.test_reports import GROUP, averages, in_group, norm_of, reference_of, told_of_updates
from tests.support.harness import DistributedTest
from tests.support.rooms import rooms
from tests.support.training import Net, ds_config, start, train_engine

pytestmark = rooms("metrics", "sections")

STEPS, EVERY = 4, 2


def expected_files():
    """Return the samples and values by label of all that is reported of a training on two ranks, by the oracle."""
    found = {}
    for step in range(STEPS):
        mean = averages(step, 2)
        values = {"lr": 0.003, "adam_lr": 0.003, "muon_lr": 0.02, "skipped_steps": 0, "grad_norm": norm_of(mean),
                  "grad_norm_late": norm_of(mean, in_group),
                  "num_zeros_in_grad": sum(int((grad == 0).sum()) for grad in mean.values())}
        if (step + 1) % EVERY == 0:
            values |= told_of_updates(*reference_of(2, step + 1))
        for label, value in values.items():
            found.setdefault(f"Train/Samples/{label}", []).append((2 * (step + 1), pytest.approx(value, rel=1e-4)))
    return found


def csv_files(folder):
    found = {}
    for path in folder.iterdir():
        with path.open(newline="") as file:
            (_, label), *rows = csv.reader(file)
        assert path.name == f"Train_Samples_{label}.csv"
        found[f"Train/Samples/{label}"] = [(int(samples), float(value)) for samples, value in rows]
    return found


def tensorboard_files(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


class TestFiles(DistributedTest):
    def test_they_hold_what_the_oracle_has_computed(self, class_tmpdir):
        mine = class_tmpdir / str(dist.get_rank())
        monitors = ["csv_monitor", *filter(find_spec, ["tensorboard"])]
        engine = start(Net(), ds_config(
            **{key: {"enabled": True, "output_path": str(mine), "job_name": key} for key in monitors},
            layerwise={"log_num_zeros_in_grad": True, "norm_groups": {"late": GROUP},
                       "monitor": {"update_rms": True, "momentum_norm": True, "every": EVERY}}))
        train_engine(engine, STEPS)
        if dist.get_rank() > 0:
            assert not mine.exists()
            return
        assert sorted(path.name for path in mine.iterdir()) == monitors
        found = csv_files(mine / "csv_monitor")
        assert found == expected_files()
        if "tensorboard" in monitors:
            in_float32 = {label: [(samples, float(np.float32(value))) for samples, value in rows]
                          for label, rows in found.items()}
            assert tensorboard_files(mine / "tensorboard") == in_float32
