"""The Hugging Face files beside the weights that ``from_pretrained`` needs to read them."""

from __future__ import annotations

from pathlib import Path

from ds_layerwise.errors import LayerWiseError

CONFIG = "config.json"

#: The files of the model, its tokenizer and its processor.
_NAMES = (
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


def find_companions(source: Path, asked: Path | None) -> dict[str, Path]:
    """Find files to lay beside the weights of the checkpoint ``source``, by their names there.

    They come from its own folder, else from its parent, where a Trainer writes them.

    Args:
        asked: a config of any name, or a folder with a ``config.json``, to use instead.

    Raises:
        LayerWiseError: ``asked`` has none.
    """
    config = source / CONFIG
    if asked is not None:
        if asked.is_dir():
            config = asked / CONFIG
        else:
            config = asked
        if not config.is_file():
            raise LayerWiseError(
                f"{config} is no file; give --config a config.json or a folder with one"
            )
    elif not config.is_file():
        config = source.parent / CONFIG
    if not config.is_file():
        return {}
    found = {CONFIG: config}
    for name in _NAMES:
        path = config.with_name(name)
        if path.is_file() and path != config:
            found[name] = path
    return found
