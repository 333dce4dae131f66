"""``ds-layerwise plan --model config.json``: the numbers of the model that training would build from it."""

import json
import sys
from types import SimpleNamespace

import pytest
import transformers
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
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from ds_layerwise.config.run_config import RunConfig
from ds_layerwise.plan.forecast.forecast import forecast, specs_of
from ds_layerwise.plan.forecast.prediction import predict
from ds_layerwise.plan.forecast.report import as_json, plan_table
from ds_layerwise.routing.routing_rules import route_parameters
from ds_layerwise.tools.hf_model import HfShapes
from tests.support.cli import assert_refused, run
from tests.support.rooms import rooms

pytestmark = rooms("hf_model")

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
    predicted = predict(expected, specs, routes, parsed, reduction="native")
    assert (code, err) == (0, "") and json.loads(out) == [as_json(expected, predicted)]
    assert run(*command)[1] == plan_table(routes, specs, [expected], parsed.optimizer, predictions=[predicted]) + "\n"


def test_a_trainers_buckets_are_of_the_square_of_the_hidden_size(arguments):
    auto = {**CONFIG, "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"}, "train_batch_size": "auto"}
    by_hand = {**CONFIG, "zero_optimization": {"stage": 1, "reduce_bucket_size": 256}}
    assert run(*arguments(MODELS[1][1], auto, "--json"))[1] == run(*arguments(MODELS[1][1], by_hand, "--json"))[1]


@pytest.mark.parametrize("sizes, expected", [
    ({"hidden_size": 16}, 16), ({"hidden_sizes": [8, 32, 16]}, 32), ({}, None),
    ({"text_config": {"hidden_size": 24}}, 24), ({"text_config": {"hidden_sizes": [8, 24]}}, 24),
    ({"hidden_size": 16, "text_config": {"hidden_size": 24}}, 16)])
def test_the_hidden_size_is_the_one_that_a_trainer_takes(sizes, expected, tmp_path, monkeypatch):
    text = sizes.get("text_config")
    given = SimpleNamespace(**{**sizes, **({"text_config": SimpleNamespace(**text)} if text else {})}, architectures=())
    model = SimpleNamespace(tie_weights=lambda: None, named_parameters=lambda: [], config=given)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *args, **kwargs: given)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", lambda *args, **kwargs: model)
    assert HfShapes(tmp_path / "config.json").hidden_size == expected
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


def test_a_model_that_cannot_be_built_is_refused(arguments, monkeypatch):
    command = arguments(AutoConfig.for_model("llama", num_attention_heads=4))
    command[2].write_text('{"model_type": "no-such-model"}')
    assert_refused("cannot build this model without memory: ", *command)
    command[2].write_text('{"model_type": "llama", "hidden_size": "big"}')
    assert_refused("config.json: transformers", *command)
    command[2].write_text("{")
    assert_refused("config.json is no JSON", *command)
    command[2].write_text('{"model_type": "llama"}')
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert_refused("pip install transformers", *command)
