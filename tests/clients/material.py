"""Training material for the clients, made here because nothing is downloaded: a text, a tokenizer and two small models.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, LlamaConfig, PreTrainedTokenizerFast

CONTEXT = 64

_WORDS = "the a one every cat dog bird child sees hears likes follows red small old quiet house tree river road".split()


def sentences(count: int, seed: int = 0) -> list[str]:
    """Return ``count`` lines that a small model can learn from: each word narrows the next one."""
    random_words = random.Random(seed)
    lines = []
    for _ in range(count):
        words = [random_words.choice(_WORDS[0:4]), random_words.choice(_WORDS[12:16]), random_words.choice(_WORDS[4:8]),
                 random_words.choice(_WORDS[8:12]), random_words.choice(_WORDS[0:4]), random_words.choice(_WORDS[16:])]
        lines.append(" ".join(words) + ".")
    return lines


def make(folder: Path) -> None:
    """Write ``text.txt``, ``valid.txt``, and ``gpt2`` and ``llama``, each a config with a tokenizer of bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text("\n".join(sentences(4000)) + "\n")
    (folder / "valid.txt").write_text("\n".join(sentences(200, seed=1)) + "\n")
    letters = sorted({letter for line in sentences(4000) for letter in line} | {"\n"})
    vocabulary = {text: i for i, text in enumerate(["<pad>", "<eos>", "<unk>", *letters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>",
                                      unk_token="<unk>", model_max_length=CONTEXT)
    wrapped.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    sizes = {"vocab_size": len(vocabulary), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    gpt2 = GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=CONTEXT, resid_pdrop=0.0, embd_pdrop=0.0,
                      attn_pdrop=0.0, **sizes)
    llama = LlamaConfig(hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
                        num_key_value_heads=2, max_position_embeddings=CONTEXT, **sizes)
    for name, config in (("gpt2", gpt2), ("llama", llama)):
        config.save_pretrained(folder / name)
        wrapped.save_pretrained(folder / name)


def write_figures(path: str, losses: list[float], **more: float) -> None:
    """Write a client's report for run.py: its losses in order, and other figures."""
    Path(path).write_text(json.dumps({"losses": losses, **more}))
