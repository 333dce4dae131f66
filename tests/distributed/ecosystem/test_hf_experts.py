"""Hugging Face's Trainer with a model whose experts AutoEP spreads over ranks, which may share sequences, too."""

from functools import partial

import pytest
import torch
from transformers import Qwen3MoeForCausalLM
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from ds_layerwise import cli
from ds_layerwise.errors import ConfigError
from tests.distributed.parallel.test_auto_ep import qwen
from tests.support.checkpoints import on_rank_0
from tests.support.harness import DistributedTest
from tests.support.huggingface import LENGTH, Tokens, config, make_trainer, sharing_sequences, steps_of
from tests.support.rooms import rooms
from tests.support.versions import unmet

pytestmark = [*rooms("sequence", "hf_names"),
              pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.all_gather is deprecated")]

STEPS = 4


class Positioned(Tokens):
    """Sequences of the model's tokens, with the positions that cut sequences need."""

    def __getitem__(self, index):
        items = {key: value % qwen().config.vocab_size for key, value in super().__getitem__(index).items()}
        return {**items, "position_ids": torch.arange(LENGTH)}


def train(folder, ep_size, *, stage, resume=None, **arguments):
    """Return what the Trainer reports of each step."""
    section = {"expert_parallel": {"enabled": True, "autoep_size": ep_size, "use_grouped_mm": False}}
    # "auto" would multiply in bfloat16 on some CPUs, and weights would be the same to fewer digits.
    ds_config = config(stage=stage, params={"ns_dtype": "fp32"}, **section if ep_size else {})
    trainer = make_trainer(
        folder, ds_config, model=qwen(), dataset=Positioned(64), max_steps=STEPS,
        save_strategy="steps", save_steps=2, train_sampling_strategy="sequential", ignore_data_skip=True, **arguments)
    trainer.train(resume_from_checkpoint=resume)
    return steps_of(trainer)


def check_exported(spread, plain, out):
    """Compare the model of the run with experts on several ranks with that of the other."""
    unset_hf_deepspeed_config()  # else ranks would have to read them together
    models = []
    for name, checkpoint in (("spread", spread), ("plain", plain)):
        assert cli.main(["consolidate", str(checkpoint), str(out / name)]) == 0
        model, info = Qwen3MoeForCausalLM.from_pretrained(out / name, output_loading_info=True)
        assert not any(info.values()), info
        models.append(model.state_dict())
    for name, value in models[0].items():
        torch.testing.assert_close(value, models[1][name], rtol=0, atol=1e-5, msg=name)


class TestExperts(DistributedTest):
    world_size = 4

    @pytest.mark.parametrize("stage, sp_size", [(2, 1), (2, 2), (3, 1)])
    def test_it_trains_resumes_and_exports_as_without(self, stage, sp_size, tmp_path):
        if unmet("transformers<5.23", "AutoEP of DeepSpeed 0.19.8 fails with newer ones"):
            with pytest.raises(ConfigError, match="AutoEP of DeepSpeed .* install 'transformers<5.23'"):
                train(tmp_path, 2, stage=stage)
            return

        def run(name, ep_size, **options):
            groups = sharing_sequences(sp_size) if sp_size > 1 else {}
            return train(tmp_path / name, ep_size, stage=stage, **options, **groups)

        def assert_same(found, wanted):
            assert len(found) == STEPS
            for of_found, of_wanted in zip(found, wanted, strict=True):
                assert of_found == pytest.approx(of_wanted, rel=1e-4)

        assert_same(run("spread", 2), run("plain", 0))
        on_rank_0(partial(check_exported, tmp_path / "spread" / "checkpoint-4", tmp_path / "plain" / "checkpoint-4",
                          tmp_path / "exported"))
        assert_same(run("spread", 4, resume=str(tmp_path / "spread" / "checkpoint-2")),
                    run("plain", 0, resume=str(tmp_path / "plain" / "checkpoint-2")))
