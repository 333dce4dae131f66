"""sentence-transformers' trainer: a sentence and its words reversed belong together.

bash examples/recipes/sentence_transformers/run.sh [arguments of the trainer]
"""

from __future__ import annotations

import sys
from pathlib import Path

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
    material.end(trainer)


if __name__ == "__main__":
    main()
