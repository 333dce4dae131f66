"""Hugging Face's Trainer on a small model with ``ds_configs/hf_auto.json``, and the same training by the oracle."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import deepspeed.comm as dist
import torch
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from torch.distributed.nn import functional
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import ds_layerwise
from tests.support.reference import train

AUTO, FINE_TUNE = (json.loads((Path(__file__).parents[2] / "ds_configs" / f"{name}.json").read_text())
                   for name in ("hf_auto", "hf_finetune"))

WIDTH, VOCAB, LENGTH = 32, 64, 16

#: Views of the matrices in GPT-2's linear layers, which hold (in, out); one of them is queries, keys and values.
GPT2_MATRICES = {f"transformer.h.{i}.{name}.weight": view for i in range(2) for name, view in (
    ("attn.c_attn", (3, WIDTH, WIDTH)), ("attn.c_proj", (1, WIDTH, WIDTH)), ("mlp.c_fc", (1, WIDTH, 4 * WIDTH)),
    ("mlp.c_proj", (1, 4 * WIDTH, WIDTH)))}


def gpt2(dropout=0.0, seed=0):
    """Return a model of two blocks, with one matrix for the embedding and the head."""
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=WIDTH, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout))
    # The name of the class does not tell the Trainer the type of loss: it would divide by the number of unshifted
    # labels.
    model.loss_type = "ForCausalLM"
    return model


class Tokens(Dataset):
    """Sequences that count up. Step and first number of each depend on its index alone."""

    def __init__(self, size, first=0):
        self.size, self.first = size, first

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        start, stride = torch.randint(1, VOCAB, (2,), generator=torch.Generator().manual_seed(self.first + index))
        tokens = (start + stride % 3 * torch.arange(LENGTH)) % VOCAB
        return {"input_ids": tokens, "labels": tokens}


def config(*, stage=1, params=None, base=AUTO, **changes):
    """Return ``base`` with another stage, other ``optimizer.params`` and other top-level sections."""
    changed = {**copy.deepcopy(base), **changes}
    changed["zero_optimization"]["stage"] = stage
    changed["optimizer"]["params"].update(params or {})
    return changed


def make_trainer(folder, ds_config, *, model=None, size=4096, dataset=None, callbacks=None, kind=Trainer, **arguments):
    """Return a Trainer that reports every step and saves nothing, unless ``arguments`` say otherwise."""
    ds_layerwise.register()
    defaults = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 3e-3,
                "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
                "use_cpu": get_accelerator().device_name() == "cpu"}
    return kind(model=model or gpt2(), train_dataset=dataset or Tokens(size), eval_dataset=Tokens(8, first=10**6),
                callbacks=callbacks,
                args=TrainingArguments(output_dir=str(folder), deepspeed=ds_config, **{**defaults, **arguments}))


def sharing_sequences(size):
    """Return the arguments of a Trainer in which ``size`` ranks share each sequence (Ulysses).

    The groups and the attention of an earlier one in this process are forgotten: DeepSpeed would refuse to make groups
    again, and exchange heads twice.
    """
    vars(functional)["dist"] = _SourcesInGroup()
    parallel_state_sp._SEQUENCE_PARALLEL_GROUP = parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP = None
    ALL_ATTENTION_FUNCTIONS._local_mapping.pop("sdpa", None)
    return {"parallelism_config": ParallelismConfig(
        sp_backend="deepspeed", sp_size=size, dp_shard_size=dist.get_world_size() // size,
        sp_handler=DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"))}


class _SourcesInGroup:
    """``torch.distributed`` with a ``scatter`` whose source is a rank of the group.

    The differentiable all-to-all of torch gives it such a rank on gloo, where ``scatter`` expects a rank of the world:
    the loss of all sequences but the first would be an error.
    """

    def __getattr__(self, name):
        return getattr(torch.distributed, name)

    @staticmethod
    def scatter(received, sent, source, group):
        """Receive from ``source`` what it has sent to this rank."""
        torch.distributed.scatter(received, sent, group=group, group_src=source)


def steps_of(trainer):
    """Return the Trainer's report of each training step."""
    return [{key: row[key] for key in ("step", "loss", "grad_norm", "learning_rate")}
            for row in trainer.state.log_history if "loss" in row]


class Batches(TrainerCallback):
    """Collect the inputs of this rank's model in training, one list a step."""

    def __init__(self, model):
        self.steps = []
        model.register_forward_pre_hook(self._see, with_kwargs=True)

    def on_step_begin(self, *_, **__):
        """Begin a list: the Trainer calls this before the first micro-batch of a step."""
        self.steps.append([])

    def _see(self, module, args, kwargs):
        if module.training:
            self.steps[-1].append(kwargs["input_ids"])

    def of_all_ranks(self):
        """Return one tensor a step, with the sequences of all micro-batches and ranks."""
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self.steps)
        return [torch.cat([tokens for of_rank in step for tokens in of_rank]) for step in zip(*everyone, strict=True)]


def train_plainly(model, batches, recipe):
    """Train with the oracle, which takes a step's whole batch at once: no ranks, no micro-batches."""
    return train(lambda: model, lambda step, micro, rank: batches[step],
                 lambda module, tokens: module(input_ids=tokens, labels=tokens).loss, recipe, len(batches))
