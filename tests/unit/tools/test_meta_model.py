"""``ds-layerwise plan --model``: a model from a config, by its name, or of a function, without memory."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
)
from transformers.integrations.deepspeed import HfDeepSpeedConfig, HfTrainerDeepSpeedConfig

from ds_layerwise.config.run_config import RunConfig
from ds_layerwise.plan.forecast.forecast import specs_of
from ds_layerwise.plan.forecast.report import as_json, plan_table
from ds_layerwise.tools import dry_run
from ds_layerwise.tools.dry_run import hidden_size_of
from tests.support.cli import assert_refused, run
from tests.support.model_specs import forecast, shipped
from tests.support.rooms import rooms
from tests.support.routing import route_parameters

pytestmark = rooms("dry_run", "fused_parts")

CONFIG = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 2048}, "bf16": {"enabled": True},
          "optimizer": {"type": "LayerWiseMuon", "params": {"lr": 3e-4, "muon_lr": 0.02}}}
MODELS = [
    (GPT2LMHeadModel, GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=40, n_positions=12), True),
    (LlamaForCausalLM, LlamaConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
                                   num_key_value_heads=2, vocab_size=40), False),
    (BertForSequenceClassification, BertConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                                               num_attention_heads=2, vocab_size=40), True),
]


@pytest.fixture
def arguments(tmp_path):
    def write(hf_config, ds_config=CONFIG, *more):
        hf_config.save_pretrained(tmp_path)
        (tmp_path / "ds.json").write_text(json.dumps(ds_config))
        return ["plan", "--model", tmp_path / "config.json", "--config", tmp_path / "ds.json", "--ranks", "2", *more]
    return write


@pytest.mark.parametrize("cls, hf_config, from_folder", MODELS, ids=[cls.__name__ for cls, _, _ in MODELS])
def test_it_is_the_plan_of_the_model_itself(cls, hf_config, from_folder, arguments):
    hf_config.architectures = [cls.__name__]
    command = arguments(hf_config)
    if from_folder:
        command[2] = command[2].parent
    model, parsed = cls(hf_config), RunConfig.from_ds_config(CONFIG)
    routes = route_parameters(model, [{"params": list(model.parameters())}])
    specs = specs_of(((name, tuple(p.shape), "bfloat16") for name, p in model.named_parameters()), routes)
    expected = forecast(specs, routes, parsed, 2, reduction="native")
    code, out, err = run(*command, "--json")
    assert (code, err) == (0, "") and json.loads(out) == [as_json(expected)]
    table = plan_table(routes, specs, [expected], parsed.optimizer, clip_grad=parsed.clip_grad)
    assert run(*command, "--verbose")[1] == table + "\n"


def test_a_trainers_buckets_are_of_the_square_of_the_hidden_size(arguments):
    auto = {**CONFIG, "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"}, "train_batch_size": "auto"}
    by_hand = {**CONFIG, "zero_optimization": {"stage": 1, "reduce_bucket_size": 256}}
    assert run(*arguments(MODELS[1][1], auto, "--json"))[1] == run(*arguments(MODELS[1][1], by_hand, "--json"))[1]


@pytest.mark.parametrize("sizes, expected", [
    ({"hidden_size": 16}, 16), ({"hidden_sizes": [8, 32, 16]}, 32), ({}, None),
    ({"text_config": {"hidden_size": 24}}, 24), ({"text_config": {"hidden_sizes": [8, 24]}}, 24),
    ({"hidden_size": 16, "text_config": {"hidden_size": 24}}, 16)])
def test_the_hidden_size_is_the_one_that_a_trainer_takes(sizes, expected, tmp_path):
    text = sizes.get("text_config")
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace(**{**sizes, **({"text_config": SimpleNamespace(**text)} if text else {})})
    assert hidden_size_of(model) == expected
    trainers = HfTrainerDeepSpeedConfig({"zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"}})
    if expected is None:
        with pytest.raises(ValueError, match="has neither"):
            trainers.trainer_config_finalize(TrainingArguments(output_dir=str(tmp_path)), model, 1)
        return
    trainers.trainer_config_finalize(TrainingArguments(output_dir=str(tmp_path)), model, 1)
    assert trainers.config["zero_optimization"]["reduce_bucket_size"] == expected**2


def test_a_config_without_architectures_is_a_language_model(arguments):
    hf_config = LlamaConfig(**{**MODELS[1][1].to_dict(), "architectures": None})
    out = run(*arguments(hf_config, CONFIG, "--json"))[1]
    assert json.loads(out)[0]["elements"] == sum(p.numel() for p in LlamaForCausalLM(hf_config).parameters())


@pytest.mark.parametrize("architectures", [None, ["LlamaForCausalLM"]])
def test_a_plan_at_stage_3_connects_no_ranks(architectures, arguments):
    """transformers cuts what from_config builds over the ranks while a Trainer's config at stage 3 is alive."""
    at_3 = {**CONFIG, "zero_optimization": {"stage": 3, "reduce_bucket_size": 2048}}
    trainers = HfDeepSpeedConfig(at_3)
    hf_config = LlamaConfig(**{**MODELS[1][1].to_dict(), "architectures": architectures})
    code, _, err = run(*arguments(hf_config, at_3, "--json"))
    assert (code, err) == (0, "") and trainers.is_zero3() and not torch.distributed.is_initialized()


@pytest.mark.parametrize("path", sorted((Path(dry_run.__file__).parent / "models").glob("*.json")),
                         ids=lambda path: path.stem)
def test_models_that_come_with_the_package_are_known_to_transformers(path):
    """A key that transformers does not know is a typo, and would be ignored."""
    content, model = json.loads(path.read_text()), shipped(path.stem)
    known = {*type(model.config)().to_dict(), *model.config.attribute_map}
    # Read with a default where its attention is built.
    assert content.keys() - {"model_type", "architectures", "head_dim"} <= known
    assert [type(model).__name__] == content["architectures"]
    assert all(param.is_meta for param in model.parameters())
    assert hidden_size_of(model) == content.get("hidden_size", content.get("n_embd"))


def test_a_model_of_ones_own_is_built_by_a_function_where_the_command_starts(tmp_path, monkeypatch):
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    (tmp_path / "my_models.py").write_text(
        "import torch\ndef build():\n"
        "    up = torch.nn.Linear(8, 16)\n    up.bias.requires_grad_(False)\n    up.weight.is_router = True\n"
        "    return torch.nn.Sequential(up, torch.nn.Linear(16, 4))\n"
        "def fails():\n    raise ValueError('no sizes')\ndef nothing():\n    return 7\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_models", raising=False)
    overrides = {"layerwise": {"overrides": [{"attr": "is_router", "lr_scale": 0.5}]}}
    (tmp_path / "ds.json").write_text(json.dumps({**CONFIG, **overrides}))

    def command(model):
        return "plan", "--model", model, "--config", "ds.json", "--ranks", "2", "--json", "--list"

    code, out, err = run(*command("my_models:build"))
    assert (code, err) == (0, "")
    assert {row["name"]: row["lr_ratio"] for row in json.loads(out)[0]["parameters"]} == {
        "0.weight": pytest.approx(0.5 * 0.02 / 3e-4), "1.weight": 1, "1.bias": 1}
    assert_refused("my_models:fails cannot be built on the meta device: ValueError: no sizes", *command(
        "my_models:fails"))
    assert_refused("my_models:missing cannot be built on the meta device: AttributeError", *command(
        "my_models:missing"))
    assert_refused("no_such_module:f cannot be built on the meta device: ModuleNotFoundError", *command(
        "no_such_module:f"))
    assert_refused("my_models:nothing must return a torch.nn.Module, got int", *command("my_models:nothing"))


def test_a_name_of_nothing_is_refused_with_the_known_ones(arguments):
    command = arguments(MODELS[1][1])
    command[2] = "gpt2"
    assert_refused("--model must be a config.json of transformers, a folder with one, module:function that returns a "
                   "model, or the name of a model that comes with this package (deepseek-v3, gpt2-124m", *command)


def test_a_model_that_cannot_be_built_is_refused(arguments, monkeypatch):
    command = arguments(AutoConfig.for_model("llama", num_attention_heads=4))
    command[2].write_text('{"model_type": "no-such-model"}')
    assert_refused("cannot be built on the meta device: ", *command)
    command[2].write_text('{"model_type": "llama", "hidden_size": "big"}')
    assert_refused("config.json by transformers", *command)
    for text in ("{", "model: small\nnumel: 8\n", "[1]", '{"model_type": "vit"}'):
        command[2].write_text(text)
        assert_refused("cannot be built on the meta device: ", *command)
    command[2].write_text('{"model_type": "llama"}')
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert_refused("pip install transformers", *command)
