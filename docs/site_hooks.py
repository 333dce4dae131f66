"""A hook of mkdocs for links that lead out of docs/: the site has the name of the file instead."""

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)[^)]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace links into the repository by their text and the path."""

    def named(match: re.Match[str]) -> str:
        text, path = match.groups()
        if path == "README.md":
            return f"[{text}](index.md)"
        return f"`{path}`" if text == path else f"{text} (`{path}`)"

    return _OUTSIDE.sub(named, markdown)
