"""``ds-layerwise plan --fit``: what it proposes fits by the plan itself, and the cheapest comes first."""

import json

import pytest

from ds_layerwise.errors import ConfigError
from ds_layerwise.plan.forecast.report import as_json
from ds_layerwise.tools.dry_run import DryRun
from ds_layerwise.tools.fit import find_fits
from tests.support.cli import assert_refused, run
from tests.support.rooms import rooms

pytestmark = rooms("fit", "dry_run")

GIB = 2**30


def config(stage=1, **changes):
    return {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True},
            "optimizer": {"type": "LayerWiseMuon", "params": {}}, **changes}


@pytest.fixture
def written(tmp_path):
    """The file of a config."""
    def write(given):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(given))
        return path

    return write


def changed_keys(fits):
    return [sorted({path.rpartition(".")[2] for path in fit.change.values} - {"reduce_bucket_size"}) for fit in fits]


BOUNDED = ["max_waiting_buckets", "overlap_comm", "stage"]
SHORT_STATES = [*BOUNDED, "exp_avg_dtype", "exp_avg_sq_dtype", "master_dtype", "momentum_dtype", "stochastic_rounding"]


# Eight devices with less and less memory.
@pytest.mark.parametrize("memory, keys", [
    (79.6, [[], ["stage"], ["stage"]]), (40, [["stage"]]), (30, [BOUNDED, BOUNDED]), (18, [sorted(SHORT_STATES)]),
    (16, [["max_waiting_buckets", "offload_optimizer", "overlap_comm", "stage"]])])
def test_a_costlier_change_comes_only_if_nothing_cheaper_fits(memory, keys, written):
    (fits, ), _ = find_fits("llama-3-8b", written(config()), [8], memory_bytes=int(memory * GIB))
    assert changed_keys(fits) == keys
    assert [fit.sent for fit in fits] == sorted(fit.sent for fit in fits)


@pytest.mark.parametrize("model, devices, memory", [
    ("llama-3-8b", [8, 64], 40), ("llama-3-70b", [8], 112), ("llama-3-70b", [16], 80), ("qwen3-0.6b", [1], 10)])
def test_the_plan_says_the_same_of_what_it_proposes(model, devices, memory, written):
    given = config()
    found, _ = find_fits(model, written(given), devices, memory_bytes=memory * GIB)
    for num_devices, fits in zip(devices, found, strict=True):
        assert fits
        for fit in fits:
            plan = DryRun.of(model, written(fit.change.applied_to(given)), [num_devices])
            told = as_json(plan.forecasts[0], memory_bytes=memory * GIB)
            assert told["left_bytes"] == fit.left >= 0 and told["sent_by_busiest_bytes"] == fit.sent


def test_nothing_may_fit(written):
    assert find_fits("llama-3-8b", written(config()), [8], memory_bytes=12 * GIB)[0] == [[]]


def test_a_refused_config_is_refused(written):
    with pytest.raises(ConfigError, match="zero_optimization.stage"):
        find_fits("gpt2-124m", written(config(stage=0)), [8], memory_bytes=GIB)


def test_the_table_and_what_to_merge(written):
    arguments = ["plan", "--model", "llama-3-8b", "--config", written(config()), "--ranks", "8,2", "--fit", "20"]
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines()[:8])) <= 80
    merge, nothing = out.splitlines()[-2:]
    assert json.loads(merge.partition("config: ")[2])["zero_optimization"]["stage"] in (2, 3)
    assert nothing == "devices: 2; nothing that was tried fits"
    for more in (["--memory", "20"], ["--list"], ["--json"]):
        assert_refused("leave --memory, --list and --json out, or --fit", *arguments, *more)


def test_assumptions_are_said(written):
    given = config()
    given["zero_optimization"]["reduce_bucket_size"] = "auto"
    arguments = ["plan", "--model", "gpt2-124m", "--config", written(given), "--ranks", "8"]
    lines = run(*arguments)[1].splitlines()
    assumed = [line for line in lines if line.startswith("assumed")]
    assert assumed and run(*arguments, "--fit", "40")[1].splitlines()[:len(assumed)] == assumed
