"""The Python of README.md and docs/, run as it stands; and their configs, each under an engine that takes a step."""

import json
import re

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import ds_layerwise
from ds_layerwise import run
from tests.support.checkpoints import on_rank_0
from tests.support.documents import PAGES, ROOT, as_config, blocks, names_in, prose_of
from tests.support.harness import DistributedTest, made_once
from tests.support.rooms import rooms

pytestmark = rooms("sections", "ds_config")


#: Pages whose scripts start by themselves, on two ranks.
OF_RANKS = ("docs/long_sequences.md", "docs/mixture_of_experts.md")


class Model(nn.Module):
    """A language model with the names that the pages' overrides have; it returns its loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.ModuleDict({
            "embed": nn.Embedding(40, 16), "layers": nn.ModuleList(nn.Linear(16, 16) for _ in range(2)),
            "norm": nn.LayerNorm(16)})
        self.lm_head = nn.Linear(16, 40, bias=False)

    def forward(self, tokens):
        x = self.model["embed"](tokens)
        for layer in self.model["layers"]:
            x = x + F.relu(layer(x))
        return F.cross_entropy(self.lm_head(self.model["norm"](x)).float().flatten(0, 1), tokens.flatten())


def llama():
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=16, attn_implementation="eager"))


def batches(count=3):
    return [torch.arange(16).view(2, 8) + i for i in range(count)]


def first_config():
    """Return the config of the README."""
    return next(as_config(block)[0] for block in blocks("json") if block.page == "README.md")


def started(config):
    engine, *_ = ds_layerwise.initialize(model=(model := Model()), model_parameters=model.parameters(), config=config)
    return engine


def one_step(engine):
    engine.backward(engine(batches()[0]))
    engine.step()


class TestPython(DistributedTest):
    world_size = 1

    @pytest.mark.parametrize("block", [block for block in blocks("python") if block.page not in OF_RANKS], ids=str)
    def test_it_runs(self, block, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "ds.json").write_text(json.dumps(first_config()))
        names = {"config": first_config(), "loader": batches(), "ds_layerwise": ds_layerwise, "deepspeed": deepspeed}
        makes_one = "initialize(model" in block.text.replace("\n", "").replace(" ", "")
        if "engine" in block.text and not makes_one:
            engine = started(first_config())
            one_step(engine)
            names |= {"engine": engine, "model": engine.module}
        if "Trainer(" in block.text:
            (tmp_path / "ds.json").write_text((ROOT / "ds_configs" / "hf_auto.json").read_text())
            tokens = torch.arange(16)
            text = block.text.replace("save_steps=2)", "save_steps=2, use_cpu=True)")
            assert text != block.text
            exec(compile(text, str(block), "exec"), names | {
                "model": llama(), "dataset": [{"input_ids": tokens, "labels": tokens}] * 32})
            assert type(llama()).from_pretrained(tmp_path / "out" / "model")
            return
        names.setdefault("model", Model())
        before = names["model"].model["layers"][0].weight.detach().clone()
        exec(compile(block.text, str(block), "exec"), names)
        if "engine.step()" in block.text:
            assert names["engine"].global_steps == len(batches())
            after = names["model"].model["layers"][0].weight.detach()
            assert after.dtype == torch.bfloat16 and not torch.equal(after, before.to(after.dtype))


def executed(text, folder, changes=()):
    """Run a script in ``folder``, with other text in some places; its names."""
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(compile(text, "a block", "exec"), names := {})
    return names


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.all_gather is deprecated:FutureWarning")
class TestScriptsOfRanks(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("block", [
        block for block in blocks("python") if block.page in OF_RANKS and "import deepspeed" in block.text], ids=str)
    def test_they_run_as_they_stand(self, block, tmp_path):
        names = executed(block.text, tmp_path)
        engine = names["trainer"].model_wrapped if "trainer" in names else names["engine"]
        assert engine.global_steps == len(names["losses"]) == 4
        assert engine.zero_optimization_stage() == names["config"]["zero_optimization"]["stage"]
        assert names["losses"][-1] < 0.99 * names["losses"][0]

    @staticmethod
    def train_own_model(folder):
        """Save the losses of the script of the own model in float32; a second call goes on."""
        block = next(block for block in blocks("python") if "DistributedAttention(" in block.text)
        names = executed(block.text, folder, (
            ("SP, LENGTH, WIDTH, HEADS = 2, 4096,", f"SP, LENGTH, WIDTH, HEADS = {dist.get_world_size()}, 256,"),
            (' "bf16": {"enabled": True},', ""), ('"muon_lr": 0.02', '"muon_lr": 0.02, "ns_dtype": "fp32"')))
        losses = torch.tensor(names["losses"], dtype=torch.float64)
        dist.all_reduce(losses)
        on_rank_0(lambda: torch.save(losses, folder / f"until_{names['engine'].global_steps}.pt"))

    @pytest.fixture
    def changed(self, class_tmpdir):
        return made_once(class_tmpdir / "changed", [4, 2], self.train_own_model)

    @pytest.fixture
    def same(self, class_tmpdir):
        return made_once(class_tmpdir / "same", [2, 2], self.train_own_model)

    @pytest.mark.world_size(1)
    def test_sequences_on_four_ranks_go_on_on_two_as_if_they_had_been_there_all_the_time(self, changed, same):
        for steps in (4, 8):
            losses, wanted = (torch.load(folder / f"until_{steps}.pt") for folder in (changed, same))
            torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=0)


class TestConfigs(DistributedTest):
    world_size = 1

    def test_engines_take_a_step(self, tmp_path, monkeypatch):
        # Where monitors write.
        monkeypatch.chdir(tmp_path)
        for block in blocks("json"):
            config, _ = as_config(block)
            # Of two ranks: below; of four, and with experts: test_auto_ep.py.
            if config.keys() & {"tensor_parallel", "expert_parallel"}:
                continue
            engine = started({**config, "steps_per_print": 10**9})
            old = engine.module.lm_head.weight.detach().clone()
            one_step(engine)
            # A schedule may begin with a rate of nothing.
            assert "scheduler" in config or not torch.equal(engine.module.lm_head.weight, old), str(block)
            engine.destroy()

    @pytest.mark.world_size(2)
    def test_configs_of_two_ranks_train(self):
        found = [config for config, _ in map(as_config, blocks("json")) if "tensor_parallel" in config]
        assert len(found) == 1 and found[0]["tensor_parallel"] == {"autotp_size": 2}
        module = llama()
        engine, *_ = ds_layerwise.initialize(model=module, model_parameters=module.parameters(), config=found[0])
        engine.backward(engine(input_ids=batches()[0], labels=batches()[0]).loss)
        engine.step()
        cut = {route.name for route in engine.optimizer.routes.values() if route.tp_axis is not None}
        assert "model.layers.0.self_attn.q_proj.weight" in cut and engine.global_steps == 1


class TestNames(DistributedTest):
    world_size = 1

    def test_an_engine_has_the_attributes_that_the_pages_name(self):
        engine = started(first_config())
        engine.optimizer.fresh_states  # not before a load
        found = set()
        for path in PAGES:
            text = prose_of(path) + "".join(block.text for block in blocks("python"))
            found |= set(re.findall(r"\bengine\.optimizer\.([\w.]+)", text))
        assert {"routes", "describe", "fresh_states", "wait_for_params"} <= found
        for name in found:
            value = engine.optimizer
            for part in name.strip(".").split("."):
                value = getattr(value, part)
        route = engine.optimizer.routes["lm_head.weight"]
        page = next(text for text in (ROOT / "docs" / "optimizers.md").read_text().split("**")
                    if "`engine.optimizer.routes`" in text)
        for name in names_in(re.search(r"by parameter name \((.*?)\)", page, flags=re.DOTALL)[1]):
            assert hasattr(route, name), name


def test_the_package_has_the_names_of_the_pages():
    for path in PAGES:
        for name in re.findall(r"\bds_layerwise\.(\w+)\(", prose_of(path)):
            assert name in ds_layerwise.__all__, name
        for name in re.findall(r"`ds_layerwise\.run\.(\w+)\(\)`", prose_of(path)):
            assert callable(getattr(run, name))
