"""Small models and data for the recipes, made here: nothing is downloaded.

    python examples/recipes/material.py

trains a language model of 100,000 parameters for the recipes that fine-tune one, which takes half a
minute, and makes an encoder with fresh weights. Into out/recipes/base and out/recipes/encoder go
their weights and tokenizers, as ``from_pretrained`` reads them.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
)

CONTEXT = 64
ARTICLES = ["the", "a", "one", "every"]
ADJECTIVES = ["red", "small", "old", "quiet"]
ANIMALS = ["cat", "dog", "bird", "child"]
VERBS = ["sees", "hears", "likes", "follows"]
PLACES = ["house", "tree", "river", "road"]
WORDS = [*ARTICLES, *ADJECTIVES, *ANIMALS, *VERBS, *PLACES]


def sentences(count: int, seed: int = 0) -> list[str]:
    """Return lines like "the red cat sees one tree." in which the adjective decides the place."""
    draw = random.Random(seed)
    lines = []
    for _ in range(count):
        adjective = draw.randrange(4)
        words = [draw.choice(ARTICLES), ADJECTIVES[adjective], draw.choice(ANIMALS)]
        words += [draw.choice(VERBS), draw.choice(ARTICLES), PLACES[adjective]]
        lines.append(" ".join(words) + ".")
    return lines


def reversed_words(line: str) -> str:
    """Return ``line`` with its words in the opposite order, which fine-tuning teaches."""
    return " ".join(reversed(line.rstrip(".").split())) + "."


def tokenizer_of(letters: bool = True) -> PreTrainedTokenizerFast:
    """Return a tokenizer of the letters of ``sentences``, or of their words."""
    parts = sorted({*"".join(WORDS), " ", ".", "\n"}) if letters else [*WORDS, "."]
    special = ["<pad>", "<eos>", "<unk>", "<cls>", "<mask>"]
    vocabulary = {part: index for index, part in enumerate([*special, *parts])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Split("", "isolated") if letters else pre_tokenizers.Whitespace()
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        cls_token="<cls>",
        mask_token="<mask>",
        model_max_length=CONTEXT,
    )
    wrapped.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return wrapped


def llama(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a Llama of two layers of width 64 with fresh weights."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.eos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def bert(**settings: Any) -> BertConfig:
    """Return the config of a BERT of two layers of width 64 over words, without dropout."""
    return BertConfig(
        vocab_size=len(tokenizer_of(letters=False)),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **settings,
    )


def windows(tokenizer: PreTrainedTokenizerFast, count: int, seed: int = 0) -> Tensor:
    """Return ``(count, CONTEXT)`` tokens of ``sentences``, int64."""
    text = "\n".join(sentences(4 * count, seed))
    tokens = tokenizer(text, truncation=False, verbose=False)["input_ids"]
    return torch.tensor(tokens[: count * CONTEXT]).view(count, CONTEXT)


def images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return ten patterns in noise: float32 images ``(count, 3, 32, 32)``, int64 labels
    ``(count,)``."""
    patterns = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=draw)
    return 0.3 * patterns[labels] + torch.randn(count, 3, 32, 32, generator=draw), labels


class Rows(Dataset):
    """A list of dicts as a dataset."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def arguments(output_dir: str, **options: Any) -> argparse.ArgumentParser:
    """Return a parser for the arguments that run.py gives every recipe.

    Args:
        options: of the parser.
    """
    parser = argparse.ArgumentParser(**options)
    parser.add_argument("--max_steps", type=int, default=60)
    parser.add_argument("--output_dir", default=output_dir)
    parser.add_argument("--resume_from_checkpoint", help="a folder of checkpoints")
    return parser


class Losses:
    """The losses of an engine, means over ranks, one a step, and a checkpoint half way.

    Args:
        args: see :func:`arguments`; a run that is resumed has the losses up to its checkpoint.
    """

    def __init__(self, engine: Any, args: argparse.Namespace) -> None:
        self.engine, self.args = engine, args
        self.values: list[float] = []
        if args.resume_from_checkpoint:
            _, state = engine.load_checkpoint(args.resume_from_checkpoint)
            self.values = state["losses"]

    def add(self, loss: Tensor) -> None:
        """Add ``loss`` of a step that is over."""
        mean = loss.detach().clone().float()
        torch.distributed.all_reduce(mean)
        self.values.append(mean.item() / torch.distributed.get_world_size())
        if len(self.values) == self.args.max_steps // 2:
            self.engine.save_checkpoint(
                f"{self.args.output_dir}/checkpoint-{len(self.values)}",
                client_state={"losses": self.values},
            )

    def end(self) -> None:
        """Write the losses, and leave the other ranks."""
        if torch.distributed.get_rank() == 0:
            write_losses(self.args.output_dir, self.values)
        torch.distributed.destroy_process_group()


def write_losses(folder: str, losses: list[float]) -> None:
    """Write ``losses``, one a step, to ``folder``/losses.json, where run.py looks for them."""
    Path(folder, "losses.json").write_text(json.dumps(losses))


def end(trainer: Trainer) -> None:
    """Save the model of a Trainer that has trained, and its losses, and leave the other ranks."""
    trainer.save_model()
    if trainer.is_world_process_zero():
        history = trainer.state.log_history
        write_losses(
            trainer.args.output_dir, [entry["loss"] for entry in history if "loss" in entry]
        )
    torch.distributed.destroy_process_group()


def main() -> None:
    tokenizer = tokenizer_of()
    model = llama(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    tokens = windows(tokenizer, 2048)
    for step in range(150):
        batch = tokens[torch.arange(32 * step, 32 * step + 32) % len(tokens)]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss {loss.item():.3f}")
    for name, made, letters in (("base", model, True), ("encoder", BertModel(bert()), False)):
        made.save_pretrained(f"out/recipes/{name}")
        tokenizer_of(letters).save_pretrained(f"out/recipes/{name}")


if __name__ == "__main__":
    main()
