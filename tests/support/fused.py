"""Fused parameters with named parts, and the same parts as parameters of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ds_layerwise.config.overrides import Override
from ds_layerwise.optimizers.rules.muon_family import Muon
from ds_layerwise.routing.fused_parts import split_as_told
from ds_layerwise.routing.part_views import Parts
from ds_layerwise.routing.routes import Route
from tests.support.reference import whole_number_gradients

#: The shape of each parameter, and the entry of an override for its parts: unequal ones; columns with heads;
#: interleaved ones, some of them with heads; experts, one after the other, and in turns.
FUSED: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "qkv": ((16, 6), {"split": {"q": 8, "k": 4, "v": 4}}),
    "columns": ((6, 24), {"split": {"q": {"size": 8, "heads": 2}, "k": 8, "v": 8}, "split_axis": "in"}),
    "groups": ((24, 6), {"split": {"q": {"size": 4, "heads": 2}, "k": 2, "v": 2}, "split_groups": 3}),
    "latent": ((18, 6), {"split": {"nope": 4, "rope": 2}, "split_groups": 3}),
    "gate_up": ((3, 12, 5), {"split": {"gate": 6, "up": 6}}),
    "in_turns": ((3, 5, 12), {"split": {"gate": 1, "up": 1}, "split_groups": 6, "split_axis": "in"}),
}

OVERRIDES = [{"name": name, **entry} for name, (_, entry) in FUSED.items()]


def parts_in(name: str) -> Parts:
    """Return the parts of a parameter of :data:`FUSED`."""
    shape, entry = FUSED[name]
    split = Override.from_entry("override", {"name": name, **entry}).changes()["split"]
    route = Route(name=name, recipe=Muon(), reason="", group=0, matrix_shape=shape)
    parts = split_as_told(route, split, nn.Identity(), torch.empty(shape), 1).parts
    assert parts is not None
    return parts


def by_index(whole: Tensor, parts: Parts) -> dict[str, Tensor]:
    """Return each part of ``whole``, put together matrix by matrix from single rows or columns."""
    part_of = {}
    of_group = parts.length // parts.groups
    first = 0
    for name, part in parts.each:
        lines = [[group * of_group + first + i for i in range(part.size)] for group in range(parts.groups)]
        if part.heads is None:
            matrices = [[line for group in lines for line in group]]
        else:
            width = part.size // part.heads
            matrices = [group[head * width:(head + 1) * width] for group in lines for head in range(part.heads)]
        stacked = whole if whole.dim() == 3 else whole.unsqueeze(0)
        chosen = [matrix.index_select(parts.axis, torch.tensor(lines)) for matrix in stacked for lines in matrices]
        part_of[name] = torch.stack(chosen) if whole.dim() == 3 or part.heads else chosen[0]
        first += part.size
    return part_of


class Fused(nn.Module):
    """The parameters of :data:`FUSED`, a matrix and a norm. Gradients are whole numbers, different in every step and
    rank.

    With ``apart`` each part is a parameter of its own, with the same values and gradients.
    """

    def __init__(self, *, apart: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.apart = apart
        for name, (shape, _) in FUSED.items():
            whole = torch.randn(shape, generator=generator)
            setattr(self, name, nn.ParameterDict(by_index(whole, parts_in(name))) if apart else nn.Parameter(whole))
        self.plain, self.norm = nn.Parameter(torch.randn(6, 6, generator=generator)), nn.LayerNorm(6)

    def forward(self, place: tuple[int, int, int]) -> Tensor:
        loss = torch.zeros(())
        for name, (shape, _) in FUSED.items():
            grad, param = whole_number_gradients(name, shape, *place), getattr(self, name)
            pairs = [(param, grad)] if not self.apart else [
                (param[part], its) for part, its in by_index(grad, parts_in(name)).items()]
            loss = loss + sum((value * its.to(value)).float().sum() for value, its in pairs)
        return loss + sum((param * whole_number_gradients(key, param.shape, *place).to(param)).float().sum()
                          for key, param in (("plain", self.plain), ("norm", self.norm.weight)))


def taken_apart(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return ``values`` of all parameters of :class:`Fused` as those of the model with ``apart``."""
    apart = {}
    for name, value in values.items():
        if name in FUSED:
            shape = FUSED[name][0]
            apart.update({f"{name}.{part}": its for part, its in
                          by_index(value.view(shape), parts_in(name)).items()})
        else:
            apart[name] = value
    return apart
