"""All that a checkpoint holds, by name and state, whichever kind it is and whoever wrote it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from ds_layerwise.checkpoint.formats.checkpoint_folder import ZERO3_MODEL_FILE, ModelFile
from ds_layerwise.checkpoint.formats.regular import RegularCheckpoint
from ds_layerwise.checkpoint.formats.universal import UniversalCheckpoint, is_universal
from ds_layerwise.checkpoint.record import PieceRecord
from ds_layerwise.errors import LayerWiseError

#: The key of the weights beside those of the states, as in the universal format.
WEIGHTS = "fp32"


class Contents:
    """The checkpoint in ``folder``, every file of it open.

    Args:
        trust: whether the model's file may run code.
        mp_rank: which piece of a model that is cut; see :func:`.regular.mp_size`.

    Raises:
        LayerWiseError: a file is missing, unreadable, of another save, or in a newer format; names
            it.
    """

    def __init__(self, folder: Path, *, trust: bool, mp_rank: int = 0) -> None:
        self.folder = folder
        self.model = ModelFile.read(folder, trust=trust, mp_rank=mp_rank)
        self.saved: RegularCheckpoint | UniversalCheckpoint
        if is_universal(folder):
            self.saved = UniversalCheckpoint(folder)
        else:
            self.saved = RegularCheckpoint(folder, mp_rank=mp_rank)
            for rank in range(self.saved.world_size):
                self.saved.state_dict(rank)
        held = self.saved.header.shapes
        known = self.model.shapes if self.model else {}
        from_zero3 = self.model is not None and self.model.path.name == ZERO3_MODEL_FILE
        self.trained: dict[str, tuple[int, ...]] = {}
        for name, shape in held.items():
            if name in self.saved.header.rules or name in known:
                # DeepSpeed's converter leaves what comes from ZeRO-3 flat.
                flat = from_zero3 and name in known and tuple(shape) == (math.prod(known[name]),)
                self.trained[name] = known[name] if flat else tuple(shape)
        aliases = self.model.aliases if self.model else {}
        self.aliases = {alias: name for alias, name in aliases.items() if alias not in self.trained}
        self.others: dict[str, Tensor] = {}
        """Frozen parameters and buffers, in the dtype that they are saved in."""
        if isinstance(self.saved, UniversalCheckpoint):
            self.others = {
                name: self.saved.value(name, WEIGHTS)
                for name in held
                if name not in self.trained and name not in self.aliases
            }
        for name, value in (self.model.others(self.trained) if self.model else {}).items():
            # A universal folder has them in float32, the model's file has them as they are.
            if name not in self.others or self.others[name].shape == value.shape:
                self.others[name] = value

    @property
    def world_size(self) -> int | None:
        """The number of ranks that saved it, where it is known."""
        if isinstance(self.saved, RegularCheckpoint):
            return self.saved.world_size
        return self.model.world_size if self.model else None

    def keys(self, name: str) -> tuple[str, ...]:
        """:data:`WEIGHTS` and the states of ``name``."""
        rule = self.saved.header.rules.get(name)
        return WEIGHTS, *(rule.state_keys if rule else ())

    def pieces(self, name: str) -> list[PieceRecord]:
        """What the files hold of the trained parameter ``name``, in ascending order of elements."""
        return list(self.saved.pieces(name, 0, math.prod(self.trained[name])))

    def weight(self, name: str) -> Tensor:
        """The float32 weights of a trained parameter, or a frozen one or a buffer as it is saved;
        in its shape.

        Raises:
            LayerWiseError: not every element is there.
        """
        if name in self.others:
            return self.others[name]
        shape = self.trained[name]
        return together(
            name, WEIGHTS, [piece.master for piece in self.pieces(name)], math.prod(shape)
        ).view(shape)

    def values(self, name: str, *, states: bool) -> Iterator[tuple[str, Tensor]]:
        """The weights of ``name`` and, if asked for, its states, each by its key; see
        :meth:`weight`.

        States with one element for each of the parameter are 1-D, and so are its weights.
        """
        yield WEIGHTS, self.weight(name).reshape(-1)
        if not states or name in self.others:
            return
        pieces, numel = self.pieces(name), math.prod(self.trained[name])
        for key in self.keys(name)[1:]:
            if any(key not in piece.state for piece in pieces):
                raise LayerWiseError(
                    f"{name} has no {key}, though the checkpoint names the optimizer that has it"
                )
            values = [piece.state[key] for piece in pieces]
            if key != "step" and all(piece.is_elementwise(key) for piece in pieces):
                yield key, together(name, key, values, numel)
            elif all(torch.equal(value, values[0]) for value in values):
                # A parameter without axes has its states without axes in one form and with one in
                # the other.
                yield key, values[0] if self.trained[name] else values[0].reshape(-1)
            else:
                raise LayerWiseError(
                    f"{name} has several {key}, one for each of its {len(values)} pieces, which "
                    "differ, or one of them is cut short"
                )


def together(name: str, key: str, values: list[Tensor], numel: int) -> Tensor:
    """1-D; not a copy where it lies in one place.

    Raises:
        LayerWiseError: it is not ``numel`` elements.
    """
    whole = (
        values[0]
        if len(values) == 1
        else torch.cat(values)
        if values
        else torch.zeros(0, dtype=torch.float32, device="cpu")
    )
    if whole.numel() != numel:
        raise LayerWiseError(
            f"{name} has {whole.numel()} elements of {key}, and {numel} in its shape; a file is "
            "missing or belongs to another save"
        )
    return whole
