"""Hugging Face's Trainer: what it fills in, its numbers, its checkpoints and the weights it saves, by value."""

import copy
import json
import math
import os
import shutil
import signal
import sys
from pathlib import Path

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback, TrainingArguments

import ds_layerwise
from ds_layerwise.errors import StepError
from tests.support import internals
from tests.support.checkpoints import on_rank_0
from tests.support.expected import assert_trained_as
from tests.support.forks import fork_ranks
from tests.support.harness import DistributedTest, OwnDistributedTest
from tests.support.huggingface import (
    FINE_TUNE,
    GPT2_MATRICES,
    VOCAB,
    WIDTH,
    Batches,
    Tokens,
    config,
    gpt2,
    make_trainer,
    steps_of,
    train_plainly,
)
from tests.support.reference import Recipe, trainable
from tests.support.rooms import rooms
from tests.support.training import assert_same_on_all_ranks, from_all_ranks, relative_error, whole
from tests.support.versions import needs
from tests.unit.test_examples import load_example

pytestmark = rooms("engine_hooks", "rate_checks")

ROOT = Path(__file__).parents[3]

#: What the oracle does, too.
EXACT = {"ns_method": "standard", "ns_dtype": "fp32", "decay_vectors": True}


def masters(engine):
    """All float32 masters, whole."""
    mine = {piece.name: (piece.param_start, internals.master(engine, piece.name).clone())
            for piece in internals.pieces(engine)}
    everyone = from_all_ranks(mine)
    return {name: torch.cat([of_rank[name][1] for of_rank in sorted(
        (r for r in everyone if name in r), key=lambda r: r[name][0])]) for name in engine.optimizer.routes}


class TestNumbers(DistributedTest):
    init_distributed = False

    def test_auto_values_reach_the_optimizer_and_the_steps_are_those_of_the_oracle(self, stage, tmp_path):
        model, steps, warmup = gpt2(), 6, 2
        batches = Batches(model)
        overrides = [{"name": "*.bias", "weight_decay": 0.0}]
        trainer = make_trainer(
            tmp_path, config(stage=stage, params=EXACT, layerwise={"overrides": overrides}), model=model, size=20,
            callbacks=[batches], max_steps=steps, learning_rate=4e-3, adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-7,
            weight_decay=0.2, max_grad_norm=0.5, lr_scheduler_type="cosine", warmup_steps=warmup)
        trainer.train()

        engine = trainer.deepspeed
        group, = engine.optimizer.param_groups
        assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.8, 0.9), 1e-7, 0.2)
        assert group["matrix_lr_ratio"] == pytest.approx(0.02 / 4e-3) and group["scalar_lr_ratio"] == 1
        assert engine.optimizer.optimizer.config.lr == 4e-3
        settings = engine.optimizer.settings
        assert (settings.stage, settings.clip_grad, settings.bucket_numel) == (stage, 0.5, WIDTH**2)
        assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (8, 2)
        assert engine.gradient_accumulation_steps() == 2 and engine.get_data_types()[0] == torch.float32

        def schedule(step):
            return step / warmup if step < warmup else (1 + math.cos(
                math.pi * (step - warmup) / (steps - warmup))) / 2

        biases = {name: 0.0 for name in trainable(model) if name.endswith(".bias")}
        seen = batches.of_all_ranks()
        assert [len(tokens) for tokens in seen] == [8, 8, 4] * 2  # an epoch ends within a step
        expected = train_plainly(gpt2(), seen, Recipe(
            matrices=GPT2_MATRICES, clip=0.5, muon_lr=0.02, adam_lr=4e-3, betas=(0.8, 0.9), eps=1e-7, weight_decay=0.2,
            wd=biases, schedule=schedule))
        for step, (row, wanted) in enumerate(zip(steps_of(trainer), expected.steps, strict=True)):
            assert row["loss"] == pytest.approx(wanted.loss, rel=1e-5), step
            assert row["grad_norm"] == pytest.approx(wanted.norm, rel=1e-4), step
            assert row["learning_rate"] == pytest.approx(4e-3 * schedule(step + 1)), step
            assert wanted.clip_factor > 1
        assert_trained_as(model, expected, 1e-4)
        norm = trainer.accelerator.clip_grad_norm_(model.parameters(), 0.5)
        assert norm == engine.get_global_grad_norm() == steps_of(trainer)[-1]["grad_norm"]
        assert_same_on_all_ranks(model)

    def test_the_file_that_accelerates_launcher_names(self, tmp_path, monkeypatch):
        options = {"max_steps": 3, "learning_rate": 4e-3, "adam_beta1": 0.8, "weight_decay": 0.2, "max_grad_norm": 0.5}
        trainer = make_trainer(tmp_path, config(stage=2), **options)
        trainer.train()
        file = tmp_path / f"of rank {dist.get_rank()}.json"
        file.write_text(json.dumps(config(stage=2)))
        # What the launcher sets.
        monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(file))
        launched = make_trainer(tmp_path, None, **options)
        launched.train()
        assert launched.deepspeed.optimizer.settings.clip_grad == 0.5
        assert launched.deepspeed.optimizer.param_groups[0]["betas"] == (0.8, 0.999)
        assert len(steps_of(trainer)) == 3 and steps_of(launched) == steps_of(trainer)


class KillAfter(TrainerCallback):
    """Kills this rank in the middle of the step after ``step``."""

    def __init__(self, step):
        self.step = step

    def on_substep_end(self, args, state, control, **_):
        """The Trainer's call between two micro-batches."""
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def sixty_steps(folder, out, stage, bf16, die_after=None, resume=None):
    """Train, and write to ``out`` what the Trainer reported and the weights."""
    callbacks = [] if die_after is None else [KillAfter(die_after)]
    trainer = make_trainer(
        folder, config(stage=stage), model=gpt2(dropout=0.1, seed=0 if resume is None else 1), size=300, max_steps=60,
        bf16=bf16, lr_scheduler_type="cosine", warmup_steps=5, weight_decay=0.1, save_strategy="steps", save_steps=30,
        callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    weights = {name: whole(p) for name, p in trainable(trainer.model).items()}
    if dist.get_rank() == 0:
        torch.save({"steps": steps_of(trainer), "weights": weights}, out)


class TestKilledAndResumed(OwnDistributedTest):
    # This one process starts the ranks itself, and has no group.
    world_size = 1
    init_distributed = False
    exec_timeout = 1000

    @pytest.mark.parametrize("stage, bf16", [
        (1, False), *(pytest.param(stage, bf16, marks=pytest.mark.thorough)
                      for stage, bf16 in ((2, True), (3, False), (3, True)))])
    def test_the_losses_are_those_of_an_unbroken_run(self, stage, bf16, tmp_path):
        unbroken, rest = tmp_path / "whole", tmp_path / "rest"

        def run(folder, out, die_after=None, resume=None):
            return fork_ranks(2, sixty_steps, tmp_path / folder, out, stage, bf16, die_after, resume, exec_timeout=300)

        assert run("unbroken", unbroken) == [(0, ""), (0, "")]
        assert run("broken", rest, die_after=33) == [(-signal.SIGKILL, "")] * 2 and not rest.exists()
        assert [path.name for path in (tmp_path / "broken").iterdir()] == ["checkpoint-30"]
        assert run("broken", rest, resume=True) == [(0, ""), (0, "")]
        expected, found = torch.load(unbroken), torch.load(rest)
        assert [row["step"] for row in expected["steps"]] == list(range(1, 61))
        assert expected["steps"][-1]["loss"] < 0.75 * expected["steps"][0]["loss"]
        assert found["steps"] == expected["steps"]
        for name, value in expected["weights"].items():
            assert torch.equal(found["weights"][name], value), name


def plain_loss(model, dataset):
    """Mean loss over ``dataset`` at once, without the Trainer."""
    tokens = torch.stack([dataset[i]["input_ids"] for i in range(len(dataset))])
    with torch.no_grad():
        return float(model.eval()(input_ids=tokens, labels=tokens).loss)


def assert_equal_weights(folder, expected, dtype):
    """``from_pretrained`` gives ``expected``, bit for bit."""
    found = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


class TestSavedWeights(DistributedTest):
    init_distributed = False

    @pytest.mark.parametrize("stage, bf16", [pytest.param(1, False, marks=pytest.mark.thorough), (2, True)])
    def test_evaluation_the_best_model_and_from_pretrained(self, stage, bf16, tmp_path):
        dtype = torch.bfloat16 if bf16 else torch.float32
        # The greatest loss is taken for the best: that of the first checkpoint.
        trainer = make_trainer(
            tmp_path, config(stage=stage, layerwise={"overlap_param_gather": True}), max_steps=9, eval_strategy="steps",
            save_strategy="steps", eval_steps=3, save_steps=3, load_best_model_at_end=True,
            metric_for_best_model="loss", greater_is_better=True, bf16=bf16)
        trainer.train()
        assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-3")
        reported = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
        assert len(reported) == 3 and reported[2] < reported[0]
        for step, loss in zip((3, 6, 9), reported, strict=True):
            saved = AutoModelForCausalLM.from_pretrained(tmp_path / f"checkpoint-{step}", dtype=dtype)
            assert loss == pytest.approx(plain_loss(saved, trainer.eval_dataset), rel=1e-2 if bf16 else 1e-5)
        best, engine = trainer.model.state_dict(), trainer.deepspeed
        assert_equal_weights(tmp_path / "checkpoint-3", best, dtype)
        assert engine.global_steps == 3
        saved = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "checkpoint-3")
        for name, master in masters(engine).items():
            assert torch.equal(master, saved[name].flatten()), name
            assert torch.equal(master.to(dtype), best[name].flatten()), name
        trainer.save_model(tmp_path / "by the trainer")
        on_rank_0(lambda: trainer.model.save_pretrained(tmp_path / "by the model"))
        on_rank_0(lambda: trainer.accelerator.unwrap_model(engine).save_pretrained(
            tmp_path / "sharded", max_shard_size="20KB"))
        for name in ("by the trainer", "by the model", "sharded"):
            assert_equal_weights(tmp_path / name, best, dtype)

    def test_weights_alone(self, tmp_path):
        trainer = make_trainer(tmp_path, config(), max_steps=4, save_strategy="steps", save_steps=4, bf16=True,
                               save_only_model=True)
        trainer.train()
        assert {row["step"] for row in steps_of(trainer)} == {1, 2, 3, 4}
        folder = tmp_path / "checkpoint-4"
        dist.barrier()  # the last files are rank 0's alone
        assert {path.name for path in folder.iterdir()} == {
            "config.json", "generation_config.json", "model.safetensors", "trainer_state.json", "training_args.bin"}
        rounded = {name: value.bfloat16() for name, value in masters(trainer.deepspeed).items()}
        state = trainer.model.state_dict()
        for name, value in rounded.items():
            assert torch.equal(state[name].flatten(), value), name
        assert_equal_weights(folder, state, torch.bfloat16)
        again = make_trainer(tmp_path, config(), model=gpt2(seed=1), max_steps=4, bf16=True)
        with pytest.raises(ValueError, match="Can't find a valid checkpoint"):
            again.train(resume_from_checkpoint=str(folder))

    def test_another_trainer_for_the_same_model(self, tmp_path):
        first = make_trainer(tmp_path, config(), max_steps=2)
        first.train()
        copied = gpt2()
        copied.load_state_dict(first.model.state_dict())
        runs = [make_trainer(tmp_path, config(), model=model, max_steps=2) for model in (first.model, copied)]
        for trainer in runs:
            trainer.train()
        assert steps_of(runs[0]) == steps_of(runs[1]) and len(steps_of(runs[0])) == 2
        with pytest.raises(StepError, match="another engine"):
            first.deepspeed.step()

    def test_auto_that_cannot_be_filled_in_is_refused(self, tmp_path):
        # The message is Accelerate's own.
        with pytest.raises(ValueError, match="optimizer.params.muon_lr.*without `auto`"):
            make_trainer(tmp_path, config(params={"muon_lr": "auto"}), max_steps=2).train()


def lora(seed=0):
    """GPT-2 with an adapter on its attention, everything else frozen."""
    base = gpt2()
    torch.manual_seed(seed)
    return get_peft_model(base, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
class TestLora(DistributedTest):
    init_distributed = False

    def test_the_adapter_alone_is_trained_saved_and_loaded(self, tmp_path):
        model = lora()
        batches, before = Batches(model), gpt2().state_dict()
        options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "constant"}
        trainer = make_trainer(tmp_path, config(params=EXACT), model=model, callbacks=[batches], **options)
        trainer.train()
        adapter = {name: p.detach() for name, p in trainable(model).items()}
        assert len(adapter) == 4 and trainer.deepspeed.optimizer.routes.keys() == adapter.keys()
        expected = train_plainly(lora(), batches.of_all_ranks(), Recipe(
            matrices={name: (1, *p.shape) for name, p in adapter.items()}, clip=1.0, muon_lr=0.02))
        for row, wanted in zip(steps_of(trainer), expected.steps, strict=True):
            assert row["loss"] == pytest.approx(wanted.loss, rel=1e-5)
            assert row["grad_norm"] == pytest.approx(wanted.norm, rel=1e-4)
        for name, p in adapter.items():
            assert relative_error(p, expected.model_params[name]) < 1e-4, name
        frozen = {name.replace(".base_layer", ""): p for name, p in model.get_base_model().state_dict().items()
                  if "lora_" not in name}
        for name, value in before.items():
            assert torch.equal(frozen[name], value), name

        saved = torch.load(tmp_path / "checkpoint-6" / "global_step6" / "mp_rank_00_model_states.pt",
                           weights_only=False)["module"]
        # DeepSpeed leaves out each frozen parameter once, and so not the second name of a tied one.
        assert saved.keys() - adapter.keys() == {"base_model.model.lm_head.weight"}
        loaded = trainable(PeftModel.from_pretrained(gpt2(), tmp_path / "checkpoint-6", is_trainable=True))
        assert loaded.keys() == adapter.keys()
        for name, p in adapter.items():
            assert torch.equal(loaded[name], p), name
        resumed = make_trainer(tmp_path, config(params=EXACT), model=lora(seed=1), **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        assert steps_of(resumed) == steps_of(trainer)
        for name, p in trainable(resumed.model).items():
            assert torch.equal(p, adapter[name]), name


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
class TestStage3(DistributedTest):
    @pytest.mark.parametrize("adapter", [False, pytest.param(True, marks=[pytest.mark.thorough, needs(
        "deepspeed>=0.19.8", "adapters at stage 3 lose their values after a save, with its own optimizer, too")])],
        ids=["whole", "adapter"])
    def test_it_trains_saves_and_resumes_as_at_stage_2(self, adapter, tmp_path):
        runs = {}
        for stage, resumes_at in ((2, 2), (3, 3), (3, 2)):
            folder = tmp_path / str(stage)
            for resume in (None, str(folder / "checkpoint-2")):
                at = resumes_at if resume else stage
                runs[stage, at, bool(resume)] = steps, saved = self.run(folder, at, adapter, resume)
                expected, weights = runs[2, 2, False]
                assert steps == expected, (stage, at, resume)
                assert saved.keys() == weights.keys()
                for name, value in weights.items():
                    assert torch.equal(saved[name], value), (stage, at, resume, name)
        assert len(runs) == 5

    def run(self, folder, stage, adapter, resume):
        """Return what the Trainer reports, and the weights that it saves."""
        ds_config = config(stage=stage, params=EXACT)
        ds_config["zero_optimization"] |= {"stage3_gather_16bit_weights_on_model_save": True,
                                           "memory_efficient_linear": False,
                                           "stage3_param_persistence_threshold": "auto"}
        base = folder.parent / "base"
        # They fill in what from_pretrained() reads, as long as they live.
        alive = TrainingArguments(str(folder), deepspeed=copy.deepcopy(ds_config), use_cpu=True)
        on_rank_0(lambda: base.exists() or gpt2().save_pretrained(base))
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        model.loss_type = "ForCausalLM"
        assert all(hasattr(p, "ds_id") == (stage == 3) for p in model.parameters())
        if adapter:
            model = get_peft_model(model, LoraConfig(
                r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True))
            for name, param in model.named_parameters():
                if param.requires_grad:
                    self.fill(name, param)
        trainer = make_trainer(folder, ds_config, model=model, max_steps=4, save_strategy="steps", save_steps=2)
        trainer.train(resume_from_checkpoint=resume)
        out = folder / f"final {stage} {bool(resume)}"
        trainer.save_model(out)
        dist.barrier()
        del alive
        saved = load_file(out / ("adapter_model.safetensors" if adapter else "model.safetensors"))
        # The Trainer writes a tied one under either name.
        return steps_of(trainer), {name.replace("lm_head", "transformer.wte"): value for name, value in saved.items()}

    @staticmethod
    def fill(name, param):
        g = torch.Generator().manual_seed(len(name))
        if hasattr(param, "ds_id"):
            with deepspeed.zero.GatheredParameters(param, modifier_rank=0):
                if dist.get_rank() == 0:
                    param.data.copy_(torch.randn(param.shape, generator=g) / 8)
        else:
            param.data.copy_(torch.randn(param.shape, generator=g) / 8)


class TestArgumentsBeforeTheModel(DistributedTest):
    init_distributed = False

    def test_a_model_that_from_pretrained_cuts_trains_as_one_that_was_there_before(self, tmp_path):
        ds_config = config(stage=3)
        ds_config["zero_optimization"]["memory_efficient_linear"] = False
        base, steps = tmp_path / f"base of rank {os.environ['RANK']}", {}
        gpt2().save_pretrained(base)
        ds_layerwise.register()
        # It connects torch on a CPU, and not deepspeed.comm.
        alive = TrainingArguments(str(tmp_path), deepspeed=copy.deepcopy(ds_config), use_cpu=True,
                                  per_device_train_batch_size=2, gradient_accumulation_steps=2)
        assert torch.distributed.is_initialized() and not dist.is_initialized()
        cut = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        cut.loss_type = "ForCausalLM"
        assert cut.lm_head.weight.ds_shape == (VOCAB, WIDTH) and cut.lm_head.weight.ds_numel == VOCAB * WIDTH
        assert cut.lm_head.weight.ds_tensor.numel() == VOCAB * WIDTH // 2
        for model in (cut, gpt2()):
            trainer = make_trainer(tmp_path, ds_config, model=model, max_steps=3)
            trainer.train()
            steps[model] = steps_of(trainer)
        del alive
        assert len(steps[cut]) == 3 and steps[cut] == steps[model]


class TestEvaluatedBeforeItIsTrained(DistributedTest):
    def test_a_new_trainer_takes_the_model_over(self, tmp_path):
        make = lambda model: make_trainer(tmp_path, config(stage=3), model=model, max_steps=3)  # noqa: E731
        whole_one, model = gpt2(), gpt2()
        loss = plain_loss(whole_one, Tokens(8, first=10**6))
        for _ in range(2):  # an engine without an optimizer after another
            assert make(model).evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-5)
        for _ in range(2):  # and engines that train after both
            runs = [make(each) for each in (model, whole_one)]
            for trainer in runs:
                trainer.train()
            assert len(steps_of(runs[0])) == 3 and steps_of(runs[0]) == steps_of(runs[1])
            assert runs[0].evaluate()["eval_loss"] == runs[1].evaluate()["eval_loss"] != loss


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
class TestFineTuning(DistributedTest):
    init_distributed = False

    @pytest.mark.parametrize("make, rate", [(lora, 3e-3), (lora, 3e-5), (gpt2, 1e-3)])
    def test_learning_rate_is_everything(self, make, rate, tmp_path):
        model, steps, decay = make(), 4, 0.1
        batches = Batches(model)
        trainer = make_trainer(
            tmp_path, config(base=FINE_TUNE, stage=2, params=EXACT), model=model, callbacks=[batches], max_steps=steps,
            learning_rate=rate, weight_decay=decay, lr_scheduler_type="linear", adam_epsilon=1e-7)
        trainer.train()
        params = trainable(model)
        matrices = {name: (1, *p.shape) for name, p in params.items()} if make is lora else GPT2_MATRICES
        # AdamW's root mean square, 0.2, times the config's factor of 5, instead of the oracle's own scale.
        scale = {name: 5 * 0.2 * math.sqrt(max(rows, cols)) / math.sqrt(max(1, rows / cols))
                 for name, (_, rows, cols) in matrices.items()}
        expected = train_plainly(make(), batches.of_all_ranks(), Recipe(
            matrices=matrices, clip=1.0, adam_lr=rate, betas=(0.9, 0.999), eps=1e-7, weight_decay=decay,
            lr={name: rate * factor for name, factor in scale.items()},
            wd={name: decay / factor for name, factor in scale.items()},
            schedule=lambda step: 1 - step / steps))
        for row, wanted in zip(steps_of(trainer), expected.steps, strict=True):
            assert row["loss"] == pytest.approx(wanted.loss, rel=1e-5)
        for name, p in params.items():
            assert relative_error(p.detach(), expected.model_params[name]) < 1e-4, name


class TestExample(DistributedTest):
    init_distributed = False

    def test_it_trains_resumes_and_saves_what_from_pretrained_reads(self, tmp_path, monkeypatch):
        monkeypatch.syspath_prepend(ROOT / "examples")
        arguments = ["hf_trainer.py", "--deepspeed_config", str(ROOT / "ds_configs" / "hf_auto.json"), "--steps", "12",
                     "--save_every", "6", "--layers", "1", "--width", "32", "--heads", "2", "--context", "32",
                     "--out", str(tmp_path)]
        example, weights = load_example("hf_trainer"), []
        for more in ([], ["--resume"]):
            monkeypatch.setattr(sys, "argv", [*arguments, *more])
            example.main()
            dist.barrier()
            weights.append(AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict())
            masters = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "checkpoint-12")
            assert weights[-1].keys() == masters.keys()
            for name, value in weights[-1].items():
                assert torch.equal(value, masters[name]) and torch.equal(value, weights[0][name]), name
            dist.barrier()
            on_rank_0(lambda: [shutil.rmtree(tmp_path / name) for name in ("checkpoint-12", "model")])
