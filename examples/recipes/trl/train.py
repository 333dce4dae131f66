"""TRL's SFT, DPO, GRPO and Reward trainers, with the whole model or with peft's adapters.

    python examples/recipes/material.py
    bash examples/recipes/trl/run.sh sft|dpo|grpo|reward [arguments of the trainer]

``--adapter lora`` and ``--adapter dora`` train an adapter.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import deepspeed
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForSequenceClassification, AutoTokenizer, HfArgumentParser

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import material

TASKS = {"sft": "SFT", "dpo": "DPO", "grpo": "GRPO", "reward": "Reward"}


def rows_of(task: str) -> Dataset:
    """Return data that teach the model to say its sentences backwards, or, by GRPO, to use many an
    e."""
    lines = material.sentences(512, seed=2)
    backwards = [material.reversed_words(line) for line in lines]
    if task == "sft":
        return Dataset.from_dict({"text": backwards})
    if task == "grpo":
        return Dataset.from_dict({"prompt": [line.split()[0] for line in lines]})
    chosen, rejected = backwards, lines
    if task == "reward":
        return Dataset.from_dict({"chosen": chosen, "rejected": rejected})
    return Dataset.from_dict(
        {
            "prompt": [line.split()[0] + " " for line in chosen],
            "chosen": [line.split(maxsplit=1)[1] for line in chosen],
            "rejected": [line.split(maxsplit=1)[1] for line in rejected],
        }
    )


def letters(completions: list[str], **_: object) -> list[float]:
    """Return the share of letters e of each completion."""
    return [text.count("e") / max(1, len(text)) for text in completions]


def main() -> None:
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--task", choices=TASKS, required=True)
    first.add_argument("--adapter", choices=("lora", "dora"))
    first.add_argument("--model_name_or_path", default="out/recipes/base")
    known, rest = first.parse_known_args()
    task = known.task
    (args,) = HfArgumentParser(getattr(trl, f"{TASKS[task]}Config")).parse_args_into_dataclasses(
        rest
    )
    # On a CPU Accelerate joins the ranks without DeepSpeed, which at stage 3 counts them when the
    # model is read.
    deepspeed.init_distributed()
    adapter = None
    if known.adapter:
        adapter = LoraConfig(
            r=8,
            lora_alpha=16,
            target_modules="all-linear",
            use_dora=known.adapter == "dora",
            task_type="SEQ_CLS" if task == "reward" else "CAUSAL_LM",
        )
    model = known.model_name_or_path
    tokenizer = AutoTokenizer.from_pretrained(model)
    more = {"reward_funcs": letters} if task == "grpo" else {}
    if task == "reward":
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    trainer = getattr(trl, f"{TASKS[task]}Trainer")(
        model=model,
        args=args,
        train_dataset=rows_of(task),
        processing_class=tokenizer,
        peft_config=adapter,
        **more,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    if trainer.is_world_process_zero():
        key, history = "reward" if task == "grpo" else "loss", trainer.state.log_history
        losses = [entry[key] for entry in history if key in entry]
        if task == "grpo":
            losses = [1 - reward for reward in losses]
        material.write_losses(args.output_dir, losses)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
