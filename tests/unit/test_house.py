"""The house rules of design.md, as tests: which way imports go, what a module may load, how long things get."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "ds_layerwise"

#: A module imports only from lower floors. One that is not listed here fails until somebody decides where it lives.
FLOORS = {
    "errors": 0, "ambient": 0,
    "output": 0,
    "config": 1, "devices": 1, "layout": 1, "takeover": 1,
    "cost": 2, "placement": 2, "ds_config": 2, "rates": 2,
    "planner": 3, "plan_config": 3,
    "forecast": 4,
    "listing": 4,
    "tensor_cuts": 3, "attention_heads": 4,
    "model_shapes": 5, "table": 5,
    "as_bytes": 5, "autocast": 5, "routing": 5, "orthogonalize": 5, "buffers": 5, "offload": 5, "side_stream": 5,
    "checkpoint": 5,
    "optimizers": 6, "under_way": 6, "writes": 6, "hf_config": 6,
    "owned": 7, "guard": 7, "interrupted": 7, "dry_run": 7,
    "host_group": 7,
    "comm": 8,
    "agreement": 9, "disks": 9, "sync": 9, "param_sync": 9, "state_access": 9, "settings": 9, "tensor_parallel": 9,
    "pipeline": 9, "same_weights": 9, "skipped": 9, "own_groups": 9,
    "zero_base": 10,
    "unfinished": 10, "resumed_groups": 10,
    "zero_state": 11,
    "zero_optimizer": 12,
    "saving": 13, "loading": 13, "sequence_parallel": 13,
    "registration": 13,
    "engine": 14,
    "cli": 15, "run": 15,
}

#: Plans take milliseconds and run anywhere, because these load neither torch nor deepspeed, not even indirectly.
PURE = {"errors", "output", "config", "ds_config", "rates", "layout", "cost", "placement", "planner", "forecast",
        "plan_config", "model_shapes", "table", "hf_config", "dry_run", "listing"}

#: DeepSpeed's internals change with every release; only these know them.
MAY_IMPORT_DEEPSPEED = {"autocast", "comm", "devices", "offload", "side_stream", "tensor_parallel", "sequence_parallel",
                        "pipeline", "zero_base", "skipped", "zero_state", "zero_optimizer", "checkpoint", "saving",
                        "loading", "registration", "engine", "run"}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

FILES = sorted(PACKAGE.rglob("*.py"))
Function = ast.FunctionDef | ast.AsyncFunctionDef


def module_of(path: Path) -> str:
    """The module that stands on a floor: a file, or the package that it lies in; empty for ds_layerwise itself."""
    first = path.relative_to(PACKAGE).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported anywhere in a file, inside functions and for type checkers, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, f"{'.' * node.level}{node.module or ''}.{alias.name}"


def breaches_of_floors(module: str, tree: ast.Module) -> list[str]:
    breaches = []
    for line, name in imports(tree):
        top, *rest = name.split(".")
        if not top:
            breaches.append(f"line {line}: {name} is relative")
        elif top == "ds_layerwise" and module:
            target = rest[0] if rest else ""
            if target.startswith("__"):  # __version__ and the like
                continue
            if target != module and FLOORS.get(target, max(FLOORS.values()) + 1) >= FLOORS[module]:
                breaches.append(f"line {line}: {module} imports {name}, which is not on a lower floor")
    return breaches


def breaches_of_style(tree: ast.Module) -> list[str]:
    breaches = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            breaches.append(f"line {node.lineno}: assert; raise an error of errors.py")
        if isinstance(node, ast.ExceptHandler) and catches_everything(node):
            breaches.append(f"line {node.lineno}: except that catches everything; name what can go wrong")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            breaches.append(f"line {node.lineno}: print, which not every stdout bears; say it with output.py")
        if isinstance(node, Function):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                breaches.append(f"line {node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}")
    return breaches


def catches_everything(handler: ast.ExceptHandler) -> bool:
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(e is None or ast.unparse(e) in ("Exception", "BaseException") for e in caught)


def without_docstring(tree: ast.Module) -> list[str]:
    """Public classes, functions and methods that say nothing about themselves."""
    found = []

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if not isinstance(node, (ast.ClassDef, Function)) or node.name.startswith("_"):
                continue
            accessor = any(isinstance(d, ast.Attribute) and d.attr == "setter" for d in node.decorator_list)
            if not ast.get_docstring(node) and not accessor:
                found.append(f"line {node.lineno}: {prefix}{node.name} has no docstring")
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{node.name}.")

    visit(tree.body, "")
    return found


each_file = pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(PACKAGE)) for path in FILES])


def test_the_package_is_where_these_tests_look():
    assert PACKAGE / "errors.py" in FILES


@each_file
def test_every_module_has_a_floor(path):
    module = module_of(path)
    assert module == "" or module in FLOORS, f"give {module} a floor in FLOORS, and say in design.md what it is for"


@each_file
def test_imports_go_down(path):
    if module_of(path) in FLOORS or module_of(path) == "":
        assert not breaches_of_floors(module_of(path), parse(path))


@each_file
def test_deepspeed_is_imported_where_it_may_be(path):
    lines = [f"line {line}: {name}" for line, name in imports(parse(path)) if name.split(".")[0] == "deepspeed"]
    assert module_of(path) in MAY_IMPORT_DEEPSPEED or not lines


@each_file
def test_style(path):
    assert not [line for line in breaches_of_style(parse(path)) if ": print" not in line or path.name != "output.py"]


@each_file
def test_everything_public_has_a_docstring(path):
    assert not without_docstring(parse(path))


@each_file
def test_files_are_short(path):
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES


@pytest.mark.parametrize("module", ["", *sorted(PURE & {module_of(path) for path in FILES})])
def test_a_pure_module_loads_neither_torch_nor_deepspeed(module):
    name = f"ds_layerwise.{module}" if module else "ds_layerwise"
    code = f"import sys, {name}; print(sorted({{'torch', 'deepspeed'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


@pytest.mark.parametrize("module, code, caught", [
    ("layout", "from ds_layerwise.errors import LayoutError", False),
    ("layout", "def f():\n    from ds_layerwise.planner import plan", True),
    ("layout", "from ds_layerwise import planner", True),
    ("layout", "import ds_layerwise.config", True),
    ("layout", "from ds_layerwise import initialize", True),
    ("layout", "from ds_layerwise import __version__", False),
    ("layout", "from .errors import LayoutError", True),
    ("layout", "from . import errors", True),
    ("optimizers", "from ds_layerwise.optimizers.muon import Muon", False),
    ("", "from ds_layerwise.engine import register", False),
])
def test_floors_catch(module, code, caught):
    assert bool(breaches_of_floors(module, ast.parse(code))) is caught


@pytest.mark.parametrize("code, caught", [
    ("assert True", True),
    ("print(1)", True),
    ("console.print(1)", False),
    ("try:\n    f()\nexcept:\n    g()", True),
    ("try:\n    f()\nexcept Exception as e:\n    g()", True),
    ("try:\n    f()\nexcept (OSError, BaseException):\n    g()", True),
    ("try:\n    f()\nexcept (OSError, ValueError):\n    g()", False),
    ("def f():\n" + "    g()\n" * 59, False),
    ("def f():\n" + "    g()\n" * 60, True),
])
def test_style_catches(code, caught):
    assert bool(breaches_of_style(ast.parse(code))) is caught


def test_docstrings_are_missed():
    code = "class A:\n 'x'\n def f(self): pass\n def _g(self): pass\nclass _B:\n def f(self): pass\ndef h(): 'y'"
    assert without_docstring(ast.parse(code)) == ["line 3: A.f has no docstring"]
