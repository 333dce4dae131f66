"""Names of Hugging Face's models for the weights of models that AutoEP changed."""

import json
from types import SimpleNamespace

import pytest
import torch
import transformers

from ds_layerwise.errors import LayerWiseError
from ds_layerwise.tools.hf_names import SHARED, NamedWeights
from tests.support.rooms import rooms
from tests.support.versions import needs

pytestmark = rooms("hf_names")

COMMON = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
          "num_attention_heads": 2, "num_key_value_heads": 2}
DEEPSEEK = {"moe_intermediate_size": 12, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
            "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8, "v_head_dim": 8}
MODELS = {"Qwen3Moe": {"moe_intermediate_size": 12, "num_experts": 4, "head_dim": 8},
          "Qwen2Moe": {"moe_intermediate_size": 12, "num_experts": 4, "shared_expert_intermediate_size": 12},
          "Mixtral": {"num_local_experts": 4}, "DeepseekV2": DEEPSEEK, "DeepseekV3": DEEPSEEK}


def model_of(kind):
    config = getattr(transformers, f"{kind}Config")(**COMMON, **MODELS[kind], num_experts_per_tok=2)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def by_auto_ep(weights):
    """The weights as AutoEP calls them, with the second name that it gives to a router."""
    changed = {}
    for name, value in weights.items():
        layer = name.partition(".mlp.")[0] + ".mlp"
        if name.endswith(".experts.gate_up_proj"):
            changed[f"{layer}.experts.w1"], changed[f"{layer}.experts.w3"] = value.chunk(2, dim=1)
        elif name.endswith(".experts.down_proj"):
            changed[f"{layer}.experts.w2"] = value
        elif name.endswith(".mlp.gate.weight"):
            changed[f"{layer}.gate.gate.weight"] = changed[f"{layer}.router.gate.weight"] = value
        elif name.endswith(".mlp.gate.e_score_correction_bias"):
            changed[f"{layer}.router.e_score_correction_bias"] = value
        else:
            name = name.replace(".shared_expert.", ".shared_experts.")
            changed[name.replace(".shared_expert_gate.", ".shared_experts_gate.")] = value
    return changed


def contents_of(weights):
    """A checkpoint of the weights, in which buffers and second names are not trained."""
    others = {name: value for name, value in weights.items() if "bias" in name or ".gate.gate." in name}
    trained = {name: tuple(value.shape) for name, value in weights.items() if name not in others}
    aliases = {"second": "model.norm.weight", "gone": next(name for name in weights if name.endswith(".w3"))}
    return SimpleNamespace(trained=trained, others=others, model=SimpleNamespace(module=weights), aliases=aliases,
                           weight=weights.__getitem__)


@pytest.mark.parametrize("kind", MODELS)
def test_names_and_values_are_those_of_the_model(kind, tmp_path):
    model = model_of(kind)
    model.config.save_pretrained(tmp_path)
    weights = model.state_dict()
    changed = by_auto_ep(weights)
    assert changed.keys() & weights.keys() != weights.keys()
    named = NamedWeights(contents_of(changed), tmp_path / "config.json")
    sizes = named.sizes(torch.bfloat16)
    assert sizes == {name: 2 * value.numel() for name, value in weights.items()}
    for name, value in weights.items():
        assert torch.equal(named.weight(name), value), name
    assert named.aliases == {"second": "model.norm.weight"}


@pytest.mark.parametrize("config", [None, {"model_type": "gpt_oss"}, {}])
def test_names_stay_for_other_models(config, tmp_path):
    changed = by_auto_ep(model_of("Qwen3Moe").state_dict())
    path = tmp_path / "config.json"
    if config is not None:
        path.write_text(json.dumps(config))
    named = NamedWeights(contents_of(changed), path)
    assert list(named.sizes(torch.float32)) == list(changed)
    assert all(torch.equal(named.weight(name), value) for name, value in changed.items())


def test_a_layer_of_experts_that_are_no_stacks_stays(tmp_path):
    weights = {f"layer.{name}.weight": torch.randn(2, 2) for name in ("router.gate", "gate", "experts.0.w1")}
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    named = NamedWeights(SimpleNamespace(trained={n: (2, 2) for n in weights}, others={}, model=None, aliases={},
                                         weight=weights.__getitem__), tmp_path / "config.json")
    assert list(named.sizes(torch.float32)) == list(weights) and not named.unknown


@pytest.mark.parametrize("text", ["[]", "null", '"x"', '{"model_type": ["a"]}'])
def test_odd_configs_name_no_model(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    named = NamedWeights(contents_of(by_auto_ep(model_of("Mixtral").state_dict())), tmp_path / "config.json")
    assert named.unknown == "model.layers.0.mlp"


def test_a_config_that_is_no_json_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(LayerWiseError, match="config.json is not JSON .*; name another with --config"):
        NamedWeights(contents_of(by_auto_ep(model_of("Mixtral").state_dict())), tmp_path / "config.json")


@needs("deepspeed>=0.19.6", "older ones have no presets")
def test_each_preset_of_deepspeed_has_these_names():
    from deepspeed.module_inject.auto_ep_presets.registry import PRESET_MODELS
    for preset in PRESET_MODELS.values():
        for kind in set(preset.hf_model_types) & SHARED.keys():
            assert (preset.expert_w1, preset.expert_w2, preset.expert_w3) == ("gate_up_proj", "down_proj", None)
            assert (preset.experts_pattern, preset.router_pattern) == ("experts", "gate")
            assert preset.shared_experts_pattern in ("", SHARED[kind])
