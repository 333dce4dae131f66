"""The answer of ``ds-layerwise plan``, and ``--fit``: their proposals fit by the plan itself, cheapest first."""

import json

import pytest

from ds_layerwise.plan.forecast.report import as_json
from ds_layerwise.tools.dry_run import DryRun, build_model
from ds_layerwise.tools.fit import Change, Fit, as_text, find_fits
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
def test_a_costlier_change_comes_only_if_nothing_cheaper_fits(memory, keys):
    fits, = find_fits(build_model("llama-3-8b"), config(), [8], memory_bytes=int(memory * GIB))
    assert changed_keys(fits) == keys
    assert [fit.sent for fit in fits] == sorted(fit.sent for fit in fits)


@pytest.mark.parametrize("model, devices, memory", [
    ("llama-3-8b", [8, 64], 40), ("llama-3-70b", [8], 112), ("llama-3-70b", [16], 80), ("qwen3-0.6b", [1], 10)])
def test_the_plan_says_the_same_of_what_it_proposes(model, devices, memory, written):
    given = config()
    found = find_fits(build_model(model), given, devices, memory_bytes=memory * GIB)
    for num_devices, fits in zip(devices, found, strict=True):
        assert fits
        for fit in fits:
            plan = DryRun.of(model, written(fit.change.applied_to(given)), [num_devices])
            told = as_json(plan.forecasts[0], memory_bytes=memory * GIB)
            assert told["left_bytes"] == fit.left >= 0 and told["sent_by_busiest_bytes"] == fit.sent


def test_each_micro_batch_sends_gradients_at_stages_2_and_3(written):
    model = build_model("llama-3-8b")
    for stage in (1, 2, 3):
        one, = DryRun.of(model, config(stage), [8]).forecasts
        four, = DryRun.of(model, config(stage, gradient_accumulation_steps=4), [8]).forecasts
        gradients, parameters = map(sum, zip(*one.sent_by_busiest().values(), strict=True))
        assert four.sent_by_busiest() == one.sent_by_busiest() and one.sent_in_step == gradients + parameters
        assert four.sent_in_step == (gradients if stage == 1 else 4 * gradients) + parameters
    # In float32, gradients are twice the bytes: with one micro-batch stage 2 sends least.
    dtypes = {"data_types": {"grad_accum_dtype": "fp32"}}
    for passes, first in ((1, 2), (4, 1)):
        given = config(3, **dtypes, gradient_accumulation_steps=passes, train_batch_size=64 * passes)
        best = find_fits(model, given, [64], memory_bytes=80 * GIB)[0][0]
        assert best.change.values["zero_optimization.stage"] == first
        out = run("plan", "--model", "llama-3-8b", "--config", written(given), "--ranks", "64", "--memory", "80")[1]
        assert f"sent in a step of {passes} micro-batch{'es' * (passes > 1)}; recommended: stage {first}," in " ".join(
            out.split())


def test_a_bucket_is_the_largest_that_fits(written):
    bounded, whole = find_fits(build_model("llama-3-8b"), config(), [8], memory_bytes=30 * GIB)[0]
    assert bounded.change.values["zero_optimization.reduce_bucket_size"] == 250_000_000 and bounded.left >= 0
    assert "zero_optimization.reduce_bucket_size" not in whole.change.values
    own = bounded.change.applied_to(config())
    own["zero_optimization"]["reduce_bucket_size"] = 500_000_000
    plan = DryRun.of("llama-3-8b", written(own), [8])
    assert as_json(plan.forecasts[0], memory_bytes=30 * GIB)["left_bytes"] < 0


def test_nothing_may_fit():
    assert find_fits(build_model("llama-3-8b"), config(), [8], memory_bytes=12 * GIB) == [[]]


def test_a_refused_config_is_refused(written):
    assert_refused("zero_optimization.stage", "plan", "--model", "gpt2-124m", "--config", written(config(stage=0)),
                   "--ranks", "8", "--fit", "1")


def test_the_table_and_what_to_merge(written):
    arguments = ["plan", "--model", "llama-3-8b", "--config", written(config()), "--ranks", "8,2", "--fit", "20"]
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 90
    merge, nothing = " ".join(out.split()).partition(" devices: 8; recommended: stage ")[2].split(" devices: ")
    assert "because it sends least of what fits; the first, to merge" in merge
    assert json.loads(merge.partition("config: ")[2])["zero_optimization"]["stage"] in (2, 3)
    assert nothing == "2; nothing that was tried fits"
    for name, *value in (["memory", "20"], ["gb_s", "50"], ["verbose"], ["list"], ["json"]):
        assert_refused(f"--fit and --{name} do not go together", *arguments, f"--{name}", *value)


def test_assumptions_are_said(written):
    given = config()
    given["zero_optimization"]["reduce_bucket_size"] = "auto"
    arguments = ["plan", "--model", "gpt2-124m", "--config", written(given), "--ranks", "8"]
    expected = "zero_optimization.reduce_bucket_size = 589824"
    for more in ((), ("--verbose",), ("--fit", "40"), ("--memory", "40")):
        assert expected in " ".join(run(*arguments, *more)[1].split())


#: Models, options of their mesh, the config's stage, ranks, and GiB of a device.
CLUSTERS = [
    ("qwen3-0.6b", (), 1, 1, 24), ("gpt2-124m", (), 2, 3, 1), ("gpt2-124m", (), 3, 8, 0.9),
    ("llama-3-8b", (), 1, 2, 79.6), ("llama-3-8b", (), 1, 8, 40), ("llama-3-8b", (), 2, 64, 79.6),
    ("llama-2-7b", (), 1, 8, 28), ("llama-2-7b", (), 1, 4, 12),
    ("llama-3-8b", ("--tp", "2"), 1, 8, 24), ("qwen3-30b-a3b", ("--ep", "8"), 3, 16, 79.6),
    ("llama-3-8b", ("--pp", "2"), 1, 8, 40), ("llama-3-8b", ("--sp", "4"), 1, 8, 36)]


@pytest.mark.parametrize("model, mesh, stage, ranks, memory", CLUSTERS)
def test_the_answer_agrees_with_the_byte_tables(model, mesh, stage, ranks, memory, written):
    """Verdict and recommendation against ``--json`` of each stage, in 12 lines of 90 columns."""
    def plan(stage, *more):
        return run("plan", "--model", model, "--config", written(config(stage)), "--ranks", str(ranks), *mesh, *more)

    code, out, err = plan(stage, "--memory", str(memory))
    assert (code, err) == (0, "") and len(out.splitlines()) <= 12 and max(map(len, out.splitlines())) <= 90
    words = " ".join(out.split())
    assert f" {ranks} ranks: " in words
    stages = {}
    for each in (1, 2, 3):
        code, told, _ = plan(each, "--json", "--memory", str(memory))
        if code == 0:  # stage 3 does not go with every mesh
            # Stages of a pipeline: that which needs most memory.
            stages[each] = max(json.loads(told), key=lambda numbers: numbers["needed_bytes"])
    assert (" ranks: fits, " in words) is stages[stage]["fits"] is not (" ranks: does not fit, " in words)
    fitting = {each: numbers for each, numbers in stages.items() if numbers["fits"]}
    recommended = words.partition("; recommended: ")[2].partition(", because")[0]
    if fitting:
        sent = {each: numbers["sent_by_busiest_bytes"] for each, numbers in fitting.items()}
        best = min(sent, key=sent.get)
        assert recommended == ("as it is" if best == stage else f"stage {best}")
    elif recommended:
        # Nothing but a change beside the stage makes it fit, or smaller buckets.
        assert "," in recommended
    else:
        assert "nothing that was tried fits" in words


def test_an_answer_counts_the_things_that_have_no_room(written):
    arguments = ["plan", "--model", "gpt2-124m", "--config", written(config()), "--ranks"]
    ranks = [*range(1, 21)]
    out = run(*arguments, ",".join(map(str, ranks)))[1]
    assert len(out.splitlines()) <= 12 and max(map(len, out.splitlines())) <= 90
    words = " ".join(out.split())
    shown = [number for number in ranks if f" {number} ranks: " in words]
    assert 3 < len(shown) < 20 and f" {20 - len(shown)} things more have no room here; " in words
    assert "no room" not in run(*arguments, "1,2")[1]


def test_activations_are_counted_by_tokens(written):
    arguments = ["plan", "--model", "llama-3-8b", "--config", written(config()), "--ranks", "8"]
    # 2 bytes of each of 32 layers of 4096, and 10 of each of 128,256 words: 1 and 4.9 GiB for 4,096 tokens.
    took = 4096 * (2 * 32 * 4096 + 10 * 128_256)
    needed = json.loads(run(*arguments, "--json", "--memory", "79.6")[1])[0]["needed_bytes"]
    said = run(*arguments, "--tokens", "4096")[1]
    assert f"{(needed + took) / GIB:.1f} GiB needed at stage 1" in said
    assert "6,034.0 MiB of activations are counted" in " ".join(said.split()) and took == 6034 * 2**20
    memory = (needed + took) / GIB
    for more, verdict in ((0.01, "fits, 10.2 MiB of"), (-0.01, "does not fit, 10.2 MiB too much")):
        assert verdict in run(*arguments, "--tokens", "4096", "--memory", str(memory + more))[1]
    # What leaves less says how much, and is not recommended.
    given = config()
    found = find_fits(build_model("llama-3-8b"), given, [8], memory_bytes=int(memory * GIB), activations=int(12 * GIB))
    enough = [fit.left >= 12 * GIB for fit in found[0]]
    assert enough == sorted(enough, reverse=True)
    assert changed_keys(found[0])[0] == ["stage"] and found[0][-1].left < 12 * GIB
    # If none of the cheap ones leaves enough, the costlier ones are tried.
    most = max(fit.left for fit in found[0])
    room = {"memory_bytes": int(memory * GIB), "activations": most + 1}
    assert changed_keys(find_fits(build_model("llama-3-8b"), given, [8], **room)[0])[0] == BOUNDED
    out = run(*arguments, "--fit", str(memory), "--tokens", str(2 * 4096))[1]
    assert "too much" in out and "beside 11.8 GiB of activations" in " ".join(out.split())
    assert "too much" not in run(*arguments, "--fit", "79.6", "--tokens", "1")[1]
    none = run(*arguments, "--fit", "40", "--tokens", "100000")[1]
    assert "nothing that was tried fits" in none and "too much" in none and "to merge" not in none
    told = run(*arguments, "--tokens", "4096", "--verbose")[1]
    assert "needed and fits, below, leave out 6,034.0 MiB of activations" in told
    for option in ("--json", "--list"):
        assert_refused(f"--tokens and {option} do not go together", *arguments, "--tokens", "1", option)
    assert_refused("--tokens needs a model with a config that has hidden_size", "plan", "--model",
                   "tests.support.model_specs:small", *arguments[3:], "--tokens", "8")


def test_each_price_is_told_once():
    fits = [[Fit(Change({}, prices), 1, 1)] for prices in (("a: costs", "b: waits"), ("a: costs",))]
    told = as_text(fits, [1, 2], 10).splitlines()
    assert [line for line in told if line.startswith(("a:", "b:"))] == ["a: costs", "b: waits"]
