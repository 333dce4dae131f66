"""The content of a checkpoint of any kind and from any package, by name and state."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ds_layerwise.checkpoint.formats.checkpoint_folder import ZERO3_MODEL_FILE, ModelFile
from ds_layerwise.checkpoint.formats.regular import RegularCheckpoint
from ds_layerwise.checkpoint.formats.universal import UniversalCheckpoint, is_universal
from ds_layerwise.checkpoint.record import PieceRecord, joined
from ds_layerwise.errors import LayerWiseError

#: The key of the weights beside those of states, as in the universal format.
WEIGHTS = "fp32"


class Contents:
    """The checkpoint in ``folder``, with all of its files open.

    Args:
        trust: True to let the model's file run code.
        mp_rank: the number of the piece of a model that is cut; see :func:`.regular.mp_size`.

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
        model = self.model
        header = self.saved.header
        known = model.shapes if model else {}
        from_zero3 = model is not None and model.path.name == ZERO3_MODEL_FILE
        self.trained: dict[str, tuple[int, ...]] = {}
        for name, shape in header.shapes.items():
            if name in known and from_zero3 and tuple(shape) == (math.prod(known[name]),):
                # DeepSpeed's converter leaves this parameter flat.
                self.trained[name] = known[name]
            elif name in header.rules or name in known:
                self.trained[name] = tuple(shape)
        self.aliases: dict[str, str] = {}
        for alias, name in model.aliases.items() if model else ():
            if alias not in self.trained:
                self.aliases[alias] = name
        self.others = self._untrained()
        """Frozen parameters and buffers, in their saved dtype."""

    def _untrained(self) -> dict[str, Tensor]:
        others = {}
        if isinstance(self.saved, UniversalCheckpoint):
            for name in self.saved.header.shapes:
                if name not in self.trained and name not in self.aliases:
                    others[name] = self.saved.value(name, WEIGHTS)
        for name, value in self.model.others(self.trained).items() if self.model else ():
            # A universal folder has them in float32; the model's file has their own dtype.
            if name not in others or others[name].shape == value.shape:
                others[name] = value
        return others

    @property
    def world_size(self) -> int | None:
        """The number of ranks that saved the checkpoint, if it is known."""
        if isinstance(self.saved, RegularCheckpoint):
            return self.saved.world_size
        if self.model:
            return self.model.world_size
        return None

    def num_bytes(self, name: str, *, states: bool) -> int:
        """Return about the number of bytes of the weights of ``name`` and, with ``states``, of its
        states.
        """
        if name in self.others:
            return self.others[name].numel() * 4
        return math.prod(self.trained[name]) * 4 * (len(self.keys(name)) if states else 1)

    def keys(self, name: str) -> tuple[str, ...]:
        """Return :data:`WEIGHTS` and the keys of the states of ``name``."""
        rule = self.saved.header.rules.get(name)
        return WEIGHTS, *(rule.state_keys if rule else ())

    def weight(self, name: str) -> Tensor:
        """Return a trained parameter in float32, or a frozen one or a buffer in its saved dtype.

        Raises:
            LayerWiseError: some elements are missing.
        """
        if name in self.others:
            return self.others[name]
        masters = [piece.master for piece in self._pieces(name)]
        return joined(f"{WEIGHTS} of {name}", masters, self.trained[name])

    def _pieces(self, name: str) -> Sequence[PieceRecord]:
        return self.saved.pieces(name, 0, math.prod(self.trained[name]))

    def values(self, name: str, *, states: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of ``name`` and, with ``states``, its states, with their keys.

        The weights are 1-D, and so are states with one element per element of the parameter.

        Raises:
            LayerWiseError: some elements are missing, or pieces disagree.
        """
        yield WEIGHTS, self.weight(name).reshape(-1)
        if not states or name in self.others:
            return
        pieces = self._pieces(name)
        for key in self.keys(name)[1:]:
            for piece in pieces:
                if key not in piece.state:
                    raise LayerWiseError(
                        f"{name} has no {key}, though the checkpoint names the optimizer that has "
                        "it"
                    )
            values = [piece.state[key] for piece in pieces]
            if key != "step" and all(piece.is_elementwise(key) for piece in pieces):
                yield key, joined(f"{key} of {name}", values, self.trained[name]).reshape(-1)
            elif all(torch.equal(value, values[0]) for value in values):
                # The states of a 0-d parameter are 0-d in one form and 1-D in the other, and so is
                # the parameter.
                is_one = math.prod(self.trained[name]) == 1
                yield key, values[0].reshape(-1) if is_one else values[0]
            else:
                raise LayerWiseError(
                    f"{name} has several {key}, one for each of its {len(values)} pieces, which "
                    "differ, or one of them is cut short"
                )
