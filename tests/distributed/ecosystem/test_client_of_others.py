"""Optimizers that Accelerate and Hugging Face's Trainer hand over, where the config names none."""

import pytest
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import InitProcessGroupKwargs
from deepspeed.accelerator import get_accelerator
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import ds_layerwise
from tests.support.checkpoints import masters
from tests.support.harness import DistributedTest
from tests.support.huggingface import Tokens, config, gpt2
from tests.support.rooms import rooms

pytestmark = rooms("client_groups", "engine_hooks")

STEPS = 4


def without_optimizer(**changes):
    given = config(**changes)
    del given["optimizer"]
    return {**given, "layerwise": {}, "gradient_clipping": 0.0}


def alone(batches, lr):
    """The weights after the same batches, of all ranks together, in one process."""
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    # Accelerate steps a schedule once for each process.
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 2 * step))
    for tokens in batches:
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        schedule.step()
    return dict(model.named_parameters())


class TestAccelerate(DistributedTest):
    init_distributed = False

    def test_the_optimizer_and_schedule_of_the_client_arrive(self):
        ds_layerwise.register()
        backend = InitProcessGroupKwargs(backend=get_accelerator().communication_backend_name())
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=without_optimizer()),
                                  kwargs_handlers=[backend])
        model = gpt2()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.004, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        engine, wrapped, schedule, loader = accelerator.prepare(
            model, optimizer, schedule, DataLoader(Tokens(4 * STEPS), batch_size=2))
        seen = []
        for batch in loader:
            tokens = batch["input_ids"]
            accelerator.backward(engine(input_ids=tokens, labels=tokens).loss)
            wrapped.step()
            schedule.step()
            wrapped.zero_grad()
            seen.append(accelerator.gather(tokens))
        assert len(seen) == STEPS and optimizer.param_groups[0]["lr"] == pytest.approx(0.004 / (1 + 2 * STEPS))
        # Its optimizer sees fused projections as they are.
        assert not any(route.parts for route in engine.optimizer.routes.values())
        expected = alone(seen, 0.004)
        for name, value in masters(engine).items():
            torch.testing.assert_close(value, expected[name].detach(), rtol=1e-4, atol=1e-5)


class TestTrainer(DistributedTest):
    init_distributed = False

    def test_the_optimizer_of_its_arguments(self, tmp_path):
        ds_layerwise.register()
        arguments = TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=2, max_steps=3, learning_rate=0.004, report_to=[],
            save_strategy="no", use_cpu=True, deepspeed={**without_optimizer(), "gradient_clipping": "auto"},
            lr_scheduler_type="linear", weight_decay=0.1, disable_tqdm=True)
        trainer = Trainer(model=gpt2(), args=arguments, train_dataset=Tokens(64))
        trainer.train()
        found = trainer.model_wrapped.optimizer
        # The Trainer decays no vectors, and has a group of those.
        assert [group["weight_decay"] for group in found.param_groups] == [0.1, 0.0]
        assert found.param_groups[0]["lr"] == pytest.approx(0.0) and found.step_count == 3
        assert {route.recipe.rule for route in found.routes.values()} == {"torch.optim:AdamW"}
