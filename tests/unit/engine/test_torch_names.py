"""The list of private names of torch: that it is whole, and that the installed torch has all of it."""

import ast
import re
from pkgutil import resolve_name

import pytest

from ds_layerwise.engine.contract.contract import CONTRACT
from tests.support.deepspeed_names import USED, is_asked_for, is_attribute
from tests.support.house_rules import sources
from tests.support.rooms import rooms
from tests.support.torch_names import ON_INSTANCES, PRIVATE, REPLACED

pytestmark = rooms("outside")

SOURCES = sources()

#: Of Python, which calls them private, too.
OF_PYTHON = {"_exit", "_shutdown", "_run_exitfuncs", "_asdict", "_fields", "_replace", "_Unpickler"}
OF_DEEPSPEED = {name.key for name in (*CONTRACT, *USED)}

#: Methods of this kind torch asks for, and does not say so.
ASKED = re.compile(r"__(create|get)_\w+__")


def private_names(trees):
    """The private attributes, modules and methods that code uses and does not define itself."""
    defined, used = set(), set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                defined.add(node.name)
                used |= {node.name} if ASKED.fullmatch(node.name) else set()
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                defined.add(node.target.id)
            elif isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
                is_own = ast.unparse(node.value) in ("self", "cls")
                (defined if is_own and isinstance(node.ctx, ast.Store) else used).add(node.attr)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                used |= {part for part in f"{node.module}.{node.names[0].name}".split(".") if part[0] == "_"}
            elif isinstance(node, ast.Constant) and re.fullmatch(r"torch\.[\w.]*\b_\w[\w.]*", str(node.value)):
                used |= {part for part in node.value.split(".") if part[0] == "_"}
    listed = {part for path in PRIVATE for part in path.split(".")}
    return {name for name in used if name in listed or name not in defined}


def test_private_names_of_torch_that_are_used_are_listed_and_no_others():
    listed = {part for path in PRIVATE for part in path.split(".") if part.startswith("_")}
    used = private_names(source.tree for source in SOURCES)
    others = used - listed - OF_DEEPSPEED - OF_PYTHON
    assert not {name for name in others if not name.startswith("_layerwise_")}
    assert {[part for part in path.split(".") if part.startswith("_")][-1] for path in PRIVATE} <= used


@pytest.mark.parametrize("path", [*PRIVATE, *REPLACED, *ON_INSTANCES])
def test_the_installed_torch_has_it(path):
    place, _, name = path.rpartition(".")
    owner = resolve_name(place)
    try:
        there = resolve_name(path) is not None or hasattr(owner, name)
    except AttributeError:
        # Instances have it, or are asked for it.
        there = name in owner.__annotations__ or is_attribute(owner, name) or is_asked_for(owner, name)
    assert there


def test_replaced_names_are_on_both_lists():
    of_torch = {name.path for name in CONTRACT if name.path.startswith("torch.")}
    assert of_torch == set(REPLACED)


@pytest.mark.parametrize("code, names", [
    ("x = torch._a(1)\ny = z._b", {"_a", "_b"}),
    ("class A:\n    _c: int\n    def _d(self): self._e = other._c + other._d + other._e", set()),
    ("from torch.utils._f import g\nx = sys.modules['torch._h.i']", {"_f", "_h"}),
    ("class A:\n    def __get_tensor_shard__(self): pass\n    def __len__(self): pass", {"__get_tensor_shard__"}),
])
def test_names_are_seen(code, names):
    assert private_names([ast.parse(code)]) == names
