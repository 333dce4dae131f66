"""Hooks of mkdocs: links out of docs/ become names of files; pages for maintainers rank last."""

import re
from typing import Any

#: The section of mkdocs.yml whose pages stand last among what a search finds.
LAST = "For maintainers"
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)[^)]*\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links into the repository by their text and the path; set the rank in a search."""
    if page.parent is not None and page.parent.title == LAST:
        page.meta["search"] = {"boost": 0.1}

    def named(match: re.Match[str]) -> str:
        text, path = match.groups()
        if path == "README.md":
            return f"[{text}](index.md)"
        return f"`{path}`" if text == path else f"{text} (`{path}`)"

    return _OUTSIDE.sub(named, markdown)
