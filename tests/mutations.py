"""Break the package in places that a seed chooses, and count the breaks that its tests catch.

    python -m tests.mutations --seed 1 [--count 40] [--only 3,17] [--minutes 10]

Each break is one small edit of one module: a comparison turned round, ``and`` for ``or``, a ``not`` or a call dropped,
a number moved by one, ``None`` returned. The modules are drawn from all top folders in turn, within a folder by their
size. The tests of the module (``pytest -m MODULE``) run on a copy of the checkout, up to the first that fails, units
first. This is a tool, not a test: it takes an hour or two. Some edits survive because they change nothing that can be
seen; somebody has to look at the survivors.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.house_rules import PACKAGE, Source, sources

ROOT = PACKAGE.parent
_COMPARISONS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in",
                ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is"}
_SUMS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*"}


@dataclass(frozen=True)
class Mutation:
    """An edit: ``text[start:end]`` of a module, in bytes of UTF-8, becomes ``new``."""

    source: Source
    line: int
    start: int
    end: int
    new: str

    @property
    def text(self) -> str:
        """Return the module with the edit."""
        old = self.source.text.encode()
        return (old[:self.start] + self.new.encode() + old[self.end:]).decode()

    def __str__(self) -> str:
        old = self.source.text.encode()[self.start:self.end].decode()
        return f"{self.source.module}:{self.line}: {_on_one_line(old)} -> {_on_one_line(self.new)}"


def _on_one_line(code: str) -> str:
    return re.sub(r"\s+", " ", code)[:70]


def mutations(source: Source) -> Iterator[Mutation]:
    """Yield all edits of a module after which it can still be parsed."""
    starts = [0]
    for line in source.text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))

    def edit(node: ast.AST, new: str) -> Mutation:
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        return Mutation(source, node.lineno, start, end, new)

    def segment(node: ast.AST) -> str:
        return f"({ast.get_source_segment(source.text, node)})"

    docs = {id(doc) for doc, _ in source.docstrings()}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            operator = _COMPARISONS[type(node.ops[0])]
            yield edit(node, f"({segment(node.left)} {operator} {segment(node.comparators[0])})")
        elif isinstance(node, ast.BoolOp):
            operator = " or " if isinstance(node.op, ast.And) else " and "
            yield edit(node, f"({operator.join(map(segment, node.values))})")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield edit(node, f"bool{segment(node.operand)}")
        elif isinstance(node, ast.BinOp) and type(node.op) in _SUMS:
            yield edit(node, f"({segment(node.left)} {_SUMS[type(node.op)]} {segment(node.right)})")
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            yield edit(node, f"({node.value!r} + 1)")
        elif isinstance(node, ast.Return) and not isinstance(node.value, ast.Constant | None):
            yield edit(node, "return None")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and id(node) not in docs:
            yield edit(node, "pass")


def draw(seed: int, count: int) -> list[Mutation]:
    """Return ``count`` edits: the top folders in turn, a module by its size, one of its edits by chance."""
    chance = random.Random(seed)
    by_floor = defaultdict(list)
    for source in sources():
        if source.code and source.path.parent != PACKAGE:
            by_floor[source.module.split(".")[0]].append(source)
    drawn: list[Mutation] = []
    while len(drawn) < count:
        floor = sorted(by_floor)[len(drawn) % len(by_floor)]
        source = chance.choices(by_floor[floor], [len(each.code) for each in by_floor[floor]])[0]
        if possible := [each for each in mutations(source) if each not in drawn]:
            drawn.append(chance.choice(possible))
    return drawn


def caught_by(mutation: Mutation, copy: Path, minutes: float) -> str | None:
    """Return the first test that fails on ``copy`` of the checkout with the edit, "no end", or None."""
    file = copy / mutation.source.path.relative_to(ROOT)
    file.write_text(mutation.text)
    env = {**os.environ, "PYTHONPATH": str(copy)}
    try:
        # The tests of its folder guard a module that no test names as its own.
        for name in reversed(mutation.source.module.split(".")):
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", name]
            command += ["tests/unit", "tests/distributed"]
            result = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, timeout=60 * minutes)
            if result.returncode != pytest.ExitCode.NO_TESTS_COLLECTED:
                break
    except subprocess.TimeoutExpired:
        return "no end"
    finally:
        file.write_text(mutation.source.text)
    if result.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", result.stdout, re.MULTILINE)
    return failed[1] if failed else (result.stdout + result.stderr).strip().splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--only", help="numbers of the edits to try, with commas")
    parser.add_argument("--minutes", type=float, default=10, help="for the tests of one edit")
    args = parser.parse_args()
    chosen = list(enumerate(draw(args.seed, args.count)))
    if args.only:
        chosen = [chosen[int(number)] for number in args.only.split(",")]
    caught = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".venv", "__pycache__", ".*_cache"))
        collect = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/unit", "tests/distributed"]
        env = {**os.environ, "PYTHONPATH": str(copy)}
        if subprocess.run(collect, cwd=copy, env=env, capture_output=True).returncode:
            raise SystemExit("the tests of this checkout cannot be collected, so that every edit would count as caught")
        for number, mutation in chosen:
            test = caught_by(mutation, copy, args.minutes)
            caught += test is not None
            print(f"{number:3} {'survived' if test is None else 'caught  '} {mutation}  {test or ''}", flush=True)
    print(f"{caught} of {len(chosen)} caught")


if __name__ == "__main__":
    main()
