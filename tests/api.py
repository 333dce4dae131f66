"""Public names of the package, with signatures and docstrings, for docs/api.md: ``python -m tests.outputs --write``."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import ds_layerwise
from ds_layerwise.engine import engine_hooks
from ds_layerwise.engine.checkpoints import loading, saving
from tests.support.documents import DOCS
from tests.support.house_rules import Function

PAGE = DOCS / "api.md"
_MARK = "<!-- api: python -m tests.outputs --write -->\n"

#: Methods of DeepSpeed's engine that scripts call and that act differently here, each with the change.
ENGINE = {
    "save_checkpoint": saving._save_whole, "load_checkpoint": loading._load_checked,
    "load_module_state_dict": loading._load_module_state_dict, "zero_grad": engine_hooks._zero_grad,
    "save_16bit_model": saving._save_16bit_model, "destroy": saving._destroy,
}

_ROLE = re.compile(r":\w+:`(~?)\.?([\w.]+)`")


def with_api(page: str) -> str:
    """Return ``page`` with everything below its mark written again."""
    return page.partition(_MARK)[0] + _MARK + "\n" + "\n".join(_lines())


def _lines() -> Iterator[str]:
    for name in ds_layerwise.__all__:
        value = getattr(ds_layerwise, name)
        yield f"## {name}\n"
        if isinstance(value, str):
            yield f"`{name}: str`: the version of the package.\n"
        elif isinstance(value, type):
            yield from _class(value)
        else:
            yield from _function(name, value)
    yield "## The engine\n"
    yield "`initialize` returns DeepSpeed's engine. These methods of it act in another way with this optimizer:\n"
    for name, hook in ENGINE.items():
        node = _tree(hook)
        yield from _entry(_signature(name, node, without=2), ast.get_docstring(node))
    yield ""


def _tree(value: Any) -> Any:
    return ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]


def _function(name: str, value: Any) -> Iterator[str]:
    node = _tree(value)
    yield f"`{_signature(name, node)}`\n"
    yield from _text(ast.get_docstring(node))


def _class(cls: type) -> Iterator[str]:
    """Yield a class, with the members that it has and inherits from bases of the package."""
    seen: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.split(".")[0] != "ds_layerwise":
            continue
        if base is cls:
            yield f"`class {cls.__name__}({', '.join(each.__name__ for each in cls.__bases__)})`\n"
            yield from _text(ast.get_docstring(_tree(cls)))
        members = [member for member in _members(_tree(base)) if member[0] not in seen]
        seen |= {name for name, *_ in members}
        if members and base is not cls and not base.__name__.startswith("_"):
            yield f"From `{base.__name__}`:\n"
        for _, signature, doc in members:
            yield from _entry(signature, doc)
        if members:
            yield ""


def _members(node: ast.ClassDef) -> Iterator[tuple[str, str, str | None]]:
    """Yield name, signature and docstring of every public field, property and method."""
    for member, below in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(member, Function) and not member.name.startswith("_"):
            decorators = [ast.unparse(decorator) for decorator in member.decorator_list]
            if "property" in decorators:
                returns = ast.unparse(member.returns or ast.Name("Any"))
                yield member.name, f"{member.name}: {returns}", ast.get_docstring(member)
            elif not any(name.endswith(".setter") for name in decorators):
                yield member.name, _signature(member.name, member, without=1), ast.get_docstring(member)
        elif isinstance(member, ast.AnnAssign) and not (name := ast.unparse(member.target)).startswith("_"):
            doc = below.value if isinstance(below, ast.Expr) else None
            if isinstance(member.value, ast.Call):
                member.value = None
            if doc is not None or member.value is not None:
                yield name, ast.unparse(member), doc.value if isinstance(doc, ast.Constant) else None
        elif isinstance(member, ast.Assign) and isinstance(member.value, ast.Name):
            for target in map(ast.unparse, member.targets):
                if not target.startswith("_"):
                    yield target, target, f"another name of ``{member.value.id}``"


def _signature(name: str, node: Function, without: int = 0) -> str:
    """Return the signature of ``node`` under this name, ``without`` so many of its first arguments."""
    del node.args.args[:without]
    return f"{name}({ast.unparse(node.args)})" + (f" -> {ast.unparse(node.returns)}" if node.returns else "")


def _entry(signature: str, doc: str | None) -> Iterator[str]:
    first, *rest = _text(doc) or [""]
    yield _filled(f"* `{signature}`" + f": {first}" * bool(first), "  ").rstrip("\n")
    # Four spaces: with fewer, mkdocs takes a paragraph out of the list.
    yield from (textwrap.indent(f"\n{paragraph}".rstrip("\n"), "    ") for paragraph in rest)


def _text(doc: str | None) -> list[str]:
    """Return a docstring as paragraphs of Markdown, each with an empty line after it."""
    doc = inspect.cleandoc(doc or "").replace("``", "`")
    doc = _ROLE.sub(lambda match: f"`{match[2].rpartition('.')[2] if match[1] else match[2]}`", doc)
    paragraphs = []
    for paragraph in filter(None, doc.split("\n\n")):
        head, _, rest = paragraph.partition("\n")
        if head in ("Args:", "Raises:"):
            for item in re.split(r"\n(?=\S)", textwrap.dedent(rest)):
                names, _, meaning = item.partition(":")
                ticked = ", ".join(f"`{name}`" for name in names.split(", "))
                paragraphs.append(_filled("Raises " * (head == "Raises:") + f"{ticked}: {meaning}"))
        else:
            paragraphs.append(_filled(paragraph))
    return paragraphs


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(" ".join(text.split()), 116, subsequent_indent=indent, break_long_words=False,
                         break_on_hyphens=False) + "\n"
