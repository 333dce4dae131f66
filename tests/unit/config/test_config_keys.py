"""docs/config_keys.md against DeepSpeed's own list of keys, and against what the package does with each."""

import ast
import re
from contextlib import nullcontext
from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed.runtime import config as config_module
from deepspeed.runtime import constants
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig

from ds_layerwise.config.ds_config import (
    check_autocast,
    config_of,
    refuse_unsupported,
    type_meant,
    what_ranks_share,
    without_effect,
)
from ds_layerwise.config.run_config import RunConfig
from ds_layerwise.config.sections import OptimizerConfig, params_model
from ds_layerwise.engine.register import register, unregister
from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers.rules.elementwise import AdamW
from ds_layerwise.optimizers.rules.muon_family import Muon
from ds_layerwise.zero.setup.param_groups import LayerWiseOptimizer
from tests.support.config_table import DOCUMENT, config_with, read_table
from tests.support.rooms import rooms

pytestmark = rooms("ds_config", "run_config", "register")

TESTS = Path(__file__).parents[2]
ROWS = read_table(DOCUMENT.read_text())
BASE = {"zero_optimization": {"stage": 1}, "optimizer": {"type": "LayerWise", "params": {"muon_lr": 0.02}},
        "gradient_clipping": 0.0}
NEWEST, OLDEST = "0.19.8", "0.19.4"

MODELS = {
    "zero_optimization": DeepSpeedZeroConfig,
    "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
    "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
    "zero_optimization.leaf_module": DeepSpeedZeroLeafModuleConfig,
    "bf16": DeepSpeedBF16Config,
    "fp16": DeepSpeedFP16Config,
}


def keys_of(model):
    return set(model.model_fields) | {field.alias for field in model.model_fields.values() if field.alias}


def in_table(section, *releases):
    return {row.key for row in ROWS if row.section == section and (not releases or row.releases in releases)}


def parse(row, **changes):
    """Parse a config that has the row's value as the engine's first check does."""
    config = {**config_with(row.path, changes.pop("value", row.value), BASE), **changes}
    OptimizerConfig.from_section(config["optimizer"])
    refuse_unsupported(config)
    check_autocast(config)


def rows(*verdicts):
    chosen = [row for row in ROWS if row.verdict in verdicts]
    return pytest.mark.parametrize("row", chosen, ids=[row.path for row in chosen])


def test_the_table_is_read():
    assert {row.verdict for row in ROWS} == {"honoured", "refused", "same", "not ours"}
    assert {row.releases for row in ROWS} == {"both", "newest only", "oldest only", "ours"}
    assert len({row.path for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("releases", ["newest only", "oldest only"])
def test_the_document_says_which_release_has_a_key(releases):
    assert {row.path for row in ROWS if releases in row.says} == {row.path for row in ROWS if row.releases == releases}


def test_the_document_says_which_keys_are_ours():
    rows = [row for row in ROWS if row.section == "optimizer.params"]
    assert {row.path for row in rows if row.says.startswith("ours")} == {
        row.path for row in rows if row.releases == "ours"}


@pytest.mark.parametrize("section", MODELS)
def test_every_key_is_in_the_table_and_no_other(section):
    installed = keys_of(MODELS[section])
    assert installed <= in_table(section)
    if deepspeed.__version__.startswith(NEWEST):
        assert in_table(section, "both", "newest only") == installed
    if deepspeed.__version__.startswith(OLDEST):
        assert in_table(section, "both", "oldest only") == installed


def test_every_key_that_has_no_model_is_in_the_table():
    names = {value for name, value in vars(constants).items() if name.isupper() and isinstance(value, str)}
    ours = re.compile(r"((gradient|communication)_\w+|\w+_gradients|\w+_communication_\w+|\w+_gradient_\w+)")
    assert {name for name in names if ours.fullmatch(name)} - {constants.GRADIENT_CLIPPING} <= in_table("")
    assert constants.GRADIENT_CLIPPING in in_table("")
    types = {getattr(constants, name) for name in ("GRAD_ACCUM_DTYPE", "PARAM_DTYPE", "BUFFER_DTYPE",
                                                   "KEEP_IN_FP32_MODULES") if hasattr(constants, name)}
    assert types <= in_table("data_types")
    assert {constants.TORCH_AUTOCAST_ENABLED, constants.TORCH_AUTOCAST_DTYPE,
            constants.TORCH_AUTOCAST_LOWER_PRECISION_SAFE_MODULES} == in_table("torch_autocast")
    assert {constants.TYPE, constants.OPTIMIZER_PARAMS, constants.LEGACY_FUSION} == in_table("optimizer")


def test_every_parameter_of_stock_muon_is_in_the_table():
    stock = {*getattr(DeepSpeedEngine, "_MUON_HALF_KEYS", ()), *getattr(DeepSpeedEngine, "_ADAM_HALF_KEYS", ())}
    assert stock <= in_table("optimizer.params", "both")
    assert set(params_model(Muon, AdamW, True).keys()) <= in_table("optimizer.params")


@rows("refused")
def test_refused_means_refused(row):
    with pytest.raises(ConfigError, match=re.escape(row.key)):
        parse(row)
    if row.section != "optimizer.params" and row.section != "optimizer" and not isinstance(row.value, dict):
        with pytest.raises(ConfigError, match=re.escape(row.key)):
            parse(row, value="auto")


@rows("honoured", "same", "not ours")
def test_accepted_means_accepted(row):
    parse(row)


@rows("same", "not ours")
def test_keys_without_effect_are_in_the_start_up_table(row):
    named = row.path.removeprefix("zero_optimization.") + (".names" if row.key == "leaf_module" else "")
    assert without_effect(config_with(row.path, row.value, BASE)) == (named, )
    assert without_effect(config_with(row.path, None, BASE)) == without_effect(BASE) == ()


def test_keys_that_ask_for_what_happens_anyway_are_not_in_it():
    zero = {"stage": 2, "contiguous_gradients": True, "reduce_scatter": True, "allgather_partitions": True,
            "overlap_comm": True, "reduce_bucket_size": 5e8, "round_robin_gradients": False, "cpu_offload": False,
            "offload_optimizer": {"device": "none"}, "offload_param": {"device": "none"}}
    config = {**BASE, "zero_optimization": zero, "prescale_gradients": False, "gradient_predivide_factor": 1.0}
    refuse_unsupported(config)
    assert without_effect(config) == ()


@pytest.mark.parametrize("path, message", [
    ("layer_wise", "layer_wise is not a section of the config; did you mean 'layerwise' at the top level"),
    ("Layerwise", "Layerwise is not a section .*did you mean 'layerwise'"),
    ("layerWise", "did you mean 'layerwise'"),
    ("layer-wise", "did you mean 'layerwise'"),
    ("layerwize", "did you mean 'layerwise'"),
    ("zero_optimization.layerwise", "zero_optimization.layerwise is not a section .*'layerwise' at the top level"),
    ("overrides", "overrides is not read; did you mean layerwise.overrides"),
    ("override", "override is not read; did you mean layerwise.overrides"),
    ("zero_optimization.overlap_param_gather", "did you mean layerwise.overlap_param_gather"),
    ("muon_lr", "muon_lr is not read; did you mean optimizer.params.muon_lr"),
    ("optimizer.layerwise", "optimizer.layerwise is not an option; did you mean layerwise at the top level"),
    ("optimizer.lr", "optimizer.lr is not an option; did you mean optimizer.params.lr"),
    ("optimizer.params.overrides", "optimizer.params.overrides is not an option; did you mean layerwise.overrides"),
    ("optimizer.params.layer_wise", "is not an option; did you mean layerwise at the top level"),
    ("layerwise.muon_lr", "layerwise.muon_lr is not an option; did you mean optimizer.params.muon_lr"),
    ("layerwise.weight_decay", "did you mean optimizer.params.weight_decay"),
    ("layerwise.overide", "layerwise.overide is not an option; did you mean 'overrides'"),
])
def test_a_section_or_a_key_that_stands_elsewhere_is_not_ignored(path, message):
    config = config_with(path, [], BASE)
    with pytest.raises(ConfigError, match=message):
        RunConfig.from_ds_config(config)


@pytest.mark.parametrize("written, meant", [
    ("LayerWise_Muon", "LayerWiseMuon"), ("layer_wise_muon", "LayerWiseMuon"), ("LayerWise-Muon", "LayerWiseMuon"),
    ("LayerwizeMuon", "LayerWiseMuon"), ("layer_wise", "LayerWise"), ("Layerwis", "LayerWise"), ("Muon", None),
    ("AdamW", None), ("OneBitAdam", None), ("Lamb", None)])
def test_the_error_suggests_the_optimizer_type(written, meant):
    assert type_meant(written) == meant


@pytest.mark.parametrize("path", sorted({row.test for row in ROWS}))
def test_the_test_is_there(path):
    file, *names = path.split("::")
    body = ast.parse((TESTS / file).read_text()).body
    for name in names:
        found = [node for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name]
        assert found, f"{file} has no {name}"
        body = found[0].body


@pytest.mark.parametrize("path", [
    "gradient_clipping", "managed_gradient_accumulation", "bf16.enabled", "bfloat16.enabled", "fp16.enabled",
    "data_types.grad_accum_dtype", "data_types.param_dtype", "data_types.buffer_dtype", "gradient_predivide_factor"])
def test_a_value_that_nobody_filled_in_is_named(path):
    with pytest.raises(ConfigError, match=f"{re.escape(path)} .*'auto'"):
        refuse_unsupported(config_with(path, "auto", BASE))


@pytest.mark.parametrize("value", [-1.0, None, "1.0", True, float("nan")])
def test_a_bound_of_the_norm_is_a_number(value):
    with pytest.raises(ConfigError, match="gradient_clipping must be"):
        refuse_unsupported({**BASE, "gradient_clipping": value})


@pytest.mark.parametrize("path, message", [
    ("data_types.grad_acum_dtype", "data_types.grad_acum_dtype is not an option; did you mean 'grad_accum_dtype'"),
    ("optimizer.parms", "optimizer.parms is not an option; did you mean 'params'"),
])
def test_a_misspelled_key_is_not_ignored(path, message):
    config = config_with(path, "bf16", BASE)
    with pytest.raises(ConfigError, match=message):
        OptimizerConfig.from_section(config["optimizer"])
        refuse_unsupported(config)


@pytest.mark.parametrize("key", ["bf16_master_weights_and_grads", "bf16_optimizer_states"])
def test_the_old_name_of_bf16_is_no_way_around(key):
    with pytest.raises(ConfigError, match=f"bfloat16.{key} must be False"):
        refuse_unsupported({**BASE, "bfloat16": {"enabled": True, key: True}})


@pytest.fixture
def registered():
    register()
    yield
    unregister()


def zero_config(ratio, optimizer="LayerWiseMuon"):
    return config_module.get_zero_config({"optimizer": {"type": optimizer}, "zero_optimization": {
        "stage": 2, "reduce_bucket_size": 600, "offload_optimizer": {"device": "cpu", "ratio": ratio}}})


def test_a_ratio_of_offload_below_1_is_for_this_backend_alone(registered):
    read = zero_config(0.4)
    assert (read.offload_optimizer.device, read.offload_optimizer.ratio, read.reduce_bucket_size) == ("cpu", 0.4, 600)
    assert zero_config("auto").offload_optimizer.ratio == 1
    with pytest.raises(ValueError, match="Partial offloading only supported for ZeRO Stage 3"):
        zero_config(0.4, "AdamW")
    unregister()
    with pytest.raises(ValueError, match="Partial offloading only supported for ZeRO Stage 3"):
        zero_config(0.4)


@pytest.mark.parametrize("ratio", [-0.1, 1.01, True, "0.5", None, float("nan")])
def test_a_ratio_is_a_number_from_0_to_1(registered, ratio):
    with pytest.raises(ConfigError, match=r"offload_optimizer.ratio must be a number in \[0, 1\], got"):
        zero_config(ratio)


def test_a_replaced_reading_of_the_config_must_be_undone_first(registered, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(config_module, "get_zero_config", lambda given: None)
        with pytest.raises(ConfigError, match="get_zero_config was replaced after ds_layerwise.register"):
            unregister()


@pytest.mark.parametrize("changes, message", [
    ({"torch_autocast": {"enabled": "auto"}}, "torch_autocast.enabled must be true or false, got 'auto'"),
    ({"torch_autocast": {"enabled": True}}, "torch_autocast.dtype must be 'bfloat16' or 'float16', got None"),
    ({"torch_autocast": {"enabled": True, "dtype": "fp32"}}, "torch_autocast.dtype must be .* got 'fp32'"),
    ({"torch_autocast": {"enabled": True, "dtyp": "bf16"}}, "torch_autocast.dtyp is not .* did you mean 'dtype'"),
    ({"lower_precision_safe_modules": "torch.nn.Linear"}, "modules must be a list of names .* got 'torch.nn.Linear'"),
    ({"bf16": {"enabled": True}}, "torch_autocast.enabled and bf16.enabled are both true"),
    ({"bfloat16": {"enabled": True}}, "torch_autocast.enabled and bfloat16.enabled are both true"),
    ({"fp16": {"enabled": True}}, "torch_autocast.enabled and fp16.enabled are both true"),
    ({"communication_data_type": "bf16"}, "communication_data_type is 'bf16', but torch_autocast decides"),
])
def test_settings_that_do_not_go_with_autocast_are_refused(changes, message):
    section = {"enabled": True, "dtype": "bfloat16"}
    section.update({key: changes.pop(key) for key in list(changes) if key == "lower_precision_safe_modules"})
    with pytest.raises(ConfigError, match=message):
        check_autocast({"torch_autocast": section, **changes})


@pytest.mark.parametrize("value, is_one", [(True, True), (0, True), (1, True), (2, False), ("yes", False)])
def test_a_switch_of_deepspeed_may_be_a_number(value, is_one):
    given = {"optimizer": {"type": "LayerWiseMuon"}, "wall_clock_breakdown": value}
    with nullcontext() if is_one else pytest.raises(ConfigError, match="breakdown must be true or false, got"):
        assert config_of(given) is given


def test_objects_in_a_config_differ_between_ranks_in_nothing_that_counts():
    given = [{"tensor_parallel": {"autotp_size": 2, "tp": {"tp_group": object()}}} for _ in range(2)]
    assert what_ranks_share(given[0]) == what_ranks_share(given[1]) == [
        "tensor_parallel.autotp_size = 2", "tensor_parallel.tp.tp_group = <object object>"]


def test_hyper_parameters_reach_the_groups():
    given = {"lr": 0.5, "muon_lr": 0.5, "momentum": 0.9, "weight_decay": 0.1, "betas": [0.8, 0.99], "eps": 1e-6}
    optimizer = LayerWiseOptimizer([torch.nn.Parameter(torch.zeros(2, 2))], OptimizerConfig.from_section(
        {"type": "LayerWise", "params": given}))
    group = optimizer.param_groups[0]
    assert group["lr"] * group["matrix_lr_ratio"] == given.pop("muon_lr")
    assert {key: group[key] for key in given} == {**given, "betas": (0.8, 0.99)}
