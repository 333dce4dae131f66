"""sentence-transformers' trainer: a sentence and its words reversed belong together.

bash examples/recipes/sentence_transformers/run.sh [arguments of the trainer]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
    models,
)
from transformers import HfArgumentParser

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import material


def main() -> None:
    (args,) = HfArgumentParser(SentenceTransformerTrainingArguments).parse_args_into_dataclasses()
    words = models.Transformer("out/recipes/encoder")
    model = SentenceTransformer(
        modules=[words, models.Pooling(words.get_word_embedding_dimension())]
    )
    lines = list(dict.fromkeys(material.sentences(4096)))
    pairs = {"anchor": lines, "positive": [material.reversed_words(line) for line in lines]}
    trainer = SentenceTransformerTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_dict(pairs),
        loss=losses.MultipleNegativesRankingLoss(model),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model(args.output_dir)
    if trainer.is_world_process_zero():
        history = trainer.state.log_history
        material.write_losses(
            args.output_dir, [entry["loss"] for entry in history if "loss" in entry]
        )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
