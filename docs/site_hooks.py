"""Hooks of mkdocs: links out of docs/ become names of files; pages for maintainers rank last;
options and names with hyphens stay in one piece.
"""

import re
from typing import Any

#: The section of mkdocs.yml whose pages stand last among what a search finds.
LAST = "For maintainers"
_CODE = re.compile(r"<pre>.*?</pre>|<code>[^<]*</code>", re.DOTALL)
#: Longer ones would not fit a phone's line.
_HYPHENED = re.compile(r"(?<![^\s>])(?=[^\s<]*-)[^\s<]{2,24}(?![^\s<])")
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


def on_page_content(html: str, **_: Any) -> str:
    """Mark words of code in text where a browser would break the line after a hyphen."""

    def marked(match: re.Match[str]) -> str:
        if match[0].startswith("<pre>"):
            return match[0]
        return _HYPHENED.sub(r'<span class="hyphened">\g<0></span>', match[0])

    return _CODE.sub(marked, html)
