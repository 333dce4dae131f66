"""TRL's SFT, with and without LoRA, and DPO, as their users write them. Started by run.py."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from datasets import Dataset
from material import sentences, write_figures
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("what", choices=("sft", "sft_lora", "dpo"))
parser.add_argument("--material", type=Path, required=True)
parser.add_argument("--figures", required=True)
parser.add_argument("--out", required=True)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--learning_rate", type=float, required=True)
parser.add_argument("--deepspeed", required=True)
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()

torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.material / "llama"))
tokenizer = AutoTokenizer.from_pretrained(args.material / "llama")
lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
common = dict(output_dir=args.out, deepspeed=args.deepspeed, use_cpu=os.environ.get("DS_ACCELERATOR") == "cpu",
              max_steps=args.steps, learning_rate=args.learning_rate, per_device_train_batch_size=8,
              gradient_accumulation_steps=2, logging_steps=1, save_strategy="no", report_to="none", bf16=False, seed=0,
              lr_scheduler_type="cosine", warmup_steps=2, gradient_checkpointing=False, max_length=64)
if args.what == "dpo":
    prompts = sentences(512)
    data = Dataset.from_dict({"prompt": [p.split()[0] for p in prompts], "chosen": [" " + p for p in prompts],
                              "rejected": [" " + " ".join(reversed(p.split())) for p in prompts]})
    trainer = DPOTrainer(model=model, args=DPOConfig(**common), train_dataset=data, processing_class=tokenizer,
                         peft_config=lora)
else:
    trainer = SFTTrainer(model=model, args=SFTConfig(**common), processing_class=tokenizer,
                         train_dataset=Dataset.from_dict({"text": sentences(1024)}),
                         peft_config=lora if args.what == "sft_lora" else None)
trainer.train()
if trainer.is_world_process_zero():
    write_figures(args.figures, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
torch.distributed.destroy_process_group()
