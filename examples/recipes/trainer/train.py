"""transformers' Trainer on four tasks: language modelling, images, translation, named entities.

    bash examples/recipes/trainer/run.sh lm|image|translation|ner [arguments of TrainingArguments]

The models are small and made here. Only the file that ``--deepspeed`` names is particular to
ds_layerwise.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers
from transformers import HfArgumentParser, Trainer, TrainingArguments

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import material


def language_model() -> tuple[torch.nn.Module, list[dict]]:
    tokenizer = material.tokenizer_of()
    rows = material.windows(tokenizer, 2048)
    return material.llama(tokenizer), [{"input_ids": row, "labels": row} for row in rows]


def image_classifier() -> tuple[torch.nn.Module, list[dict]]:
    config = transformers.ViTConfig(
        image_size=32,
        patch_size=8,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_labels=10,
        hidden_dropout_prob=0.0,
    )
    pixels, labels = material.images(2048, seed=1)
    rows = [{"pixel_values": p, "labels": k} for p, k in zip(pixels, labels, strict=True)]
    return transformers.ViTForImageClassification(config), rows


def translator() -> tuple[torch.nn.Module, list[dict]]:
    tokenizer = material.tokenizer_of(letters=False)
    config = transformers.T5Config(
        vocab_size=len(tokenizer),
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=tokenizer.pad_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    lines = material.sentences(2048)
    into = [material.reversed_words(line) for line in lines]
    rows = [
        {"input_ids": torch.tensor(source), "labels": torch.tensor(target)}
        for source, target in zip(
            tokenizer(lines)["input_ids"], tokenizer(into)["input_ids"], strict=True
        )
    ]
    return transformers.T5ForConditionalGeneration(config), rows


def tagger() -> tuple[torch.nn.Module, list[dict]]:
    """Return a model for tags of animals and places; an animal after "old" has no tag."""
    tokenizer = material.tokenizer_of(letters=False)
    rows = []
    for line in material.sentences(2048):
        words = line.rstrip(".").split()
        tags = [1 if w in material.ANIMALS and words[1] != "old" else 0 for w in words]
        tags = [2 if w in material.PLACES else tag for w, tag in zip(words, tags, strict=True)]
        ids = tokenizer(" ".join(words))["input_ids"]
        rows.append({"input_ids": torch.tensor(ids), "labels": torch.tensor(tags)})
    return transformers.BertForTokenClassification(material.bert(num_labels=3)), rows


TASKS = {
    "lm": language_model,
    "image": image_classifier,
    "translation": translator,
    "ner": tagger,
}


def main() -> None:
    parser = HfArgumentParser(TrainingArguments)
    parser.add_argument("--task", choices=TASKS, required=True)
    args, known = parser.parse_args_into_dataclasses()
    transformers.set_seed(args.seed)
    model, rows = TASKS[known.task]()
    trainer = Trainer(model=model, args=args, train_dataset=material.Rows(rows))
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    material.end(trainer)


if __name__ == "__main__":
    main()
