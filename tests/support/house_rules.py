"""Rules of the house as lists of breaches, for tests/unit/test_house.py and ``python -m tests.measure``."""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "ds_layerwise"
Function = ast.FunctionDef | ast.AsyncFunctionDef

#: Words that tell nothing in a name: the glossary of docs/design.md has the words to use instead.
NOT_NAMES = frozenset({"ambient", "staged", "remaindered", "alike"})
_OPENINGS = re.compile(r"(What|Whether|Which|Who|Where|When|How|Why|By|Of|Those|Its|One|As|That)\b")
_SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass(frozen=True)
class Source:
    """A Python file: its text and its tree."""

    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=str(self.path))

    @property
    def module(self) -> str:
        """Return the dotted name within the package: the folder's for an ``__init__.py``, empty for ds_layerwise
        itself."""
        parts = self.path.relative_to(PACKAGE).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def functions(self) -> Iterator[Function]:
        return (node for node in ast.walk(self.tree) if isinstance(node, Function))

    def docstrings(self) -> Iterator[tuple[ast.Expr, str]]:
        """Yield the docstrings, and the strings below fields and constants, each with its text."""
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Module, ast.ClassDef, Function)):
                for statement in node.body:
                    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and isinstance(
                            statement.value.value, str):
                        yield statement, statement.value.value

    @cached_property
    def code(self) -> list[tokenize.TokenInfo]:
        """Return the tokens that are code: no comments, no docstrings, no layout."""
        inside = {line for doc, _ in self.docstrings() for line in range(doc.lineno, (doc.end_lineno or 0) + 1)}
        return [token for token in tokenize.generate_tokens(io.StringIO(self.text).readline)
                if token.type not in _SKIPPED and not (token.type == tokenize.STRING and token.start[0] in inside)]

    def code_lines(self) -> list[str]:
        """Return the lines with code on them, without their indentation."""
        lines = self.text.splitlines()
        numbers = {line for token in self.code for line in range(token.start[0], token.end[0] + 1)}
        return [lines[number - 1].strip() for number in sorted(numbers)]


def sources(root: Path = PACKAGE) -> list[Source]:
    """Return all Python files below ``root``, in order of their paths."""
    return [Source(path, path.read_text()) for path in sorted(root.rglob("*.py"))]


def branches(function: Function) -> int:
    """Count the branches of a function: ifs, loops, conditions of either kind, handlers, comprehensions."""
    count = 0
    for node in ast.walk(function):
        if isinstance(node, (ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.match_case)):
            count += 1
        elif isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
    return count


def many_branches(files: Iterable[Source], most: int = 15) -> list[str]:
    return [f"{source.module}: {function.name} has {branches(function)} branches, at most {most}"
            for source in files for function in source.functions() if branches(function) > most]


def many_arguments(files: Iterable[Source], most: int = 7) -> list[str]:
    """List constructors, written or made by ``dataclass``, with more arguments than ``most``."""
    breaches = []
    for source in files:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef) and (count := _arguments(node)) > most:
                breaches.append(f"{source.module}: {node.name} takes {count} arguments, at most {most}")
    return breaches


def _arguments(cls: ast.ClassDef) -> int:
    for node in cls.body:
        if isinstance(node, Function) and node.name == "__init__":
            args = node.args
            return len(args.posonlyargs) + len(args.args) + len(args.kwonlyargs) - 1
    return 0


def full_folders(files: Iterable[Source], most: int = 12) -> list[str]:
    counts = Counter(source.path.parent for source in files if source.path.name != "__init__.py")
    return [f"{folder.relative_to(PACKAGE)} has {count} files, at most {most}"
            for folder, count in counts.items() if count > most]


def nested_comprehensions(files: Iterable[Source]) -> list[str]:
    """List comprehensions with two loops, or with another comprehension in them."""
    kinds = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    return [f"{source.module}: line {node.lineno}: a comprehension in a comprehension"
            for source in files for node in ast.walk(source.tree)
            if isinstance(node, kinds) and (len(node.generators) > 1 or any(
                isinstance(inner, kinds) for inner in ast.walk(node) if inner is not node))]


def riddles(files: Iterable[Source]) -> list[str]:
    """List docstrings whose first word is neither the subject nor an imperative."""
    return [f"{source.path.relative_to(PACKAGE.parent)}, line {doc.lineno}: {text.splitlines()[0][:60]}"
            for source in files for doc, text in source.docstrings() if _OPENINGS.match(text)]


def riddles_of_tests(files: Iterable[Source]) -> list[str]:
    """List tests whose name opens as no docstring may."""
    breaches = []
    for source in files:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                if _OPENINGS.match(node.name.removeprefix("test_").replace("_", " ").capitalize()):
                    breaches.append(f"{source.path.relative_to(PACKAGE.parent)}, line {node.lineno}: {node.name}")
    return breaches


def spoilt_formulas(files: Iterable[Source]) -> list[str]:
    """List tables and formulas in docstrings that run on as if they were sentences."""
    breaches = []
    for source in files:
        for doc, text in source.docstrings():
            for paragraph in inspect.cleandoc(text).split("\n\n"):
                lines = paragraph.splitlines()
                if any("====" in line and set(line) > {"=", " "} for line in lines):
                    breaches.append(f"{source.module}: line {doc.lineno}: a table that is no table: {lines[0][:60]}")
                elif not paragraph.startswith("    ") and paragraph.count(" <- ") > 1:
                    breaches.append(f"{source.module}: line {doc.lineno}: give each formula a line: {lines[0][:60]}")
    return breaches


def names_twice(files: Iterable[Source]) -> list[str]:
    counts = Counter(source.path.stem for source in files if source.path.name != "__init__.py")
    return [f"{name} is the name of {count} files" for name, count in counts.items() if count > 1]


def wrong_words(files: Iterable[Source]) -> list[str]:
    """List names of modules, classes, functions and arguments with a word in them that the glossary replaces."""
    breaches = []
    for source in files:
        names = [(0, source.path.stem)]
        for node in ast.walk(source.tree):
            if isinstance(node, (ast.ClassDef, Function)):
                names.append((node.lineno, node.name))
            elif isinstance(node, ast.arg):
                names.append((node.lineno, node.arg))
        for line, name in names:
            words = re.findall(r"[A-Z]?[a-z]+", name)
            if bad := NOT_NAMES & {word.lower() for word in words}:
                breaches.append(f"{source.module}: line {line}: {name}: say something else for {min(bad)}")
    return breaches


def arrows(files: Iterable[Source]) -> dict[str, set[str]]:
    """Return by module the modules of the package that it imports, or names in a string as
    ``ds_layerwise.folder.module``."""
    files = list(files)
    modules = {source.module for source in files if source.path.name != "__init__.py"}
    imported: dict[str, set[str]] = {}
    for source in files:
        there = imported.setdefault(source.module, set())
        for node in ast.walk(source.tree):
            for name in _names_in(node):
                while name and name not in modules:
                    name = name.rpartition(".")[0]
                there.add(name)
        there -= {"", source.module}
    return imported


def _names_in(node: ast.AST) -> list[str]:
    prefix = "ds_layerwise."
    if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(prefix):
        return [f"{node.module}.{alias.name}"[len(prefix):] for alias in node.names]
    if isinstance(node, ast.Import):
        return [alias.name[len(prefix):] for alias in node.names if alias.name.startswith(prefix)]
    return []


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """List the circles of modules, and of the entries of each folder, that import each other."""
    folders = {module[:i] for module in graph for i in [0, *(m.start() for m in re.finditer(r"\.", module))]}
    circles_found = [] if (circle := _circle(graph)) is None else [circle]
    for folder in sorted(folders):
        inside = f"{folder}." if folder else ""
        floors: dict[str, set[str]] = {}
        for module, there in graph.items():
            if module.startswith(inside):
                entry = module[len(inside):].split(".")[0]
                targets = {each[len(inside):].split(".")[0] for each in there if each.startswith(inside)}
                floors.setdefault(entry, set()).update(targets - {entry})
        if (circle := _circle(floors)) is not None:
            circles_found.append([f"{inside}{entry}" for entry in circle])
    return circles_found


def _circle(graph: dict[str, set[str]]) -> list[str] | None:
    done: set[str] = set()

    def walk(node: str, path: list[str]) -> list[str] | None:
        if node in path:
            return path[path.index(node):]
        if node in done:
            return None
        for target in sorted(graph.get(node, ())):
            if (found := walk(target, [*path, node])) is not None:
                return found
        done.add(node)
        return None

    return next((found for node in sorted(graph) if (found := walk(node, [])) is not None), None)
