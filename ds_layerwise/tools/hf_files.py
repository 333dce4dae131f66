"""What Hugging Face keeps beside the weights: the files without which ``from_pretrained`` does not
read them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from ds_layerwise.errors import LayerWiseError

CONFIG = "config.json"

#: The model's own, its tokenizer's and its processor's.
_NAMES = (
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


def find_companions(source: Path, asked: Path | None) -> list[Path]:
    """Files to lay beside the weights of the checkpoint ``source``: from its own folder, else from
    the one above, where a Trainer writes them.

    Args:
        asked: a ``config.json``, or a folder with one, to take instead.

    Raises:
        LayerWiseError: there is none at ``asked``, or it is not JSON.
    """
    folder = source if (source / CONFIG).is_file() else source.parent
    if asked is not None:
        folder = asked if asked.is_dir() else asked.parent
        config = asked / CONFIG if asked.is_dir() else asked
        if not config.is_file():
            raise LayerWiseError(
                f"{config} is no file; give --config a config.json or a folder with one"
            )
        return [
            config,
            *(path for name in _NAMES[1:] if (path := folder / name).is_file() and path != config),
        ]
    return (
        [path for name in _NAMES if (path := folder / name).is_file()]
        if (folder / CONFIG).is_file()
        else []
    )


def lay_beside(files: list[Path], folder: Path) -> None:
    """Copy ``files``, of which the first is the model's config whatever it is called, into
    ``folder``.

    Raises:
        LayerWiseError: the config is not JSON.
    """
    for index, path in enumerate(files):
        if index == 0:
            try:
                json.loads(path.read_text(encoding="utf-8"))
            except ValueError as e:
                raise LayerWiseError(f"{path} is no JSON: {e}") from e
        shutil.copyfile(path, folder / (CONFIG if index == 0 else path.name))
