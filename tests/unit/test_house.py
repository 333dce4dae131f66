"""The house rules of design.md, as tests: which way imports go, what a module may load, how long things get."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.rooms import rooms

pytestmark = rooms("outside")

PACKAGE = Path(__file__).parents[2] / "ds_layerwise"

#: Folders, and files beside them, from the bottom: a module imports only from lower lines. What is not listed here
#: fails until somebody decides where it lives.
FLOORS = (
    ("errors", "output"),
    ("recipes",),
    ("config",),
    ("schema",),
    ("plan",),
    ("routing", "orthogonalize", "checkpoint"),
    ("optimizers",),
    ("ranks", "tools"),
    ("parallel",),
    ("zero",),
    ("engine",),
    ("cli", "run"),
)

#: The same inside each folder.
INSIDE = {
    "recipes": ("bits settings newton_schulz", "conditions monitor recipe", "kept",
                "adafactor any_torch elementwise kronecker norm_groups param_keys parts qk_clip "
                "update_hooks width",
                "client orthogonalized", "adamuon muon namo normuon polargrad scion shampoo soap", "registry",
                "overrides presets"),
    "plan": ("config_file reduction shards together", "ds_config layout links matching owners routes",
             "by_kind drafts hosting kept listing rates run_config", "rows ways", "planner rounds", "cost", "forecast",
             "link_fit model_file prediction tensor_cuts", "report"),
    "routing": ("held tensor_marks", "facts heads kernels", "output_heads parts", "attention rules"),
    "orthogonalize": ("batching norms parts symmetric", "newton_schulz", "spectral tensor_shards"),
    "checkpoint": ("manifest plain record", "keeping names reshard safe_load", "regular",
                   "aside beside pipeline universal", "folder one_file sharded tags", "untrained"),
    "optimizers": ("devices param_groups remainders rounding rule update_hooks", "decay",
                   "adafactor client_object elementwise kronecker orthogonalized probe",
                   "adamuon muon namo normuon polargrad probe_checks scion shampoo soap", "any_torch",
                   "client registry"),
    "ranks": ("buffers host_group host_memory in_flight leaving profiling scaled side_stream writes",
              "kept_states remaindered sums update_sets", "watch", "comm owned",
              "agreement disks nodes own_groups same_weights", "wires", "exchange link_times",
              "bucket_order measured_links param_sync", "sync"),
    "tools": ("companions contents hf_model picture to_universal", "consolidate dry_run verify", "compare"),
    "parallel": ("pipeline sequence tensor",),
    "zero": ("ambient autocast gradient_share in_vain interrupted largest_logits loss_scaling offloading one_file "
             "plain_step "
             "resumed_groups save settings sharded state_access takeover", "attention_hook guard", "attention_logits",
             "engine_protocol planned products unfinished", "decision",
             "before_update first_step load reports skipped start_up update", "checkpointing", "states_outside",
             "optimizer", "param_map"),
    "engine": ("as_bytes last_words lookup scheduler_state shared_memory", "contract model_checks own_overrides "
               "snapshot",
               "loading patches reading reference saving schedules", "at_exit", "wraps", "register"),
}

#: Plans take milliseconds and run anywhere, because these load neither torch nor deepspeed, not even indirectly.
PURE = {"errors", "output", "recipes", "config", "schema", "plan"}

#: DeepSpeed's internals change with every release; only these know them.
MAY_IMPORT_DEEPSPEED = {"checkpoint", "optimizers.devices", "ranks.comm", "ranks.host_memory", "ranks.link_times",
                        "ranks.measured_links", "ranks.side_stream", "tools.verify", "parallel",
                        "zero", "engine", "run"}

MAX_AT_THE_TOP = {"files": 8, "folders": 11}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

#: Functions of torch that take a dtype and a device from what a script has set, unless they are told.
MAKERS = {"arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones",
          "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"}

FILES = sorted(PACKAGE.rglob("*.py"))
Function = ast.FunctionDef | ast.AsyncFunctionDef


def module_of(path: Path) -> str:
    """The dotted name of a file within the package; the folder's for an ``__init__.py``, empty for ds_layerwise."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floor_of(module: str) -> tuple[int, int] | None:
    """Where a module stands: its line in FLOORS, and in its folder's; -1 for a folder itself. None if nowhere."""
    top, _, inner = module.partition(".")
    outer = next((i for i, names in enumerate(FLOORS) if top in names), None)
    if outer is None or not inner:
        return None if outer is None else (outer, -1)
    inside = next((i for i, names in enumerate(INSIDE.get(top, ())) if inner in names.split()), None)
    return None if inside is None else (outer, inside)


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
        package, _, target = name.partition(".")
        if not package:
            breaches.append(f"line {line}: {name} is relative")
        elif package == "ds_layerwise" and module and not target.startswith("__"):  # __version__ and the like
            if (here := floor_of(module)) is None or not stands_below(target, module, here):
                breaches.append(f"line {line}: {module} imports {name}, which is not on a lower floor")
    return breaches


def stands_below(target: str, module: str, here: tuple[int, int]) -> bool:
    """Whether ``target``, a module or a name in one, is lower than ``module``."""
    while target and (there := floor_of(target)) is None:
        target = target.rpartition(".")[0]
    if not target:
        return False
    if target.split(".")[0] == module.split(".")[0]:
        return there[1] != -1 and there < here
    return there[0] < here[0]


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


each_file = pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(PACKAGE)) for path in FILES])


def test_the_package_is_where_these_tests_look():
    assert PACKAGE / "errors.py" in FILES


@each_file
def test_every_module_has_a_floor(path):
    module = module_of(path)
    assert module == "" or floor_of(module), f"give {module} a floor, and say in design.md what it is for"


def test_every_floor_has_its_modules():
    modules = {module_of(path) for path in FILES} - {""}
    listed = {f"{top}.{inner}" for top, lines in INSIDE.items() for line in lines for inner in line.split()}
    assert listed | {top for names in FLOORS for top in names} == modules


def test_the_top_is_short():
    entries = [path for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    assert sum(path.is_file() for path in entries) <= MAX_AT_THE_TOP["files"]
    assert sum(path.is_dir() for path in entries) <= MAX_AT_THE_TOP["folders"]


def test_every_test_file_says_what_it_guards_and_every_room_is_guarded():
    guarded = set()
    for path in sorted((PACKAGE.parent / "tests").rglob("test_*.py")):
        said = next((node for node in parse(path).body if isinstance(node, ast.Assign)
                     and ast.unparse(node.targets[0]) == "pytestmark"), None)
        assert said is not None, f"{path} has no pytestmark = rooms(...)"
        calls = [node for node in ast.walk(said.value)
                 if isinstance(node, ast.Call) and ast.unparse(node.func) == "rooms"]
        assert len(calls) == 1, path
        guarded |= {ast.literal_eval(argument) for argument in calls[0].args}
    modules = {path.stem for path in FILES} - {"__init__"}
    assert modules - guarded == {"errors"}, "errors are everywhere"


@each_file
def test_imports_go_down(path):
    assert not breaches_of_floors(module_of(path), parse(path))


@each_file
def test_deepspeed_is_imported_where_it_may_be(path):
    lines = [f"line {line}: {name}" for line, name in imports(parse(path)) if name.split(".")[0] == "deepspeed"]
    module = module_of(path)
    assert {module, module.split(".")[0]} & MAY_IMPORT_DEEPSPEED or not lines


@each_file
def test_style(path):
    assert not [line for line in breaches_of_style(parse(path)) if ": print" not in line or path.name != "output.py"]


@each_file
def test_no_default_of_a_script_decides_what_a_tensor_is(path):
    assert not breaches_of_defaults(parse(path))


@each_file
def test_everything_public_has_a_docstring(path):
    assert not without_docstring(parse(path))


@each_file
def test_files_are_short(path):
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES


@pytest.mark.parametrize("module", [module for module in map(module_of, FILES)
                                    if not module or module.split(".")[0] in PURE])
def test_a_pure_module_loads_neither_torch_nor_deepspeed(module):
    name = f"ds_layerwise.{module}" if module else "ds_layerwise"
    code = f"import sys, {name}; print(sorted({{'torch', 'deepspeed'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


@pytest.mark.parametrize("module, code, caught", [
    ("plan.layout", "from ds_layerwise.errors import LayoutError", False),
    ("plan.layout", "def f():\n    from ds_layerwise.plan.planner.planner import plan", True),
    ("plan.layout", "from ds_layerwise.plan import planner", True),
    ("plan.layout", "from ds_layerwise.plan import rates", True),
    ("plan.layout", "from ds_layerwise import plan", True),
    ("plan.layout", "import ds_layerwise.config.sections", False),
    ("plan.layout", "import ds_layerwise.routing.routing_rules", True),
    ("plan.layout", "from ds_layerwise import initialize", True),
    ("plan.layout", "from ds_layerwise import __version__", False),
    ("plan.layout", "from .errors import LayoutError", True),
    ("plan.layout", "from . import errors", True),
    ("plan.nowhere", "from ds_layerwise.errors import LayoutError", True),
    ("checkpoint.folder", "from ds_layerwise.routing import rules", True),
    ("optimizers.muon", "from ds_layerwise.optimizers.rule import UpdateRule", False),
    ("", "from ds_layerwise.engine.register import register", False),
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


@pytest.mark.parametrize("code, caught", [
    ("torch.empty(3)", True),
    ("torch.empty(3, dtype=torch.float32)", True),
    ("torch.tensor(1.0, device='cpu')", True),
    ("torch.zeros((), dtype=torch.float32, device='cpu')", False),
    ("torch.arange(3)", True),
    ("torch.arange(3, device='cpu')", False),
    ("torch.empty_like(x)", False),
])
def test_defaults_catch(code, caught):
    assert bool(breaches_of_defaults(ast.parse(code))) is caught


def test_docstrings_are_missed():
    code = "class A:\n 'x'\n def f(self): pass\n def _g(self): pass\nclass _B:\n def f(self): pass\ndef h(): 'y'"
    assert without_docstring(ast.parse(code)) == ["line 3: A.f has no docstring"]
