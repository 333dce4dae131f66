"""Hugging Face's Trainer with ranks that share sequences (Ulysses), against a twin on one rank, by value."""

import copy

import deepspeed.comm as dist
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from tests.support.checkpoints import on_rank_0
from tests.support.documents import blocks
from tests.support.harness import DistributedTest, made_once
from tests.support.huggingface import LENGTH, VOCAB, WIDTH, Tokens, config, make_trainer, sharing_sequences, steps_of
from tests.support.reference import trainable
from tests.support.rooms import rooms
from tests.support.training import whole
from tests.support.versions import needs

pytestmark = rooms("sequence", "param_cuts")

SP, STEPS, BATCH = 2, 4, 2
SEQUENCES = range(2 * STEPS * BATCH)


class Masked(Dataset):
    """Sequences whose first labels are masked; in some, all labels of a sequence's first rank."""

    def __init__(self, order):
        self.order, self.tokens = order, Tokens(len(SEQUENCES))

    def __len__(self):
        return len(self.order)

    def __getitem__(self, index):
        number = self.order[index]
        item = self.tokens[number]
        labels = item["input_ids"].clone()
        labels[:number % 7 * 2] = -100
        return {**item, "labels": labels, "position_ids": torch.arange(LENGTH)}


class Twin(Trainer):
    """Trains on whole sequences, with gradients as large as those of ranks that share them.

    They are SP times those of the mean loss: Hugging Face gathers the losses of a sequence's ranks, and the backward
    pass of the gather adds up what comes from all of them.
    """

    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, *_, **__):
        return SP * model(**inputs).loss


def train(folder, stage, adapter, *, order=SEQUENCES, resume=None, **arguments):
    """Return what the Trainer reports of each step, and the trained weights."""
    ds_config = config(stage=stage, params={"ns_method": "standard", "ns_dtype": "fp32"})
    ds_config["zero_optimization"] |= {"stage3_gather_16bit_weights_on_model_save": True,
                                       "memory_efficient_linear": False}
    model, alive = llama(), None
    if resume:
        base = folder / "base"
        on_rank_0(lambda: base.exists() or llama().save_pretrained(base))
        # They fill in what from_pretrained() reads, as long as they live.
        alive = TrainingArguments(str(folder), deepspeed=copy.deepcopy(ds_config), use_cpu=True)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert all(hasattr(p, "ds_id") == (stage == 3 and alive is not None) for p in model.parameters())
    if adapter:
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    trainer = make_trainer(
        folder, ds_config, model=model, dataset=Masked(order), max_steps=STEPS, save_strategy="steps",
        save_steps=STEPS // 2, per_device_train_batch_size=BATCH, train_sampling_strategy="sequential",
        ignore_data_skip=True, **{"max_grad_norm": 0.5, **arguments})
    trainer.train(resume_from_checkpoint=resume)
    del alive
    return steps_of(trainer), {name: whole(p).clone() for name, p in trainable(model).items()}


def llama():
    """A model of two blocks, in which two heads share keys and values."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.all_gather is deprecated:FutureWarning")
class TestSequences(DistributedTest):
    world_size = [2, 4]
    thorough_on = (2,)

    @pytest.fixture
    def twin(self, class_tmpdir, adapter):
        return made_once(class_tmpdir / str(adapter), [1], self.train_twin, adapter=adapter) / "twin.pt"

    @staticmethod
    def train_twin(folder, adapter):
        torch.save(train(folder, 1, adapter, kind=Twin), folder / "twin.pt")

    @needs("deepspeed>=0.19.8", "its loader of sequences gathers a tensor of no axes, which gloo refuses")
    @pytest.mark.parametrize("adapter", [False, True], ids=["whole", "adapter"])
    def test_it_trains_and_resumes_at_another_stage_as_the_twin(self, adapter, twin, tmp_path):
        steps, weights = torch.load(twin)
        at_a_time = dist.get_world_size() // SP
        # A group of ranks takes SP batches in a row, one after the other.
        order = torch.tensor(SEQUENCES).view(-1, SP, at_a_time, BATCH).transpose(1, 2).flatten().tolist()

        def check(stage, **options):
            found_steps, found = train(tmp_path / str(at), stage, adapter, **options, **sharing_sequences(SP),
                                       gradient_accumulation_steps=2 // at_a_time)
            assert len(found_steps) == STEPS
            for found_step, step in zip(found_steps, steps, strict=True):
                wanted = step | {"loss": step["loss"] / SP}
                assert found_step == pytest.approx(wanted, rel=1e-6), (stage, step)
            assert found.keys() == weights.keys()
            for name, value in weights.items():
                torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6, msg=f"{name} at stage {stage}")

        for at in (1, 2, 3) if at_a_time == 1 else (3,):
            check(at, order=order)
            saved = tmp_path / str(at) / f"checkpoint-{STEPS // 2}"
            check(at % 3 + 1, order=order[len(order) // 2:], resume=str(saved))

    @needs("deepspeed>=0.19.8", "its loader of sequences gathers a tensor of no axes, which gloo refuses")
    @pytest.mark.parametrize("adapter", [False])
    def test_the_trainer_of_the_page_has_gradients_of_whole_sequences(self, adapter, twin, tmp_path):
        """The factor of the twin is gone from norms, and from nothing else."""
        steps, _ = torch.load(twin)
        text, = (block.text for block in blocks("python") if "class WholeSequences" in block.text)
        exec(text, names := {"Trainer": Trainer, "SP": SP})
        at_a_time = dist.get_world_size() // SP
        order = torch.tensor(SEQUENCES).view(-1, SP, at_a_time, BATCH).transpose(1, 2).flatten().tolist()
        found, _ = train(
            tmp_path, 3, adapter, order=order, kind=names["WholeSequences"], max_grad_norm=0.5 / SP,
            gradient_accumulation_steps=2 // at_a_time, **sharing_sequences(SP))
        assert found == [pytest.approx({**step, **{key: step[key] / SP for key in ("loss", "grad_norm")}}, rel=1e-5)
                         for step in steps]
