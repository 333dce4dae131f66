"""``ds-layerwise plan``: its refusals, its two forms, and that its parsing is DeepSpeed's. An engine's own numbers are
in tests/distributed/ecosystem/test_plan.py."""

import copy
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from deepspeed.moe.layer import MoE
from deepspeed.runtime.config import DtypeEnum
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from torch import nn
from transformers import TrainingArguments

from ds_layerwise import cli
from ds_layerwise.config.run_config import DEFAULT_BUCKET_NUMEL, RunConfig
from ds_layerwise.optimizers.rules.muon_family import Muon
from ds_layerwise.tools.dry_run import DryRun
from tests.support import model_specs
from tests.support.cli import assert_refused, run
from tests.support.model_specs import bare
from tests.support.rooms import rooms
from tests.support.versions import needs

pytestmark = [*rooms("dry_run", "forecast", "ds_config", "run_config"), pytest.mark.usefixtures("wide_tables")]

ROOT = Path(__file__).parents[3]

def config(**changes):
    return {"zero_optimization": {"stage": 1, "reduce_bucket_size": 2048}, "bf16": {"enabled": True},
            "optimizer": {"type": "LayerWiseMuon", "params": {}}, **changes}


SMALL = "tests.support.model_specs:small"


@pytest.fixture
def files(tmp_path):
    def arguments(given, ranks="2", *more):
        path = tmp_path / "config.json"
        path.write_text(given if isinstance(given, str) else json.dumps(given))
        return ["plan", "--model", SMALL, "--config", path, "--ranks", ranks, *more]

    return arguments


def test_the_numbers_of_a_small_model_by_hand(files):
    code, out, err = run(*files(config(), "2", "--json"))
    assert (code, err) == (0, "")
    plan, = json.loads(out)
    # Two buckets of matrices, 2048 elements each, and the embedding of 1024; no padding. Each rank owns 2 matrices.
    assert (plan["ranks"], plan["buckets"], plan["elements"], plan["padding_elements"]) == (2, 3, 5120, 0)
    assert plan["owned_matrix_elements"] == [2048, 2048]
    # Gradients accumulate in bf16; Muon keeps one state, Adam two.
    held = {"params": 2 * 5120, "grads": 2 * 5120, "masters": 4 * 2560, "states": 4 * 2048 + 8 * 512}
    assert plan["memory_bytes"] == [{**held, "host": 0, "staging": 0, "total": sum(held.values())}] * 2
    # Of two buckets of 2048, sums of 1024 each arrive in bf16; at most two matrices are updated together.
    # Averages are float32 copies of the rank's shards.
    sums = 4 * 2560
    update = Muon().workspace((2, 16, 64)) + sums
    assert plan["working_bytes"] == {"update": update, "in_pass": sums, "exchange": sums, "transfers": 4096,
                                     "total": update + 4096}
    assert plan["dtypes"]["bfloat16"] == {
        "gradients_accumulate_in": "bfloat16", "gradients_travel_in": "bfloat16",
        "sent_bytes": {"gradients": 2 * 5120 / 2, "parameters": 2 * 5120 / 2},
        "sent_by_busiest_bytes": {"gradients": 5120, "parameters": 5120}}
    assert plan["gradients_sent_every"] == "step"


def cells(out, columns):
    """The rows of the table in ``out`` that has so many columns."""
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines()
            if line.count("│") == columns + 1]


def test_sums_are_those_that_are_asked_for_and_bytes_take_as_long_as_a_bandwidth_says(files):
    def plan(*more, **layerwise):
        found, = json.loads(run(*files(config(layerwise=layerwise), "4", "--json", *more))[1])
        return found

    assert plan()["reduction"] == "native" and plan(reduction="ordered")["reduction"] == "ordered"
    # Each of two buckets has matrices for two ranks.
    assert plan()["transports"] == {"even": 0, "cuts": 2}
    slow = plan("--gb_s", "0.5")
    assert slow["sent_seconds"] == slow["sent_by_busiest_bytes"] / 5e8 and "sent_seconds" not in plan()
    assert "sent at 0.5 GB/s" in run(*files(config(), "4", "--gb_s", "0.5", "--verbose"))[1]


@pytest.mark.parametrize("said", ["0", "-1", "inf", "nan", "fast"])
def test_a_bandwidth_is_a_number_above_0(said, files, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main([*map(str, files(config())), "--gb_s", said])
    assert f"argument --gb_s: must be a number of GB/s above 0, got '{said}'\n" in capsys.readouterr().err


def test_a_plan_that_does_not_fit_is_no_error(files):
    code, out, err = run(*files(config(), "2,4", "--memory", "1e-6", "--verbose"))
    assert (code, err) == (0, "") and "\ntoo much: more ranks" in out
    code, out, err = run(*files(config(), "2,4", "--memory", "80", "--verbose"))
    assert (code, err) == (0, "") and "on a device with 80.0 GiB" in out
    assert ["fits", "yes, 80.0 GiB left", "yes, 80.0 GiB left"] in cells(out, 3) and "too much" not in out
    assert "fits" not in run(*files(config(), "2,4", "--verbose"))[1]
    assert_refused("--list has no row for --memory", *files(config(), "2", "--memory", "80", "--list"))
    plan, = json.loads(run(*files(config(), "2", "--memory", "80", "--list", "--json"))[1])
    assert plan["fits"] and plan["device_memory_bytes"] == 80 * 2**30


@pytest.mark.parametrize("memory", ["0", "-1", "nan", "inf", "1e999", "80GB", "", "1048577"])
def test_memory_is_a_positive_number_of_gib(memory, files, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main([str(arg) for arg in files(config(), "2", "--memory", memory)])
    assert (f"argument --memory: must be a number of GiB above 0 and up to 1,048,576, got '{memory}'\n"
            in capsys.readouterr().err)


def test_several_numbers_of_ranks_are_columns_with_the_same_numbers(files):
    given = config(zero_optimization={"stage": 2, "reduce_bucket_size": 2048}, layerwise={"reduction": "ordered"})
    code, out, _ = run(*files(given, "1,2,4", "--verbose"))
    plans = json.loads(run(*files(given, "1,2,4", "--json"))[1])
    rows = {name: values for name, *values in cells(out, 4)}

    def short(num_bytes):
        return f"{num_bytes / 2**20:.1f} MiB"

    assert code == 0 and rows["ranks"] == ["1", "2", "4"]
    for number, plan in enumerate(plans):
        shown = {name: values[number] for name, values in rows.items()}
        held = plan["memory_bytes"][plan["fullest_rank"]]
        assert shown["digest"] == plan["digest"] and shown["buckets"].startswith(f"{plan['buckets']}, ")
        assert shown["matrix updates"].endswith(f", {plan['newton_schulz_max_over_mean']:.3f} x")
        assert shown["held"].startswith(f"{short(held['total'])}, ")
        for name, key in (("parameters", "params"), ("gradients", "grads"), ("masters", "masters"),
                          ("states", "states"), ("on the host", "host")):
            assert shown[name] == short(held[key])
        assert shown["works in, at most"] == short(plan["working_bytes"]["total"])
        sent = plan["dtypes"]["bfloat16"]["sent_by_busiest_bytes"]
        mean = plan["dtypes"]["bfloat16"]["sent_bytes"]
        # Where shards are even no rank sends more than the mean one.
        assert (mean == sent) == (not plan["transports"]["cuts"])
        assert sum(sent.values()) == plan["sent_by_busiest_bytes"]
        assert (shown["sent, gradients"], shown["sent, parameters"]) == tuple(map(short, sent.values()))
        assert shown["padding"] == "0, 0.000 %"
    assert "gradients in a backward pass, parameters in a step" in " ".join(out.split())


def test_overrides_move_parameters(files):
    overrides = [{"name": "*.up", "optimizer": "scalar"}, {"name": "embed", "optimizer": "matrix", "num_heads": 4},
                 {"name": "*.down", "weight_decay": 0.0}]
    plan, = json.loads(run(*files(config(layerwise={"overrides": overrides}), "1", "--json"))[1])
    assert plan["owned_matrix_elements"] == [3 * 1024]
    # Two of 16 x 64, and four of 4 x 64, five steps each: 2 Gram matrices and 14 small products, 4 rectangular ones.
    down, heads = (4 * 2 * 16 * 16 * 64 + 14 * 2 * 16**3), (4 * 2 * 4 * 4 * 64 + 14 * 2 * 4**3)
    assert plan["newton_schulz_flops"] == [2 * down + 4 * heads]
    out = run(*files(config(layerwise={"overrides": overrides}), "2", "--verbose"))[1]
    assert "layerwise.overrides, 4 heads" in out


class WithExperts(nn.Module):
    """A MoE layer of DeepSpeed on rank 0 of two, with two of its four experts."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(16, 16, bias=False)
        self.moe = MoE(16, nn.Linear(16, 16, bias=False), num_experts=4, ep_size=2)


def test_ranks_share_the_experts_that_a_model_is_built_with(files, monkeypatch):
    monkeypatch.setattr(model_specs, "small", WithExperts)
    code, out, err = run(*files(config(layerwise={"overrides": [{"name": "*deepspeed_experts.3.*", "lr_scale": 0.5},
                                                                {"name": "*deepspeed_experts.1.*", "lr_scale": 0.5}]}),
                                "4", "--json", "--list"))
    assert (code, err) == (0, "")
    plan, = json.loads(out)
    rows = {row["name"].rpartition("deepspeed_experts.")[2]: row for row in plan["parameters"]}
    assert [*rows] == ["dense.weight", "moe.deepspeed_moe.gate.wg.weight", "0.weight", "1.weight"]
    # Expert 1 goes by the names of 1 and 3, which an override means alike.
    assert rows["1.weight"]["lr_ratio"] == rows["0.weight"]["lr_ratio"] / 2
    # Either of the two experts of 256 elements has two owners, 0 or 1 and 2 or 3.
    assert sum(plan["owned_matrix_elements"]) == 4 * 16 + 2 * 2 * 256 + 256
    assert_refused(".weight has ep_size 2, which 3 ranks cannot share evenly", *files(config(), "3"))
    assert_refused("deepspeed_experts.0.weight is an expert of group ep_size_2, and a plan reads the number of ranks "
                   "from names like ep_size_4, which has to be that of --ep, 4", *files(config(), "4", "--ep", "4"))
    assert run(*files(config(), "4", "--json", "--ep", "2"))[1] == run(*files(config(), "4", "--json"))[1]
    assert_refused("zero_optimization.stage is 3, and experts of deepspeed.moe, experts together with",
                   *files(config(zero_optimization={"stage": 3, "reduce_bucket_size": 2048}), "4"))


@pytest.mark.parametrize("stage, build, message", [
    (3, lambda: bare({"up": (4, 4), "nothing": (0, 4)}), "nothing has no elements, and DeepSpeed cannot make"),
    (1, lambda: nn.Sequential(nn.LazyLinear(4)), "returns a model with a lazy 0.weight, which has no shape before")])
def test_models_that_a_run_refuses(stage, build, message, files, monkeypatch):
    monkeypatch.setattr(model_specs, "small", build)
    assert_refused(message, *files(config(zero_optimization={"stage": stage, "reduce_bucket_size": 2048})))


def test_everything_may_be_sent_to_the_scalar_optimizer(files, monkeypatch):
    given = config(layerwise={"overrides": [{"name": "*", "optimizer": "scalar"}]})
    plan, = json.loads(run(*files(given, "2", "--json"))[1])
    assert (plan["newton_schulz_flops"], plan["newton_schulz_max_over_mean"]) == ([0, 0], 1)
    # Two float32 states of AdamW, half on each rank.
    assert [held["states"] for held in plan["memory_bytes"]] == [2 * 4 * 5120 / 2] * 2
    monkeypatch.setattr(model_specs, "small", lambda: bare({"embed": (4, 3)}))
    plan, = json.loads(run(*files(given, "2", "--json"))[1])
    assert plan["owned_matrix_elements"] == [0, 0] and plan["elements"] == 12
    assert_refused("no parameter goes to the matrix optimizer, of 1 trainable ones: 1 x embedding (by name)",
                   *files(config()))


def test_every_parameter_is_listed(files):
    overrides = [{"name": "1.up", "optimizer": "scalar", "lr_scale": 0.5}, {"name": "*.down", "weight_decay": 0.3},
                 {"name": "1.down", "num_heads": 4, "weight_decay_method": "palm", "cautious_weight_decay": True}]
    params = {"lr": 1e-3, "muon_lr": 2e-2, "adam_lr": 2e-3, "weight_decay": 0.1}
    given = config(layerwise={"overrides": overrides}, optimizer={"type": "LayerWiseMuon", "params": params})
    code, out, err = run(*files(given, "1", "--list"))
    assert (code, err) == (0, "")
    expected = [
        ("embed", "16x64", "adamw", "0.1", "2", "all", "embedding (by name), bare"),
        ("0.up", "16x64", "muon", "0.1", "20", "0", "matrix, bare"),
        ("0.down", "64x16", "muon", "0.3", "20", "0", "matrix, bare"),
        ("1.up", "16x64", "adamw", "0.1", "1", "all", "layerwise.overrides"),
        ("1.down", "64x16", "muon", "0.3 palm, cautious", "20", "0", "matrix, 4 heads, bare")]
    head, columns, *lines, between, about = out.splitlines()
    assert not between and all(word in about for word in ("lr ratio: ", "owner: ", "because: "))
    assert head == "1 ranks" and re.split(" {2,}", columns) == [
        "name", "shape", "optimizer", "weight decay", "lr ratio", "owner", "because"]
    assert [tuple(re.split(" {2,}", line)) for line in lines] == expected
    out = run(*files(given, "1,2", "--list", "--json"))[1]
    plans = json.loads(out)
    assert out.count("\n") == 1
    # All are in one group.
    assert {each.group for each in DryRun.of(SMALL, files(given)[4], [2]).routes.values()} == {0}
    for plan in plans:
        owned = [0] * plan["ranks"]
        for row in plan["parameters"]:
            if row["owner"] is not None:
                owned[row["owner"]] += math.prod(row["shape"])
        assert owned == plan["owned_matrix_elements"]
    assert [row["matrices"] for row in plans[0]["parameters"]] == [None, [16, 64], [64, 16], None, [4, 16, 16]]
    assert not any(row["parts"] for row in plans[0]["parameters"])


@pytest.mark.parametrize("given, message", [
    (config(optimizer={"type": "AdamW"}), "optimizer.type must be 'LayerWiseMuon' or 'LayerWise', got 'AdamW'"),
    ({}, "optimizer.type must be 'LayerWiseMuon' or 'LayerWise', got None"),
    ([1], "a DeepSpeed config must be an object, got [1]"),
    ("{", "config.json is no JSON: Bad key name"),
    (config(optimizer={"type": "LayerWise", "params": {"ns_coefficients": "simpel"}}), "did you mean 'simple'"),
    (config(optimizer={"type": "LayerWise", "params": {"ns_coefficients": "cans", "ns_dtype": "bf16"}}), "diverges"),
    (config(optimizer={"type": "LayerWise", "params": {"per_head_muon": True}}), "found no query, key or value pro"),
    (config(layerwise={"overrides": [{"name": "x", "lr_scale": 2}]}), "matches no trainable parameter"),
    (config(zero_optimization={"stage": 4}), "zero_optimization.stage must be 1 or 2 or 3 with this optimizer, got 4"),
    (config(bf16={}, torch_autocast={"enabled": True, "dtype": "bfloat16"}), "half precision; plan without it"),
    (config(fp16={"enabled": True}), "bf16.enabled and fp16.enabled are both true"),
    (config(optimizer={"type": 5}), "optimizer.type must be 'LayerWiseMuon' or 'LayerWise', got 5"),
    (config(optimizer=None), "optimizer.type must be 'LayerWiseMuon' or 'LayerWise', got None: there is no optimizer"),
    (config(tensor_parallel={"autotp_size": 2}), "a plan cuts a model into 2 tensor-parallel parts as its class in"),
    (config(zero_optimization={"stage": 3, "zero_hpz_partition_size": 3}), "is 3, which does not divide the 2 ranks"),
    (config(sequence_parallel_size=3), "--ranks is 2, all ranks of a run, and pp 1 x tp 1 x sp 3 does not divide it"),
    (config(expert_parallel={"enabled": True, "autoep_size": 2}), "AutoEP finds no layers of experts in the model"),
    ("[" * 100_000, "config.json is no JSON"),
    ('{"a": 1, "a": 2}', "config.json is no JSON: Duplicate keys in DeepSpeed config: ['a']"),
    ('"x"', "a DeepSpeed config must be an object, got 'x'"),
])
def test_a_plan_refuses_the_configs_that_training_refuses(given, message, files):
    assert_refused(message, *files(given))


def test_a_config_that_is_not_there_is_refused(files, tmp_path):
    arguments = files(config())
    arguments[4] = tmp_path / "none.json"
    assert_refused(f"--config must be a file with a DeepSpeed config, got {arguments[4]}: No such file or directory; "
                   "name one, such as those in ds_configs", *arguments)
    arguments[4] = tmp_path
    assert_refused(f"--config must be a file with a DeepSpeed config, got {tmp_path}: Is a directory", *arguments)


#: Every section and key that a plan looks at.
FULL = {
    "optimizer": {"type": "LayerWiseMuon", "params": {
        "lr": 3e-4, "muon_lr": 0.02, "adam_lr": 1e-3, "momentum": 0.9, "betas": [0.9, 0.95], "eps": 1e-8,
        "weight_decay": 0.1, "nesterov": True, "ns_method": "gram", "ns_steps": 5, "ns_coefficients": [[2, -1.5, 0.5]],
        "ns_dtype": "fp32", "scale_mode": "original", "extra_scale_factor": 1.0, "scalar_optimizer": "adamw",
        "per_head_muon": False, "muon_tp_mode": "duplicated"}},
    "layerwise": {"layout": "lpt", "alignment": 4, "overlap_param_gather": True, "batch_matrices": True,
                  "overrides": [{"name": "*.up", "optimizer": "matrix", "weight_decay": 0.0, "lr_scale": 2.0,
                                 "num_heads": 2}]},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 2048, "reduce_scatter": True,
                          "offload_optimizer": {"device": "cpu", "ratio": 0.5}, "offload_param": {"device": "none"}},
    "bf16": {"enabled": True}, "fp16": {"enabled": False}, "torch_autocast": {"enabled": False},
    "data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "bf16", "gradient_clipping": 1.0,
    "tensor_parallel": {"autotp_size": 1}, "checkpoint": {"load_universal": False},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-4}},
}
WRONG = [None, True, 7, -1, math.inf, math.nan, 10**400, "x", "auto", "", [], [1], [[]], {}, {"x": 1}, {"enabled": 1}]


def with_each_wrong(whole):
    """``whole`` once for every place in it and every wrong value there, and the place."""
    def walk(value, path):
        yield path
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) \
                else ():
            yield from walk(inner, (*path, key))

    for path in walk(whole, ()):
        for wrong in WRONG:
            changed = {"": copy.deepcopy(whole)}
            inside = changed
            for key in ("", *path)[:-1]:
                inside = inside[key]
            inside[("", *path)[-1]] = wrong
            yield (*path, wrong), changed[""]


def test_whatever_a_config_holds_is_planned_or_refused_in_one_line(files):
    assert run(*files(FULL))[::2] == (0, "")
    for place, given in with_each_wrong(FULL):
        code, out, err = run(*files(given))
        assert (code == 0 and out) or (code == 2 and not out and err.count("\n") == 1), (place, code, err)


def test_comments_are_read_as_deepspeed_reads_them(files):
    given = json.dumps(config())
    assert run(*files("# a comment\n" + given[:-1] + ",\n}"))[:2] == run(*files(given))[:2]


def test_auto_is_what_a_trainer_fills_in(files):
    by_hand, auto = (json.loads((ROOT / "ds_configs" / "hf_auto.json").read_text()) for _ in range(2))
    auto["scheduler"] = {"type": "WarmupDecayLR", "params": {"warmup_max_lr": "auto", "warmup_min_lr": "auto",
                                                             "total_num_steps": "auto", "warmup_num_steps": "auto"}}
    filled = TrainingArguments(output_dir="unused").to_dict()
    by_hand.update(bf16={"enabled": filled["bf16"]}, fp16={"enabled": filled["fp16"]},
                   gradient_clipping=filled["max_grad_norm"])
    by_hand["optimizer"]["params"].update(
        lr=filled["learning_rate"], betas=[filled["adam_beta1"], filled["adam_beta2"]], eps=filled["adam_epsilon"],
        weight_decay=filled["weight_decay"])
    code, out, err = run(*files(auto, "2", "--verbose"))
    assert (code, err) == (0, "") and out.endswith(run(*files(by_hand, "2", "--verbose"))[1])
    said = dict(re.findall(r"([\w.]+) = (\[.*?\]|[^,\s]+)", " ".join(out.split())))
    assert {path: json.loads(value) for path, value in said.items()} == {
        "gradient_clipping": filled["max_grad_norm"], "bf16.enabled": filled["bf16"], "fp16.enabled": filled["fp16"],
        "optimizer.params.lr": filled["learning_rate"], "optimizer.params.eps": filled["adam_epsilon"],
        "optimizer.params.betas": [filled["adam_beta1"], filled["adam_beta2"]],
        "optimizer.params.weight_decay": filled["weight_decay"], "scheduler.params.warmup_min_lr": 0,
        "scheduler.params.warmup_max_lr": filled["learning_rate"],
        # It is the square of what this model does not say.
        "zero_optimization.reduce_bucket_size": DEFAULT_BUCKET_NUMEL}
    code, out, err = run(*files(auto, "2", "--json"))
    assert code == 0 and len(json.loads(out)) == 1 and err.count("assumed") == err.count("\n") == 2
    assert err.count(" = ") == 10
    # What no Trainer knows stays an error.
    auto["optimizer"]["params"]["muon_lr"] = "auto"
    assert_refused("optimizer.params.muon_lr is 'auto', which only Hugging Face", *files(auto))


@pytest.mark.parametrize("hidden_size, numel, by", [
    (45, 45**2, "which a Trainer by default fills in like this"),
    (None, DEFAULT_BUCKET_NUMEL, "for which DeepSpeed uses its default, because the model has no hidden_size, whose "
                                 "square a Trainer would use")])
def test_a_bucket_size_that_is_the_only_auto_is_said(hidden_size, numel, by, files, monkeypatch):
    def built():
        model = bare(model_specs.SMALL)
        model.config = SimpleNamespace(hidden_size=hidden_size)
        return model

    monkeypatch.setattr(model_specs, "small", built)
    auto, by_hand = (config(zero_optimization={"stage": 1, "reduce_bucket_size": size}) for size in ("auto", numel))
    code, out, err = run(*files(auto, "2", "--json"))
    assert (code, err) == (0, f'assumed for "auto", {by}: zero_optimization.reduce_bucket_size = {numel}\n')
    assert run(*files(by_hand, "2", "--json")) == (0, out, "")
    for form in (("--verbose",), ("--list",)):
        assert run(*files(auto, "2", *form))[1].startswith(err)


@needs("deepspeed>=0.19.7", "it has no compute_grad_norm")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_plan_says_what_deepspeed_takes_for_auto(stage, files):
    given = {"overlap_comm": "auto", "compute_grad_norm": "auto", "reduce_bucket_size": "auto",
             "offload_optimizer": {"device": "cpu", "ratio": "auto"}}
    taken = DeepSpeedZeroConfig(stage=stage, **given)
    lines = run(*files(config(zero_optimization={"stage": stage, **given}), "2", "--json"))[2].splitlines()
    said = dict(line.rpartition(": ")[2].split(" = ") for line in lines)
    assert {path: json.loads(value) for path, value in said.items()} == {
        "zero_optimization.reduce_bucket_size": taken.reduce_bucket_size,
        "zero_optimization.overlap_comm": taken.overlap_comm,
        "zero_optimization.compute_grad_norm": taken.compute_grad_norm,
        "zero_optimization.offload_optimizer.ratio": taken.offload_optimizer.ratio}
    assert taken.overlap_comm is (stage == 3)


def test_other_autos_are_said_with_what_deepspeed_takes(files):
    given = config(zero_optimization={"stage": 1, "reduce_bucket_size": 2048, "overlap_comm": "auto"})
    assert run(*files(given, "2", "--json"))[2] == (
        'assumed for "auto", for which DeepSpeed uses its default: zero_optimization.overlap_comm = false\n')


@pytest.mark.parametrize("ranks, must", [
    *((ranks, f"a whole number from 1 on, got '{ranks.rpartition(',')[2]}'") for ranks in ("0", "8,", "8,x", "-1")),
    ("131073", "at most 131,072 each, got 131073"), ("8,99999999", "at most 131,072 each, got 99999999")])
def test_ranks_are_numbers(ranks, must, files, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main([*map(str, files(config())), "--ranks", ranks])
    assert f"argument --ranks: must be {must}\n" in capsys.readouterr().err


def test_nothing_that_deepspeed_says_of_a_config_is_in_the_json(files):
    """DeepSpeed logs on stdout that a vocabulary is not aligned, and that a scheduler has not started."""
    given = config(vocabulary_size=50257, scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 3e-4}})
    done = subprocess.run([sys.executable, "-m", "ds_layerwise.cli", *map(str, files(given, "2", "--json"))], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0 and json.loads(done.stdout)[0]["ranks"] == 2, done.stderr


@pytest.mark.parametrize("sizes, says", [
    ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}, "8 != 1 * 4 * 4"),
    ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": "auto"}, ""),
    ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 3}, ""),
    ({"train_batch_size": 8, "sequence_parallel_size": 2, "gradient_accumulation_steps": 2,
      "train_micro_batch_size_per_gpu": 2}, "")])
def test_batch_sizes_multiply_out_on_each_number_of_ranks(sizes, says, files):
    """Sizes that fit 2 ranks do not fit 4; what a Trainer fills in fits any, and ranks may share sequences."""
    if says:
        assert run(*files(config(**sizes), "2"))[0] == 0
        assert_refused(says, *files(config(**sizes), "2,4"))
    else:
        assert run(*files(config(**sizes), "4"))[::2] == (0, "")


def test_a_plan_takes_the_defaults_of_deepspeed():
    assert DeepSpeedZeroConfig().reduce_bucket_size == DEFAULT_BUCKET_NUMEL
    for said in ({}, {"reduce_bucket_size": "auto"}):
        assert RunConfig.from_ds_config(config(zero_optimization={"stage": 1, **said})
                                        ).bucket_numel == DEFAULT_BUCKET_NUMEL


@pytest.mark.parametrize("spelling", ["fp32", "float32", "torch.float32", "float", "fp16", "float16", "torch.float16",
                                      "half", "bf16", "bfloat16", "torch.bfloat16"])
def test_dtypes_are_spelled_as_in_deepspeed(spelling):
    parsed = RunConfig.from_ds_config(config(data_types={"grad_accum_dtype": spelling})).accumulation_dtype
    assert f"torch.{parsed}" == str(DtypeEnum(spelling).value)


@pytest.mark.parametrize("given, said", [
    (config(), "ok: muon and adamw at ZeRO stage 1, parameters in bfloat16"),
    (config(prescale_gradients=True), "without effect here: prescale_gradients"),
    (config(train_micro_batch_per_gpu=2), "a run needs train_batch_size or train_micro_batch_size_per_gpu"),
    (config(train_batch_size=64, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=2), "ok: "),
    (config(train_batch_size=32, sequence_parallel_size=4), "ok: "),
    (config(zero_optimization={"stage": 3, "reduce_bucket_size": "auto"}), "reduce_bucket_size = 500000000"),
    (config(scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.5}},
            optimizer={"type": "LayerWise", "params": {"matrix_optimizer": "adamw", "lr": 1e-3}}), "ok: adamw"),
    # A Trainer fills in the rate that goes with the peak; which recipes are left, a model says.
    (config(scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.5}},
            optimizer={"type": "LayerWiseMuon", "params": {"lr": "auto", "muon_lr": 0.02}}), "ok: muon and adamw"),
    (config(scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.5}},
            layerwise={"overrides": [{"name": "*", "optimizer": "scalar"}]}), "ok: "),
    (config(optimizer={"type": "LayerWise", "params": {"scalar_optimizer": "lion", "eps": 1e-8}},
            layerwise={"overrides": [{"name": "*", "optimizer": "adamw"}]}), "ok: muon and lion")])
def test_a_config_is_checked_without_a_model(given, said, files):
    code, out, err = run("check", files(given)[4])
    assert (code, err) == (0, "") and said in out and out.splitlines()[-1].startswith("ok: ")


@pytest.mark.parametrize("given, message", [
    (config(optimizer={"type": "LayerWise", "params": {"ns_coefficients": "simpel"}}), "did you mean 'simple'"),
    (config(zero_optimization={"stage": 4}), "zero_optimization.stage must be 1 or 2 or 3 with this optimizer, got 4"),
    (config(train_batch_size=65, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=2), "train_batch_size"),
    (config(layerwise={"table": "long"}), "layerwise.table must be one of 'full', 'short', got 'long'"),
    (config(scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.5}}), "warmup_max_lr is 0.5, and optimizer.p"),
    (config(scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": "3e-4"}}), "params.warmup_max_lr must be a"),
    (config(scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}), "(the default of WarmupDecayLR)"),
    (config(optimizer={"type": "LayerWise", "params": {"scalar_optimizer": "lion", "eps": 1e-8}}),
     "no optimizer of this run (lion, muon) uses optimizer.params.eps; remove it"),
    ("{", "config.json is no JSON")])
def test_a_check_refuses_what_a_run_refuses(given, message, files):
    assert_refused(message, "check", files(given)[4])
