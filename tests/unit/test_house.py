"""The house rules of design.md, one test a rule: each lists the breaches of the whole package."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import pytest

from tests.measure import FILES, MOST, RULES, density, file_table
from tests.support import house_rules
from tests.support.house_rules import PACKAGE, Function, Source, sources
from tests.support.rooms import rooms

pytestmark = rooms("outside")

#: Folders, and files beside them, from the bottom: a module imports only from lower lines. What is not listed here
#: fails until somebody decides where it lives. Inside a folder the order follows from the imports, without a circle.
FLOORS = (
    ("errors", "output", "process_exit"),
    ("instance_patches",),
    ("orthogonalize",),
    ("optimizers",),
    ("config",),
    ("routing",),
    ("plan",),
    ("checkpoint",),
    ("ranks",),
    ("parallel",),
    ("zero",),
    ("engine",),
    ("tools",),
    ("cli", "run"),
)

#: These load neither torch nor deepspeed, not even indirectly, and neither does the package itself.
PURE = {"errors", "output"}

#: DeepSpeed's internals change with every release; only these know them.
MAY_IMPORT_DEEPSPEED = ("checkpoint", "optimizers.devices", "ranks.comm", "ranks.owned.host_memory",
                        "ranks.sync.param_cuts", "tools.links", "tools.verify", "parallel", "zero", "engine", "run")

MAX_AT_THE_TOP = {"files": 8, "folders": 12}

#: Functions of torch that take a dtype and a device from what a script has set, unless they are told.
MAKERS = {"arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones",
          "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"}

SOURCES = sources()

#: Files beside the package whose docstrings open with a subject or an imperative.
PLAIN = ("examples/**/*.py", "tests/**/*.py")


def floor_of(module: str) -> int | None:
    """The line of FLOORS that a module stands on; None if nowhere."""
    return next((i for i, names in enumerate(FLOORS) if module.split(".")[0] in names), None)


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
        package, _, target = name.partition(".")
        if not package:
            breaches.append(f"{module}, line {line}: {name} is relative")
        elif package == "ds_layerwise" and module and not target.startswith("__"):  # __version__ and the like
            here, there = floor_of(module), floor_of(target)
            inside = target.split(".")[0] == module.split(".")[0]
            if here is None or there is None or not (inside or there < here):
                breaches.append(f"{module}, line {line}: imports {name}, which is not on a lower floor")
    return breaches


def breaches_of_strings(tree: ast.Module) -> list[str]:
    """Imports of this package's modules by their name, which no test of floors and circles sees."""
    breaches = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            given = ast.unparse(node.args[0]) if node.args else ""
            if "ds_layerwise" in given or "__name__" in given or "__package__" in given:
                breaches.append(f"line {node.lineno}: {ast.unparse(node)}")
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
    return breaches


def breaches_of_defaults(tree: ast.Module) -> list[str]:
    """Tensors whose dtype or device a script decides, with torch.set_default_dtype or torch.set_default_device."""
    breaches = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{name}" for name in MAKERS}:
            # What counts is int64 wherever it is made.
            needed = {"device"} if ast.unparse(node.func) == "torch.arange" else {"dtype", "device"}
            if missing := needed - {keyword.arg for keyword in node.keywords}:
                breaches.append(f"line {node.lineno}: {ast.unparse(node.func)} without {' and '.join(sorted(missing))}")
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


def in_all(breaches) -> list[str]:
    return [f"{source.module}, {line}" for source in SOURCES for line in breaches(source)]


def test_the_package_is_where_these_tests_look():
    assert PACKAGE / "errors.py" in [source.path for source in SOURCES]


def test_every_module_has_a_floor_and_every_floor_its_modules():
    tops = {source.module.split(".")[0] for source in SOURCES} - {""}
    assert tops == {top for names in FLOORS for top in names}


def test_the_design_lists_every_file_with_its_first_sentence():
    assert "\n".join(file_table(SOURCES)) in FILES.read_text(), "python -m tests.measure --write"


def test_the_top_is_short():
    entries = [path for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    assert sum(path.is_file() for path in entries) <= MAX_AT_THE_TOP["files"]
    assert sum(path.is_dir() for path in entries) <= MAX_AT_THE_TOP["folders"]


def test_every_test_file_says_what_it_guards_and_every_room_is_guarded():
    guarded = set()
    for path in sorted((PACKAGE.parent / "tests").rglob("test_*.py")):
        said = next((node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Assign)
                     and ast.unparse(node.targets[0]) == "pytestmark"), None)
        assert said is not None, f"{path} has no pytestmark = rooms(...)"
        calls = [node for node in ast.walk(said.value)
                 if isinstance(node, ast.Call) and ast.unparse(node.func) == "rooms"]
        assert len(calls) == 1, path
        guarded |= {ast.literal_eval(argument) for argument in calls[0].args}
    modules = {source.path.stem for source in SOURCES} - {"__init__"}
    assert modules - guarded == {"errors"}, "errors are everywhere"


def test_imports_go_down_and_never_in_a_circle():
    assert not [line for source in SOURCES for line in breaches_of_floors(source.module, source.tree)]
    assert not house_rules.circles(house_rules.arrows(SOURCES))


def test_no_module_of_the_package_is_imported_by_a_string():
    def breaches(source: Source) -> list[str]:
        # The public names load on first use.
        return breaches_of_strings(source.tree) if source.module else []

    assert not in_all(breaches)


def test_deepspeed_is_imported_where_it_may_be():
    def breaches(source: Source) -> list[str]:
        if f"{source.module}.".startswith(tuple(f"{name}." for name in MAY_IMPORT_DEEPSPEED)):
            return []
        return [f"line {line}: {name}" for line, name in imports(source.tree) if name.split(".")[0] == "deepspeed"]

    assert not in_all(breaches)


def test_style():
    assert not [line for line in in_all(lambda source: breaches_of_style(source.tree))
                if not (line.startswith("output,") and ": print" in line)]


def test_no_default_of_a_script_decides_what_a_tensor_is():
    assert not in_all(lambda source: breaches_of_defaults(source.tree))


def test_everything_public_has_a_docstring():
    assert not in_all(lambda source: without_docstring(source.tree))


@pytest.mark.parametrize("rule", [*RULES.values(), house_rules.spoilt_formulas], ids=lambda rule: rule.__name__)
def test_no_breaches(rule):
    breaches = rule(SOURCES)
    assert not breaches, "\n".join(breaches)


def test_no_docstring_beside_the_package_and_no_test_opens_as_a_riddle():
    root = PACKAGE.parent
    files = [Source(path, path.read_text()) for pattern in PLAIN for path in sorted(root.glob(pattern))]
    assert {root / "examples/data.py", root / "tests/support/house_rules.py"} <= {source.path for source in files}
    breaches = house_rules.riddles(files) + house_rules.riddles_of_tests(files)
    assert not breaches, "\n".join(breaches)


@pytest.mark.parametrize("what", MOST)
def test_density(what):
    assert density(SOURCES)[what] <= MOST[what]


def test_pure_modules_load_neither_torch_nor_deepspeed():
    names = [f"ds_layerwise.{source.module}".rstrip(".") for source in SOURCES
             if not source.module or source.module.split(".")[0] in PURE]
    code = ("import importlib, sys\n"
            f"for name in {names}:\n"
            "    importlib.import_module(name)\n"
            "    assert not {'torch', 'deepspeed'} & set(sys.modules), name")
    result = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_circles_catch():
    assert not house_rules.circles({"a.b": {"a.c"}, "a.c": {"d"}, "d": set()})
    assert house_rules.circles({"a": {"b"}, "b": {"a"}}) == [["a", "b"], ["a", "b"]]
    # No module is in a circle here, and two folders are.
    assert house_rules.circles({"a.b": {"c.d"}, "c.d": set(), "c.e": {"a.f"}, "a.f": set()}) == [["a", "c"]]


@pytest.mark.parametrize("rule, code", [
    (house_rules.many_branches, "def f():\n" + "    if a and b: pass\n" * 8),
    (house_rules.many_arguments, "class A:\n    def __init__(self, a, b, c, d, e, *, f, g, h): pass"),
    (house_rules.nested_comprehensions, "x = [a for b in c for a in b]"),
    (house_rules.nested_comprehensions, "x = [[a for a in b] for b in c]"),
    (house_rules.riddles, "def f():\n    'What a file holds.'"),
    (house_rules.riddles, "x = 1\n'Whether there is one.'"),
    (house_rules.riddles, "class A:\n    'As a script does.'"),
    (house_rules.wrong_words, "def raise_alike(): pass"),
    (house_rules.spoilt_formulas, "'A rule.\\n\\n==== ==== a    W <- W - u b    W <- W - 2 u\\n==== ===='"),
    (house_rules.spoilt_formulas, "def f():\n    'A rule: v <- b v + g, W <- W - v.'"),
])
def test_rules_catch(rule, code):
    assert len(rule([Source(PACKAGE / "a.py", code)])) == 1
    assert not rule([Source(PACKAGE / "a.py", "def f(a, b):\n    'Return the sum.'\n    return [x for x in (a, b)]")])


@pytest.mark.parametrize("rule, code, caught", [
    (partial(breaches_of_floors, "plan.layout.layout"), "from ds_layerwise.plan.layout import planner", False),
    (partial(breaches_of_floors, "plan.layout.layout"), "import ds_layerwise.checkpoint.record", True),
    (partial(breaches_of_floors, "plan.layout.layout"), "from ds_layerwise import initialize", True),
    (partial(breaches_of_floors, "plan.layout.layout"), "from ds_layerwise import __version__", False),
    (partial(breaches_of_floors, "plan.layout.layout"), "from .errors import LayoutError", True),
    (partial(breaches_of_floors, "nowhere"), "from ds_layerwise.errors import LayoutError", True),
    (partial(breaches_of_floors, ""), "from ds_layerwise.engine.register import register", False),
    (breaches_of_strings, "importlib.import_module(f'{__name__}.registry')", True),
    (breaches_of_strings, "__import__('ds_layerwise')", True),
    (breaches_of_strings, "import_module('transformers')", False),
    (breaches_of_style, "assert True", True),
    (breaches_of_style, "print(1)", True),
    (breaches_of_style, "console.print(1)", False),
    (breaches_of_style, "try:\n    f()\nexcept:\n    g()", True),
    (breaches_of_style, "try:\n    f()\nexcept (OSError, BaseException):\n    g()", True),
    (breaches_of_style, "try:\n    f()\nexcept (OSError, ValueError):\n    g()", False),
    (breaches_of_defaults, "torch.empty(3, dtype=torch.float32)", True),
    (breaches_of_defaults, "torch.zeros((), dtype=torch.float32, device='cpu')", False),
    (breaches_of_defaults, "torch.arange(3, device='cpu')", False),
    (without_docstring, "class A:\n 'x'\n def f(self): pass", True),
    (without_docstring, "class _B:\n def f(self): pass", False),
])
def test_breaches_are_seen(rule, code, caught):
    assert bool(rule(ast.parse(code))) is caught
