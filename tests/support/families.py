"""Models of transformers, built on meta from their default configs, and the verdicts on their parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

from ds_layerwise.routing.module_of import kind_of
from ds_layerwise.routing.override_matching import holders_of
from tests.support.routing import route_parameters

#: The number of layers of a kind that a model keeps, enough to have those that differ from the first.
LAYERS = 3
_LAYERS = re.compile(r"(\w+_)?layers?|depth|num_\w*blocks")

#: Architectures of a type of model in order of preference: those with a head come first.
_PREFERRED = ("ForConditionalGeneration", "ForPreTraining", "ForCausalLM", "ForMaskedLM", "ForImageClassification",
              "ForSequenceClassification", "For", "")

#: Classes of the modules, by verdict and own name of a parameter with several axes; and the paths of heads.
TABLE: dict[str, Any] = json.loads(Path(__file__).with_name("families.json").read_text())


class Verdict(NamedTuple):
    """The verdict on a parameter with two axes or more."""

    name: str
    leaf: str
    cls: type[nn.Module]
    path: str
    """The last two names of its module, with # for numbers."""
    kind: str
    """Matrix, vector, embedding, head or small. A small one has a shape that is no matrix."""
    reason: str

    def described(self) -> str:
        """Return the verdict as a line of a message."""
        return f"{self.leaf} of {self.cls.__name__}: {self.kind} ({self.reason}), such as {self.name}"


def architectures() -> dict[str, set[str]]:
    """Return the classes that transformers makes by type, each with its types."""
    types_of: dict[str, set[str]] = {}
    for name, mapping in vars(modeling_auto).items():
        for kind, names in mapping.items() if name.endswith("MAPPING_NAMES") and isinstance(mapping, dict) else ():
            for class_name in [names] if isinstance(names, str) else names:
                cls = getattr(transformers, class_name, None)
                if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel) and getattr(
                        cls, "config_class", None):
                    types_of.setdefault(class_name, set()).add(kind)
    return types_of


def one_of_each_type() -> list[str]:
    """Return an architecture for each type of model."""
    by_type: dict[str, list[str]] = {}
    for name, kinds in architectures().items():
        for kind in kinds:
            by_type.setdefault(kind, []).append(name)
    return sorted({min(names, key=_rank) for names in by_type.values()})


def _rank(name: str) -> tuple[int, int, str]:
    return next(i for i, part in enumerate(_PREFERRED) if part in name), len(name), name


def built(name: str) -> nn.Module | None:
    """Return the model with few layers, or with all. Return None where its default config builds no model."""
    cls = getattr(transformers, name)
    for few in (True, False):
        try:
            config = cls.config_class()
            if few:
                _shorten(config)
            with torch.device("meta"):
                return cls(config)
        # Constructors raise any error at defaults that nobody uses.
        except Exception:
            continue
    return None


def _shorten(config: Any) -> None:
    for key, value in list(vars(config).items()):
        if type(value) is int and value > LAYERS and _LAYERS.fullmatch(key):
            setattr(config, key, LAYERS)
        elif isinstance(value, transformers.PreTrainedConfig):
            _shorten(value)


def verdicts(model: nn.Module) -> Iterator[Verdict]:
    """Yield the verdict on each parameter with two axes or more."""
    params, holders = dict(model.named_parameters()), holders_of(model)
    for name, route in route_parameters(model, [{"params": list(params.values())}]).items():
        if params[name].dim() > 1:
            path, module = holders[params[name]][0]
            kind = ("matrix" if route.whole else "head" if "head" in route.reason else
                    "embedding" if "embedding" in route.reason else "small" if route.weight_decay is None else "vector")
            yield Verdict(name, name.rpartition(".")[2], kind_of(module),
                          re.sub(r"\d+", "#", ".".join(path.split(".")[-2:])), kind, route.reason)


def unexpected(rows: Iterable[Verdict]) -> dict[str, str]:
    """Return the verdicts on a model that the table lacks or contradicts, by the words that tell them from others."""
    problems, reasons = {}, set()
    for row in rows:
        reasons.add(row.reason)
        if row.kind == "head" and row.path not in TABLE["head"]:
            problems[f"head {row.path}"] = f"a new head: {row.name} ({row.reason})"
        elif row.kind == "matrix" and row.leaf == "weight" and row.path in TABLE["head"] and (
                row.path not in TABLE["head or not"]):
            problems[f"no head {row.path}"] = f"no head any more: {row.name} ({row.reason})"
        elif row.kind != "head" and not any(
                fnmatchcase(row.cls.__name__, known) for known in TABLE[row.kind].get(row.leaf, ())):
            problems[f"{row.kind} {row.leaf} {row.cls.__name__}"] = f"new: {row.described()}"
    if len({reason.startswith("output head (last") for reason in reasons if reason.startswith("output head")}) > 1:
        problems["last"] = "a last linear layer is called a head beside one that is known"
    return problems


def skeleton(modules: list[Any]) -> nn.Module:
    """Build a model of ``modules``, each a path, a class, a class of torch, sizes, and parameters, on meta."""
    root: nn.Module | None = None
    for path, name, base, sizes, params in modules:
        cls: type[nn.Module] = getattr(nn, base)
        cls = cls if name == base else type(name, (cls,), {})
        module: nn.Module = object.__new__(cls)
        nn.Module.__init__(module)
        vars(module).update(sizes)
        for key, shape in params.items():
            module.register_parameter(key, nn.Parameter(torch.empty(shape, device="meta")))
        if root is None:
            root = module
        else:
            parent, _, own = path.rpartition(".")
            root.get_submodule(parent).add_module(own, module)
    assert root is not None
    return root
