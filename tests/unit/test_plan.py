"""``ds-layerwise plan``: its refusals, its two forms, and that its parsing is DeepSpeed's. An engine's own numbers are
in tests/distributed/test_plan.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from deepspeed.runtime.config import DtypeEnum
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from ds_layerwise.config import OptimizerConfig, ScalarOptimizer
from ds_layerwise.cost import RankTraffic, traffic_bytes
from ds_layerwise.forecast import DEFAULT_BUCKET_NUMEL, STATES_OF, RunConfig
from ds_layerwise.layout import Bucket, Layout, Slot
from ds_layerwise.optimizers.registry import matrix_rule, scalar_rule
from tests.cli import assert_refused, run

ROOT = Path(__file__).parents[2]

MODEL = """
model: small
numel: 5120
params:
  - {name: embed, shape: [16, 64], optimizer: scalar}
  - block: {layer: [0, 2]}
    params:
      - {name: "up.{layer}", shape: [16, 64], optimizer: matrix}
      - {name: "down.{layer}", shape: [64, 16], optimizer: matrix}
"""


def config(**changes):
    return {"zero_optimization": {"stage": 1, "reduce_bucket_size": 2048}, "bf16": {"enabled": True},
            "optimizer": {"type": "LayerWiseMuon", "params": {}}, **changes}


@pytest.fixture
def files(tmp_path):
    model = tmp_path / "small.yaml"
    model.write_text(MODEL)

    def arguments(given, ranks="2", *more):
        path = tmp_path / "config.json"
        path.write_text(given if isinstance(given, str) else json.dumps(given))
        return ["plan", "--model", model, "--config", path, "--ranks", ranks, *more]

    return arguments


def test_the_numbers_of_a_small_model_by_hand(files):
    code, out, err = run(*files(config(), "2", "--json"))
    assert (code, err) == (0, "")
    plan, = json.loads(out)
    # Two buckets of matrices, 2048 elements each, and the embedding of 1024; no padding. Each rank owns 2 matrices.
    assert (plan["ranks"], plan["buckets"], plan["elements"], plan["padding_elements"]) == (2, 3, 5120, 0)
    assert plan["owned_matrix_elements"] == [2048, 2048]
    # Gradients accumulate in bf16 beside float32 copies of the rank's shards; Muon keeps one state, Adam two.
    held = {"params": 2 * 5120, "grads": 2 * 5120 + 4 * 2560, "masters": 4 * 2560, "states": 4 * 2048 + 8 * 512}
    assert plan["memory_bytes"] == [{**held, "host": 0, "staging": 0, "total": sum(held.values())}] * 2
    # Two buckets of 2048 arrive from both ranks in bf16, for shards of 1024 each.
    assert plan["under_way_bytes"] == [{"sent": 0, "received": 2 * 2 * 1024 * 2, "total": 8192}] * 2
    assert plan["dtypes"]["bfloat16"] == {
        "gradients_accumulate_in": "bfloat16", "gradients_travel_in": "bfloat16",
        "sent_bytes": {"gradients": 2 * 5120 / 2, "parameters": 2 * 5120 / 2}}
    assert plan["gradients_sent_every"] == "step"


def test_several_numbers_of_ranks_are_rows_with_the_same_numbers(files):
    given = config(zero_optimization={"stage": 2, "reduce_bucket_size": 2048})
    code, out, _ = run(*files(given, "1,2,4"))
    plans = json.loads(run(*files(given, "1,2,4", "--json"))[1])
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if line.count("│") == 14]
    assert code == 0 and [row[0] for row in rows] == ["1", "2", "4"]
    for row, plan in zip(rows, plans, strict=True):
        assert row[1:4] == [plan["digest"], str(plan["buckets"]), f"{plan['newton_schulz_max_over_mean']:.3f}"]
        held = plan["memory_bytes"][plan["fullest_rank"]]
        sent = sum(plan["dtypes"]["bfloat16"]["sent_bytes"].values())
        assert row[4:] == [
            *(f"{held[key] / 2**20:.1f}" for key in ("total", "params", "grads", "masters", "states", "host")),
            f"{max(rank['total'] for rank in plan['under_way_bytes']) / 2**20:.1f}", "0.000 %", f"{sent / 2**20:.1f}"]
    assert "gradients in one backward pass and parameters in a step" in out


def test_overrides_move_parameters(files):
    overrides = [{"name": "up.*", "optimizer": "scalar"}, {"name": "embed", "optimizer": "matrix", "num_heads": 4},
                 {"name": "down.*", "weight_decay": 0.0}]
    plan, = json.loads(run(*files(config(layerwise={"overrides": overrides}), "1", "--json"))[1])
    assert plan["owned_matrix_elements"] == [3 * 1024]
    # Two of 16 x 64, and four of 4 x 64, five steps each: 2 Gram matrices and 14 small products, 4 rectangular ones.
    down, heads = (4 * 2 * 16 * 16 * 64 + 14 * 2 * 16**3), (4 * 2 * 4 * 4 * 64 + 14 * 2 * 4**3)
    assert plan["newton_schulz_flops"] == [2 * down + 4 * heads]
    out = run(*files(config(layerwise={"overrides": overrides})))[1]
    assert "layerwise.overrides, 4 heads" in out


def test_a_model_that_comes_with_the_package_goes_by_its_name(files):
    arguments = files(config())
    arguments[2] = "gpt2-124m"
    assert json.loads(run(*arguments, "--json")[1])[0]["elements"] == 124439808
    arguments[2] = "gpt2"
    assert_refused("gpt2 is no file, and no model of ds_configs/models (known: deepseek-v3, gpt2-124m", *arguments)


@pytest.mark.parametrize("given, message", [
    (config(optimizer={"type": "AdamW"}), "optimizer.type must be 'LayerWiseMuon' or 'LayerWise', got 'AdamW'"),
    ({}, "optimizer.type must be 'LayerWiseMuon' or 'LayerWise', got None"),
    ([1], "a DeepSpeed config must be an object, got [1]"),
    ("{", "config.json is no JSON: Expecting property name"),
    (config(optimizer={"type": "LayerWise", "params": {"momentun": 1}}), "did you mean 'momentum'"),
    (config(optimizer={"type": "LayerWise", "params": {"ns_coefficients": "simpel"}}), "did you mean 'simple'"),
    (config(optimizer={"type": "LayerWise", "params": {"ns_coefficients": "cans", "ns_dtype": "bf16"}}), "diverges"),
    (config(optimizer={"type": "LayerWise", "params": {"per_head_muon": True}}), "does not have the number of heads"),
    (config(layerwise={"layuot": "lpt"}), "did you mean 'layout'"),
    (config(layerwise={"overrides": [{"name": "x", "lr_scale": 2}]}), "matches no trainable parameter"),
    (config(layerwise={"overrides": [{"name": "*", "optimizer": "scalar"}]}), "no parameter goes to the matrix"),
    (config(zero_optimization={"stage": 3}), "zero_optimization.stage must be 1 or 2 with this optimizer, got 3"),
    (config(zero_optimization={"stage": 1, "reduce_bucket_size": 0}), "reduce_bucket_size must be a whole number of at "
     "least 1, got 0"),
    (config(fp16={"enabled": True}), "bf16.enabled and fp16.enabled are both true"),
    (config(communication_data_type="int8"), "communication_data_type must be fp32, bf16 or fp16 with this optimizer, "
     "got 'int8'"),
    (config(data_types={"grad_accum_dtype": 7}), "data_types.grad_accum_dtype must be fp32, bf16 or fp16"),
])
def test_what_training_refuses_is_refused(given, message, files):
    assert_refused(message, *files(given))


@pytest.mark.parametrize("content, message", [
    ("a: [", "small.yaml is no YAML"), ("model: m\nnumel: 1\nparams: [{name: w, shape: 1, optimizer: scalar}]",
                                        "shape must be a list of whole numbers of at least 1, got 1"),
    ("model: m\nnumel: 2\nparams: [{name: w, shape: [2], optimizer: scalar}]", "no parameter goes to the matrix "
     "optimizer, of 1 trainable ones: 1 x model file")])
def test_a_bad_model_file_is_refused(content, message, files):
    arguments = files(config())
    arguments[2].write_text(content)
    assert_refused(message, *arguments)


def test_a_config_that_is_not_there_is_refused(files, tmp_path):
    arguments = files(config())
    arguments[4] = tmp_path / "none.json"
    assert_refused("No such file or directory", *arguments)


@pytest.mark.parametrize("ranks", ["0", "8,", "8,x", "-1"])
def test_ranks_are_numbers(ranks, files, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(*files(config()), "--ranks", ranks)


def test_it_takes_no_torch(files):
    code = ("import sys; from ds_layerwise import cli; code = cli.main(sys.argv[1:]); "
            "print(code, sorted({'torch', 'deepspeed'} & {*sys.modules}))")
    done = subprocess.run([sys.executable, "-c", code, *map(str, files(config()))], cwd=ROOT, capture_output=True,
                          text=True)
    assert done.stdout.endswith("0 []\n"), done.stderr


def test_what_deepspeed_takes_where_the_config_says_nothing():
    assert DeepSpeedZeroConfig().reduce_bucket_size == DEFAULT_BUCKET_NUMEL
    for said in ({}, {"reduce_bucket_size": "auto"}):
        assert RunConfig.from_ds_config(config(zero_optimization={"stage": 1, **said})
                                        ).bucket_numel == DEFAULT_BUCKET_NUMEL


@pytest.mark.parametrize("spelling", ["fp32", "float32", "torch.float32", "float", "fp16", "float16", "torch.float16",
                                      "half", "bf16", "bfloat16", "torch.bfloat16"])
def test_dtypes_are_spelled_as_in_deepspeed(spelling):
    parsed = RunConfig.from_ds_config(config(data_types={"grad_accum_dtype": spelling})).accumulation_dtype
    assert f"torch.{parsed}" == str(DtypeEnum(spelling).value)


def test_the_number_of_states_is_that_of_the_rules():
    for scalar in ScalarOptimizer.__args__:
        chosen = OptimizerConfig(scalar_optimizer=scalar)
        assert STATES_OF[scalar] == len(scalar_rule(chosen).state_keys)
    assert STATES_OF["muon"] == len(matrix_rule(OptimizerConfig()).state_keys)


def test_what_is_under_way_is_the_worst_of_neighbouring_buckets():
    layout = Layout("balanced", 2, 1, (
        Bucket(0, "bfloat16", True, 0, (8, 2), (Slot("a", 0, 8), Slot("b", 8, 2))),
        Bucket(1, "bfloat16", True, 10, (0, 6), (Slot("c", 10, 6),)),
        Bucket(2, "float32", False, 0, (5, 5), (Slot("d", 0, 10),)),
    ))
    own = {"bfloat16": "bfloat16", "float32": "float32"}
    sent = [bucket.dtype for bucket in layout.buckets]
    # Two ranks send what a shard is made of: buckets 0 and 1, or 1 and 2.
    assert traffic_bytes(layout, stage=1, stored_as=own, wires=sent) == (
        RankTraffic(0, max(2 * 2 * 8, 2 * 4 * 5)), RankTraffic(0, max(2 * 2 * (2 + 6), 2 * 2 * 6 + 2 * 4 * 5)))
    # Other dtypes travel as copies.
    wires = ["float32"] * 3
    assert traffic_bytes(layout, stage=1, stored_as=own, wires=wires)[1] == RankTraffic(4 * 16, 2 * 4 * 8)
    # Stage 2 sends copies in any case, and adds up what a second micro-batch sends.
    assert traffic_bytes(layout, stage=2, stored_as=own, wires=sent)[0] == RankTraffic(2 * 6 + 4 * 10, 3 * 4 * 5)
    alone = Layout("balanced", 1, 1, (Bucket(0, "float32", False, 0, (10,), (Slot("d", 0, 10),)),))
    assert traffic_bytes(alone, stage=1, stored_as=own, wires=wires[:1]) == (RankTraffic(0, 0),)
    assert traffic_bytes(alone, stage=2, stored_as=own, wires=wires[:1]) == (RankTraffic(40, 40),)
