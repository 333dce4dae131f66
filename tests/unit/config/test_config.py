"""The two sections: defaults of stock Muon, bounds, suggestions, and keys elsewhere that cannot be honoured."""

from collections import UserList

import numpy as np
import pytest
from pydantic import BaseModel

from ds_layerwise.config.ds_config import refuse_unsupported, without_effect
from ds_layerwise.config.run_config import RunConfig
from ds_layerwise.config.sections import LayerWiseConfig, OptimizerConfig, Override, is_ours
from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers.rules.muon_family import Muon
from tests.support.rooms import rooms

pytestmark = rooms("sections", "run_config", "ds_config")


def optimizer(params=None, kind="LayerWiseMuon"):
    return OptimizerConfig.from_section({"type": kind, "params": params or {}})


def test_defaults_are_those_of_stock_muon():
    c = optimizer()
    assert (c.momentum, c.weight_decay, c.betas, c.eps) == (0.95, 0.0, (0.9, 0.95), 1e-10)
    assert c.matrix == Muon(ns_method="gram", ns_steps=5, ns_coefficients="simple", scale_mode="original",
                            nesterov=True)
    assert (c.muon_lr, c.adam_lr) == (0.02, 3e-4)


@pytest.mark.parametrize("params, muon_lr, adam_lr", [
    ({}, 0.02, 3e-4),
    ({"lr": 0.1, "scale_mode": "match_rms_adamw"}, 0.1, 0.1),
    ({"lr": 0.1, "muon_lr": 0.5, "scale_mode": "match_rms_adamw"}, 0.5, 0.1),
    ({"scale_mode": "match_rms_adamw"}, 3e-4, 3e-4),
    ({"adam_lr": 0.01, "scale_mode": "match_rms_adamw"}, 0.01, 0.01),
    ({"lr": 0.1, "muon_lr": 0.5}, 0.5, 0.1),
    ({"lr": 0.1, "adam_lr": 0.01, "muon_lr": 0.2}, 0.2, 0.01),
    ({"muon_lr": 0.5}, 0.5, 3e-4),
    ({"adam_lr": 0.01}, 0.02, 0.01),
    ({"muon_lr": 0.5, "adam_lr": 0.0}, 0.5, 0.0),
])
def test_both_learning_rates_are_ratios_to_lr(params, muon_lr, adam_lr):
    c = optimizer(params)
    assert (c.muon_lr, c.adam_lr) == (muon_lr, adam_lr)
    assert c.lr * c.matrix_lr_ratio == pytest.approx(muon_lr)
    assert c.lr * c.scalar_lr_ratio == pytest.approx(adam_lr)


@pytest.mark.parametrize("params", [{"lr": 3e-4}, {"lr": 3e-4, "adam_lr": 1e-3}, {"lr": 3e-4, "scale_mode": "original"},
                                    {"lr": 3e-4, "scale_mode": "spectral"}])
def test_a_rate_that_nobody_chose_for_muon_is_refused_with_both_ways_out(params):
    with pytest.raises(ConfigError, match="optimizer.params.lr is 0.0003 without muon_lr.* give muon_lr, such as 0.02, "
                       "or set scale_mode to 'match_rms_adamw'"):
        optimizer(params)


def test_stock_switches_of_the_auxiliary_adam():
    assert optimizer({"torch_adam": True}).scalar.rule == "adamw"
    assert optimizer({"adam_w_mode": False}).scalar.rule == "adam"
    with pytest.raises(ConfigError, match="torch_adam must be true"):
        optimizer({"torch_adam": False})
    with pytest.raises(ConfigError, match="adam_w_mode is false.*'lion'"):
        optimizer({"adam_w_mode": False, "scalar_optimizer": "lion"})


@pytest.mark.parametrize("params, message", [
    ({"flux": 1}, "optimizer.params.flux is not an option; known: .*ns_method"),
    ({"adam_eps": 1e-8}, "optimizer.params.adam_eps is not an option; did you mean 'eps'"),
    ({"muon_num_ns_steps": 5}, "optimizer.params.muon_num_ns_steps is not an option; did you mean 'ns_steps'"),
    ({"adjust_lr_fn": "original"}, "optimizer.params.adjust_lr_fn is not an option; did you mean 'scale_mode'"),
    ({"muon_split_qkv": True}, "optimizer.params.muon_split_qkv is not an option; did you mean layerwise.auto_split"),
    ({"clip_grad": 1.0}, r"optimizer.params.clip_grad is not an option; did you mean gradient_clipping\?"),
    ({"matrix_optimizer": "muon"}, "matrix_optimizer needs optimizer.type 'LayerWise'"),
    ({"precondition_frequency": 10}, "precondition_frequency belongs to soap or kl_soap or shampoo, and this run has"),
    ({"ns_steps": "auto"}, "ns_steps is 'auto', which only Hugging Face"),
])
def test_a_bad_optimizer_section_names_the_key_and_the_bound(params, message):
    with pytest.raises(ConfigError, match=message):
        optimizer(params)


def test_the_general_type_names_its_matrix_optimizer():
    assert optimizer({"matrix_optimizer": "muon", "scalar_optimizer": "sgd"}, "LayerWise").scalar.rule == "sgd"
    with pytest.raises(ConfigError, match="one of 'muon', .* or the path of a class, .*, got 'moun'"):
        optimizer({"matrix_optimizer": "moun"}, "LayerWise")


def test_only_our_types_are_ours():
    assert is_ours("LayerWiseMuon") and is_ours("layerwise")
    assert not is_ours("Muon") and not is_ours(None)


def test_layerwise_section():
    c = LayerWiseConfig.from_section({"layout": "lpt", "overrides": [{"name": "*.bias", "weight_decay": 0.0}]})
    assert c.layout == "lpt" and c.overrides == (Override(name="*.bias", weight_decay=0.0), )


@pytest.mark.parametrize("key", sorted(LayerWiseConfig.keys()))
def test_defaults_may_be_written_out(key):
    default = getattr(LayerWiseConfig(), key)
    said = default.model_dump() if isinstance(default, BaseModel) else default
    assert LayerWiseConfig.from_section({key: said}) == LayerWiseConfig()


@pytest.mark.parametrize("section, message", [
    ({"store_param_remainders": True}, "store_param_remainders is not an option; did you mean 'master_dtype'"),
    ({"max_skipped_steps": 0}, "layerwise.max_skipped_steps must be a whole number of at least 1"),
    ({"max_waiting_buckets": 0}, "layerwise.max_waiting_buckets must be a whole number of at least 1"),
    ({"overlap_param_gather": "yes"}, "overlap_param_gather must be true or false"),
    ({"overrides": [{"name": "*", "optional": True}]}, r"overrides\[0\] \('\*'\) overrides nothing"),
    ({"overrides": [{"name": "*", "optional": 1, "lr_scale": 2}]}, r"overrides\[0\].optional must be true or false"),
    ({"overrides": [{"name": "*", "wieght_decay": 0.0}]}, "did you mean 'weight_decay'"),
    ({"save_universal": 1}, "layerwise.save_universal must be true or false, got 1"),
    ({"on_missing_state": "zero"}, "layerwise.on_missing_state must be one of 'fresh', 'error', got 'zero'"),
    ({"on_optimizer_change": True}, "on_optimizer_change must be one of 'error', 'reset', 'keep_shared', got True"),
    ({"grad_norm_skip_threshold": 0}, r"layerwise.grad_norm_skip_threshold must be in \(0, inf\), got 0"),
    ({"monitor": True}, "layerwise.monitor must be an object like {\"update_rms\": true}, got True"),
    ({"monitor": {"evrey": 2}}, "layerwise.monitor.evrey is not an option; did you mean 'every'"),
    ({"monitor": {"every": 0}}, "layerwise.monitor.every must be a whole number of at least 1, got 0"),
    ({"norm_groups": ["mtp.*"]}, "layerwise.norm_groups must be an object of names of groups to conditions like"),
    ({"norm_groups": {"a b": {"name": "a"}}}, "layerwise.norm_groups names a group 'a b'; give it a name of letters"),
    ({"norm_groups": {"a": "mtp.*"}}, "layerwise.norm_groups.a must be an object like {\"name\": \"mtp.*\"}, got 'mtp"),
    ({"norm_groups": {"a": {"optional": True}}}, "layerwise.norm_groups.a has no condition; give it one of name, "),
    ({"norm_groups": {"a": {"nmae": "x"}}}, "layerwise.norm_groups.a.nmae is not an option; did you mean 'name'"),
    ({"norm_groups": {"a": {"name": "x", "gradient_clipping": -1}}},
     r"layerwise.norm_groups.a.gradient_clipping must be in \[0, inf\), got -1"),
    ({"norm_groups": {"a": {"regex": "("}}}, r"layerwise.norm_groups.a.regex must be a regular expression, got '\('"),
    ({"rename": {"a": 1}}, "layerwise.rename must be .* to names in the model, got 'a': 1; a name is a text"),
    ({"rename": {"a": "b", "c": ""}}, "layerwise.rename must be .*, got 'c': ''; a name is a text that is not empty"),
    ({"rename": {"a": "b", "": "c"}}, "layerwise.rename must be .*, got '': 'c'; a name is a text that is not empty"),
    ({"rename": {"h.*.*": "layers.*"}}, r"layerwise.rename\['h.\*.\*'\] has 2 times '\*', its new name 'layers.\*' 1"),
])
def test_a_bad_layerwise_section_names_the_key(section, message):
    with pytest.raises(ConfigError, match=message):
        LayerWiseConfig.from_section(section)


@pytest.mark.parametrize("change, message", [
    ({"zero_optimization": {}}, "stage must be 1 .* not set"),
    ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}},
     "offload_optimizer.device must be 'none' or 'cpu' .* got 'nvme': nothing goes to NVMe; set it to 'cpu'"),
    ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "auto"}}}, "offload_optimizer.device must be"),
    ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "super_offload": True}}},
     "offload_optimizer.super_offload must be False"),
    ({"gradient_predivide_factor": 0.0}, r"gradient_predivide_factor must be in \(0, inf\), got 0.0"),
    ({"zero_optimization": {"stage": 1, "compute_grad_norm": False}}, "gradient_clipping needs the norm"),
    ({"zero_optimization": {"stage": 2}, "data_types": {"grad_accum_dtype": "bf16"}},
     "data_types.grad_accum_dtype must be 'fp32' at ZeRO stage 2, got 'bf16'"),
    ({"zero_optimization": {"stage": 2}, "layerwise": {"max_waiting_buckets": 2}},
     "at ZeRO stage 2 or 3 with overlap_comm"),
    ({"zero_optimization": {"stage": 1, "overlap_comm": True}, "layerwise": {"max_waiting_buckets": 2}},
     "layerwise.max_waiting_buckets bounds gradients that wait at ZeRO stage 2"),
    ({"checkpoint": {"use_node_local_storage": True}, "layerwise": {"save_universal": True}}, "needs a disk that all"),
])
def test_a_key_that_cannot_be_honoured_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        refuse_unsupported({"zero_optimization": {"stage": 1}, **change})


@pytest.mark.parametrize("slip", ["gradient_cliping", "gradient_clippping", "gradient_clipqing", "gradient_clippign",
                                  "rgadient_clipping", "gradient_clippin", "Gradient-Clippings"])
def test_a_name_that_is_one_slip_away_is_refused(slip):
    with pytest.raises(ConfigError, match=f"^{slip} is not read; did you mean 'gradient_clipping'"):
        refuse_unsupported({"zero_optimization": {"stage": 1}, slip: 1.0})


@pytest.mark.parametrize("other", ["gradient_flapping", "gradient_clip", "gradient_cilppnig", "my_gradient_clipping"])
def test_another_name_is_somebody_elses(other):
    refuse_unsupported({"zero_optimization": {"stage": 1}, other: 1.0})


@pytest.mark.parametrize("path, value", [
    ("layerwise.overlap_param_gather", True), ("tensor_parallel.autotp_size", 2)])
def test_keys_that_stage_3_lacks_are_refused_there_alone(path, value):
    for stage in (2, 3):
        given = {"zero_optimization": {"stage": stage}}
        *sections, key = path.split(".")
        place = given
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
        if stage == 2:
            refuse_unsupported(given)
            continue
        with pytest.raises(ConfigError, match=f"^{path} is .*not supported at ZeRO stage 3 yet"):
            refuse_unsupported(given)


def test_keys_of_stage_3_have_an_effect_there():
    keys = {"stage3_max_live_parameters": 5, "stage3_prefetch_bucket_size": 7, "sub_group_size": 9}
    for stage, idle in ((2, {*keys}), (3, {"sub_group_size"})):
        assert {*without_effect({"zero_optimization": {"stage": stage, **keys}})} == idle
    pinned = {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True, "buffer_count": 3}}
    assert not [key for key in without_effect({"zero_optimization": pinned}) if "pin_memory" in key]
    refuse_unsupported({"zero_optimization": pinned})


def test_neutral_values_are_accepted():
    refuse_unsupported({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none"},
                                              "reduce_scatter": True, "compute_grad_norm": False},
                        "gradient_clipping": 0.0, "prescale_gradients": False})


def run_config(params=None, layerwise=None, zero=None, **sections):
    return RunConfig.from_ds_config({
        "optimizer": {"type": "LayerWiseMuon", "params": params or {}}, "layerwise": layerwise or {},
        "zero_optimization": {"stage": 1, **(zero or {})}, **sections})


@pytest.mark.parametrize("key", [1, None, ("a", "b"), 0.5])
def test_a_key_that_is_no_text_is_told_like_any_other(key):
    for given, where in (({"params": {key: 1}}, "optimizer.params"), ({"layerwise": {key: 1}}, "layerwise"),
                         ({"layerwise": {"overrides": [{"name": "*", key: 1}]}}, "layerwise.overrides[0]")):
        with pytest.raises(ConfigError) as error:
            run_config(**given)
        assert str(error.value).startswith(f"{where}.{key} is not an option; known: ")


def test_lists_of_other_packages_are_lists():
    """OmegaConf's are sequences, and no lists."""
    run = run_config({"betas": UserList([0.5, 0.75]), "ns_coefficients": UserList([UserList([1, 2, 3])])})
    assert run.optimizer.betas == (0.5, 0.75) and run.optimizer.matrix.ns_coefficients == ((1.0, 2.0, 3.0), )
    with pytest.raises(ConfigError, match="optimizer.params.betas must be two numbers"):
        run_config({"betas": b"ab"})


@pytest.mark.parametrize("yes", [True, np.bool_(True), np.array(True)])
def test_switches_of_numpy_are_switches(yes):
    assert run_config(bf16={"enabled": yes}).param_dtype == "bfloat16"
    assert run_config(zero={"cpu_offload": yes}).host_ratio == 1.0
    assert run_config(torch_autocast={"enabled": yes, "dtype": "bfloat16"}).autocast is True


@pytest.mark.parametrize("batch, number", [
    ({}, 1), ({"train_micro_batch_size_per_gpu": 4}, 1), ({"gradient_accumulation_steps": 1}, 1),
    ({"gradient_accumulation_steps": 1, "train_batch_size": 8}, 1), ({"gradient_accumulation_steps": 2}, 2),
    # DeepSpeed or a Trainer may find any number.
    ({"train_batch_size": 8}, None), ({"gradient_accumulation_steps": None}, None),
    ({"gradient_accumulation_steps": "auto"}, None)])
def test_the_micro_batches_of_a_step_are_those_of_the_config(batch, number):
    assert run_config(**batch).micro_batches == number


@pytest.mark.parametrize("ratio, host_ratio", [({}, 1.0), ({"ratio": "auto"}, 1.0), ({"ratio": 0.25}, 0.25)])
def test_the_offloaded_share_is_the_ratio(ratio, host_ratio):
    assert run_config(zero={"offload_optimizer": {"device": "cpu", **ratio}}).host_ratio == host_ratio
