"""The size, the density and the files of the package, for docs/design*.md: ``python -m tests.measure [--write]``.

Code tokens are Python's own, without comments, docstrings, indentation and ends of lines. Branches are counted by
tests/support/house_rules.py.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter

from tests.support import house_rules
from tests.support.house_rules import PACKAGE, Source, sources

DESIGN = PACKAGE.parent / "docs" / "design.md"
FILES = PACKAGE.parent / "docs" / "design_files.md"
_SIZE, _FILES = ("<!-- size: python -m tests.measure --write -->", "<!-- files: python -m tests.measure --write -->")
_END = "<!-- end -->"

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

#: The density of code, with bounds.
MOST = {
    "characters a line of code, without indentation": 36,
    "lines beyond 100 columns": 0,
    "packed assignments per 1,000 lines of code": 3,
    "comprehensions per 1,000 lines of code": 25,
    "conditional expressions per 1,000 lines of code": 12,
}

#: Rules without a breach.
RULES = {
    "functions with more than 15 branches": house_rules.many_branches,
    "constructors with more than 7 arguments": house_rules.many_arguments,
    "folders with more than 12 files": house_rules.full_folders,
    "nested comprehensions": house_rules.nested_comprehensions,
    "docstrings that open with What, Which, Who or the like": house_rules.riddles,
    "names with a word that the glossary replaces": house_rules.wrong_words,
    "basenames that stand twice": house_rules.names_twice,
}


def density(files: list[Source]) -> dict[str, float]:
    """Return the numbers that ``MOST`` bounds, for all ``files`` together."""
    lines = [line for source in files for line in source.code_lines()]
    nodes = [node for source in files for node in ast.walk(source.tree)]
    a_thousand = 1000 / len(lines)
    counts = (
        sum(map(len, lines)) / len(lines),
        sum(len(line) > 100 for source in files for line in source.text.splitlines()),
        a_thousand * sum(map(_is_packed, nodes)),
        a_thousand * sum(isinstance(node, _COMPREHENSIONS) for node in nodes),
        a_thousand * sum(isinstance(node, ast.IfExp) for node in nodes),
    )
    return {what: round(count, 1) for what, count in zip(MOST, counts, strict=True)}


def _is_packed(node: ast.AST) -> bool:
    return (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
            and isinstance(node.targets[0], ast.Tuple))


def size_table(files: list[Source]) -> list[str]:
    """Return the tokens by folder, and the density of the whole, as a table."""
    tokens: Counter[str] = Counter()
    for source in files:
        tokens[source.module.split(".")[0] or "__init__"] += len(source.code)
    table = ["| code tokens | |", "|---|---:|"]
    table += [f"| {name} | {count:,} |" for name, count in sorted(tokens.items())]
    table += [f"| **all** | **{sum(tokens.values()):,}** |", "", "| density | is | at most |", "|---|---:|---:|"]
    table += [f"| {what} | {count:g} | {MOST[what]} |" for what, count in density(files).items()]
    return table + [f"| {name} | {len(rule(files))} | 0 |" for name, rule in RULES.items()]


def file_table(files: list[Source]) -> list[str]:
    """Return every file with the first sentence of its docstring, folder by folder."""
    table, folder = [], None
    for source in sorted(files, key=lambda each: (each.path.parent, each.path.name != "__init__.py", each.path)):
        doc = " ".join((ast.get_docstring(source.tree) or "").split("\n\n")[0].split())
        if source.path.parent != folder:
            folder = source.path.parent
            table += ["", f"**{folder.relative_to(PACKAGE.parent)}/**" + (f": {doc}" if folder != PACKAGE else ""), ""]
        if source.path.name != "__init__.py":
            table.append(f"* `{source.path.name}`: {doc}")
    return table[1:]


def written(text: str, mark: str, lines: list[str]) -> str:
    """Return ``text`` with ``lines`` between ``mark`` and the end of its part."""
    before, _, rest = text.partition(mark)
    return "\n".join([before + mark, "", *lines, "", _END + rest.partition(_END)[2]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="put the tables into docs/design.md and design_files.md")
    args = parser.parse_args()
    files = sources()
    if args.write:
        DESIGN.write_text(written(DESIGN.read_text(), _SIZE, size_table(files)))
        FILES.write_text(written(FILES.read_text(), _FILES, file_table(files)))
    else:
        print("\n".join(size_table(files)))


if __name__ == "__main__":
    main()
