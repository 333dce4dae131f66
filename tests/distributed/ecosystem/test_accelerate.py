"""Plain Accelerate: what it fills in, its numbers and its checkpoints, and a script that does not know this package."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import DummyOptim, DummyScheduler, InitProcessGroupKwargs
from deepspeed.accelerator import get_accelerator
from torch.utils.data import DataLoader

import ds_layerwise
from tests.support.expected import assert_trained_as
from tests.support.harness import DistributedTest, free_port
from tests.support.huggingface import GPT2_MATRICES, WIDTH, Tokens, config, gpt2, train_plainly
from tests.support.models import TINY_GPT_MATRICES, tiny_gpt, token_batch, token_loss
from tests.support.reference import Recipe, train, trainable
from tests.support.rooms import rooms
from tests.support.training import MUON, ds_config, relative_error, whole

pytestmark = rooms("engine_hooks", "run")

ROOT = Path(__file__).parents[3]
LR, STEPS, WARMUP = 4e-3, 8, 4

#: Accelerate fills in no betas and no eps.
PARAMS = {"betas": [0.8, 0.9], "eps": 1e-7, "ns_method": "standard", "ns_dtype": "fp32", "decay_vectors": True}
SCHEDULER = {"type": "WarmupLR", "params": {
    "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "warmup_type": "linear"}}


def make_accelerator(**changes):
    ds_layerwise.register()
    # Without the name of a backend Accelerate counts one process on a CPU.
    backend = InitProcessGroupKwargs(backend=get_accelerator().communication_backend_name())
    return Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config(**changes)), gradient_accumulation_steps=2,
                       kwargs_handlers=[backend])


def prepare(accelerator, model):
    optimizer = DummyOptim(model.parameters(), lr=LR, weight_decay=0.2)
    scheduler = DummyScheduler(optimizer, warmup_num_steps=WARMUP)
    return accelerator.prepare(model, optimizer, scheduler, DataLoader(Tokens(8 * STEPS), batch_size=2))


class TestAccelerate(DistributedTest):
    init_distributed = False

    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_the_steps_are_those_of_the_oracle_also_after_a_load(self, stage, tmp_path):
        accelerator = make_accelerator(stage=stage, params=PARAMS, scheduler=SCHEDULER)
        # Accelerate asks for it where weights are gathered.
        plugin = accelerator.state.deepspeed_plugin
        plugin.deepspeed_config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
        engine, optimizer, scheduler, loader = prepare(accelerator, gpt2())
        group, settings = engine.optimizer.param_groups[0], engine.optimizer.settings
        assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.8, 0.9), 1e-7, 0.2)
        assert engine.optimizer.optimizer.config.lr == LR
        # Accelerate has no bound for the norm but its own 1.0.
        assert (settings.stage, settings.clip_grad, settings.bucket_numel) == (stage, 1.0, WIDTH**2)
        assert (engine.train_batch_size(), engine.gradient_accumulation_steps()) == (8, 2)

        warmup = engine.lr_scheduler
        assert (warmup.min_lrs, warmup.max_lrs, warmup.warmup_num_steps) == ([0], [LR], WARMUP)

        batches = list(loader)
        rows = self.train(accelerator, engine, optimizer, scheduler, batches[:STEPS])
        accelerator.save_state(tmp_path / "state")
        rest = self.train(accelerator, engine, optimizer, scheduler, batches[STEPS:])
        seen = [torch.cat([accelerator.gather(batch["input_ids"]) for batch in batches[i:i + 2]])
                for i in range(0, len(batches), 2)]
        assert [len(tokens) for tokens in seen] == [8] * STEPS
        expected = train_plainly(gpt2(), seen, Recipe(
            matrices=GPT2_MATRICES, clip=1.0, muon_lr=0.02, adam_lr=LR, betas=(0.8, 0.9), eps=1e-7, weight_decay=0.2,
            schedule=lambda step: (rows + rest)[step][2] / LR))
        for (loss, norm, _), wanted in zip(rows + rest, expected.steps, strict=True):
            assert loss == pytest.approx(wanted.loss, rel=1e-5) and norm == pytest.approx(wanted.norm, rel=1e-4)
        assert rows[0][2] == 0 and rest[-1][2] == LR
        weights = {name: whole(p) for name, p in trainable(engine.module).items()}
        assert_trained_as(engine.module, expected, 1e-4)
        # At stage 3 on rank 0 alone.
        gathered = accelerator.get_state_dict(engine) or weights
        assert all(torch.equal(gathered[name], p) for name, p in weights.items())

        accelerator.free_memory()
        engine, optimizer, scheduler, _ = prepare(accelerator, gpt2(seed=1))
        accelerator.load_state(tmp_path / "state")
        assert self.train(accelerator, engine, optimizer, scheduler, batches[STEPS:]) == rest
        for name, p in trainable(engine.module).items():
            assert torch.equal(whole(p), weights[name]), name

    def train(self, accelerator, engine, optimizer, scheduler, batches):
        """The loop of Accelerate's documentation; (loss over ranks, norm of the gradient, lr) of each step."""
        rows, losses = [], []
        for batch in batches:
            lr = engine.optimizer.param_groups[0]["lr"]
            with accelerator.accumulate(engine):
                loss = engine(**batch).loss
                accelerator.backward(loss)
                losses.append(accelerator.gather(loss.detach()).mean())
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(engine.parameters(), 1.0)
                    rows.append((float(torch.stack(losses).mean()), norm, lr))
                    losses = []
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        return rows

    def test_auto_that_cannot_be_filled_in_is_refused(self):
        accelerator, model = make_accelerator(params={"betas": [0.9, 0.95], "eps": "auto"}), gpt2()
        loader = DataLoader(Tokens(8), batch_size=2)
        # Accelerate's own.
        with pytest.raises(ValueError, match="optimizer.params.eps.*without `auto`"):
            accelerator.prepare(model, DummyOptim(model.parameters()), loader)


SCRIPT = """
import json
import sys
from pathlib import Path

import deepspeed
import torch
from accelerate import Accelerator
from accelerate.utils import DummyOptim, InitProcessGroupKwargs
from deepspeed.accelerator import get_accelerator
from tests.support.models import tiny_gpt, token_batch, token_loss

# Only inference uses this operator, and building it takes a compiler.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
backend = InitProcessGroupKwargs(backend=get_accelerator().communication_backend_name())
accelerator = Accelerator(kwargs_handlers=[backend])
model = tiny_gpt()
model, optimizer = accelerator.prepare(model, DummyOptim(model.parameters(), lr=0.003, weight_decay=0.1))
losses = []
for step in range(5):
    for micro in range(2):
        with accelerator.accumulate(model):
            loss = token_loss(model, token_batch(step, micro, accelerator.process_index))
            losses.append(accelerator.gather(loss.detach()).mean().item())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
if accelerator.is_main_process:
    Path(sys.argv[1]).write_text(json.dumps([sum(losses[i:i + 2]) / 2 for i in range(0, 10, 2)]))
    torch.save(model.module.state_dict(), sys.argv[2])
"""


@pytest.mark.thorough
def test_a_script_that_does_not_know_us_under_accelerates_launcher(tmp_path):
    params = {**MUON, "lr": "auto", "weight_decay": "auto", "eps": 1e-6}
    (tmp_path / "config.json").write_text(json.dumps({
        **ds_config(gas=2, clip=1.0), "gradient_clipping": "auto", "train_batch_size": "auto",
        "optimizer": {"type": "LayerWiseMuon", "params": params}}))
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--use_deepspeed", "--deepspeed_config_file",
         str(tmp_path / "config.json"), "--num_machines", "1", "--num_processes", "2", "--main_process_port",
         str(free_port()), "-m", "ds_layerwise.run", str(tmp_path / "script.py"), str(tmp_path / "losses"),
         str(tmp_path / "weights")],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    expected = train(tiny_gpt, token_batch, token_loss, Recipe(
        matrices=TINY_GPT_MATRICES, world_size=2, gas=2, clip=1.0, muon_lr=0.02, adam_lr=0.003, weight_decay=0.1,
        eps=1e-6), 5)
    assert json.loads((tmp_path / "losses").read_text()) == pytest.approx(expected.losses, rel=1e-5)
    weights = torch.load(tmp_path / "weights")
    for name, value in expected.model_params.items():
        assert relative_error(weights[name], value) < 1e-4, name
