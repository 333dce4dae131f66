"""Train a small Llama on bytes with Hugging Face's Trainer; its weights are made here, nothing is
downloaded.

    deepspeed --num_accelerators 2 examples/hf_trainer.py --deepspeed_config ds_configs/hf_auto.json

Only two things are particular to ds_layerwise: the line ``ds_layerwise.register()``, and the
configuration. The Trainer fills in its values "auto" from its arguments. Into --out go its
checkpoints and model/, which ``from_pretrained`` reads.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import deepspeed
import torch
from data import Corpus, load_corpus, training_windows, validation_windows
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

import ds_layerwise
from ds_layerwise.run import leave


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small Llama on bytes with Hugging Face's Trainer."
    )
    parser.add_argument(
        "--data", metavar="PATH", help="a text, or a folder of texts (default: Python's own source)"
    )
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (default: 200)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument(
        "--context", type=int, default=128, help="tokens in a window (default: 128)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the windows")
    parser.add_argument(
        "--save_every", type=int, default=50, help="steps between checkpoints (default: 50)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out/hf_trainer"), help="default: out/hf_trainer"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the last checkpoint in --out"
    )
    parser.add_argument(
        "--local_rank", type=int, default=-1, help=argparse.SUPPRESS
    )  # the launcher passes it
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    if args.deepspeed_config is None:
        parser.error(
            "--deepspeed_config is missing; for example --deepspeed_config ds_configs/hf_auto.json"
        )
    if "LOCAL_RANK" not in os.environ:
        parser.error(
            "start this with the launcher: deepspeed --num_accelerators 2 examples/hf_trainer.py "
            "..."
        )
    return args


class Windows(Dataset):
    """The windows of one part of the corpus, in the form of the Trainer: the model shifts the
    labels itself."""

    def __init__(self, windows: list[Tensor]) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


def training_arguments(args: argparse.Namespace) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(args.out),
        deepspeed=args.deepspeed_config,
        use_cpu=get_accelerator().device_name() == "cpu",
        seed=args.seed,
        max_steps=args.steps,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        adam_beta2=0.95,
        weight_decay=0.1,
        lr_scheduler_type="cosine",
        warmup_steps=args.steps // 10,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=args.save_every,
        save_steps=args.save_every,
        report_to="none",
    )


def make_model(args: argparse.Namespace) -> torch.nn.Module:
    torch.manual_seed(args.seed)
    return AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=256,
            hidden_size=args.width,
            intermediate_size=3 * args.width,
            num_hidden_layers=args.layers,
            num_attention_heads=args.heads,
            max_position_embeddings=args.context,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def datasets(corpus: Corpus, args: argparse.Namespace, num_samples: int) -> tuple[Windows, Windows]:
    options = {"context": args.context - 1}
    train = training_windows(corpus.train, seed=args.seed, first=0, size=num_samples, **options)
    validation = validation_windows(corpus.validation, rank=0, world_size=1, size=1, **options)
    return Windows(list(train)), Windows([window for batch in validation for window in batch])


def main() -> None:
    args = parse_arguments()
    try:
        corpus = load_corpus(args.data, args.context)
    except ValueError as error:
        raise SystemExit(f"hf_trainer.py: {error}") from error

    ds_layerwise.register()
    arguments = training_arguments(args)
    train, validation = datasets(
        corpus, args, args.steps * arguments.train_batch_size * arguments.world_size
    )
    trainer = Trainer(
        model=make_model(args), args=arguments, train_dataset=train, eval_dataset=validation
    )
    trainer.train(resume_from_checkpoint=args.resume)
    trainer.save_model(str(args.out / "model"))
    if trainer.is_world_process_zero():
        print(
            f"done: {trainer.state.global_step} steps; from_pretrained reads {args.out / 'model'}"
        )


if __name__ == "__main__":
    main()
    leave()
