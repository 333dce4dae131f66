"""The parts of a checkpoint of any layout that a run takes, by name: pieces of masters and states,
and frozen parameters and buffers of which DeepSpeed's engine loads nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ds_layerwise.checkpoint.checkpoint_folder import MODEL_FILE, ModelFile
from ds_layerwise.checkpoint.new_names import new_names
from ds_layerwise.checkpoint.plain_values import load_safely
from ds_layerwise.checkpoint.record import (
    Cuts,
    PieceRecord,
    Pieces,
    RuleRecord,
    Saved,
    fits,
    value_in,
    weights_in,
)
from ds_layerwise.config.sections import LayerWiseConfig
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.output import LONG_LOAD, progress

#: The target and the source of a copy.
Copy = tuple[Tensor, Tensor]

_WEIGHTS_ALONE = (
    "load only the weights with load_checkpoint(..., load_optimizer_states=False), or with "
    "states=False where they come from one file or a sharded checkpoint"
)


@dataclass(frozen=True)
class LoadPlan:
    """The copies that load a checkpoint into this rank's memory. Making a plan writes nothing."""

    copies: list[Copy]
    loaded: list[tuple[PieceRecord, frozenset[str]]]
    """The memory that the copies write to: pieces with the keys of tensors; that of a master is
    empty.
    """
    restarts: dict[str, tuple[str, ...]]
    """The states that are reset to their initial values, by parameter; and the empty key where the
    master is set from the model's weights, because the checkpoint lacks it.
    """
    reasons: dict[str, str]
    """The parameters whose state is not the checkpoint's, each with the reason."""

    def copy(self, *, quiet: bool) -> None:
        """Make the copies. Show a progress bar if that takes long, unless ``quiet``."""
        size = sum(into.nbytes for into, _ in self.copies)
        with progress("load", size, quiet=quiet, delay=LONG_LOAD) as done:
            for into, out_of in self.copies:
                into.copy_(out_of)
                done(into.nbytes)


class Recut:
    """The tensor-parallel parts of a model as one of another number of parts; see
    :class:`.record.Saved`.

    Args:
        parts: the checkpoints of all parts; or of the whole model.
        cuts: those of this run.
        number, count: the number of this run's part, and of parts.

    Raises:
        LayerWiseError: a parameter cannot be cut so; names it.
    """

    def __init__(self, parts: Sequence[Saved], cuts: Cuts, number: int = 0, count: int = 1) -> None:
        self.header = parts[0].header
        was = self.header.cuts if len(parts) > 1 else {}
        if was is None:
            raise LayerWiseError(
                f"the model is in {len(parts)} tensor-parallel parts, and was saved by an earlier "
                f"version, which did not write how it is cut; resume with {len(parts)}, and save"
            )
        self._parts = parts
        self._was = was
        self._now = cuts
        self._number = number
        self._count = count
        shapes = dict(self.header.shapes)
        for name in shapes.keys() & {*was, *cuts}:
            its = [part.header.shapes[name] for part in parts]
            nothing = [torch.empty(each, dtype=torch.float32, device="meta") for each in its]
            shapes[name] = tuple(self.cut_anew(name, nothing).shape)
        self.header = replace(self.header, shapes=shapes, num_parts=count)

    def cut_anew(self, name: str, values: Sequence[Tensor], what: str = "its value") -> Tensor:
        """Return this run's part of a parameter, or of a state of it.

        Args:
            values: what the saved parts have.

        Raises:
            LayerWiseError: parts are not pieces of a whole one, or the new ones would not be; names
                it.
        """
        cut = {**self._now, **self._was}.get(name, (0, 1))
        new = self._now.get(name, cut)
        if cut is None or new is None or new[:2] != cut[:2]:
            raise LayerWiseError(
                f"{name} was or is not cut into pieces along one axis, equal ones if in several "
                "runs, the same then and now, and cannot be cut anew; resume with "
                f"{len(values)} tensor-parallel part(s), and save without layerwise.save_universal"
            )
        axis, runs, *_ = cut
        before = values[:1]
        if name in self._was:
            before = values
        now = self._count if name in self._now else 1
        is_other = False
        for value, part in zip(values, self._parts, strict=True):
            its = tuple(value.shape)
            of_part = part.header.shapes.get(name, its)
            is_other |= len(its) != len(of_part) or its[axis : axis + 1] != of_part[axis : axis + 1]
        if is_other or len(before) == now == 1:
            if not all(torch.equal(values[0], value) for value in values):
                raise LayerWiseError(
                    f"{name}: {what} differs between the {len(values)} tensor-parallel parts, and "
                    f"is no piece of a whole one; resume with {len(values)} parts, and save "
                    "without layerwise.save_universal"
                )
            return values[0]
        whole = torch.cat([torch.unflatten(value, axis, (runs, -1)) for value in before], axis + 1)
        length = whole.shape[axis + 1]
        lengths = list(new[2:])
        if now == 1 or sum(lengths) != length:
            lengths = [length // now] * now
        if sum(lengths) != length:
            raise LayerWiseError(
                f"{name} has {length} elements in each of {runs} run(s) along axis "
                f"{axis}, which {now} tensor-parallel parts do not divide; resume with a number "
                "that does"
            )
        return torch.split(whole, lengths, axis + 1)[self._number % now].flatten(axis, axis + 1)

    def pieces(self, name: str, start: int, stop: int) -> Pieces:
        """Return one piece, if ``name`` is cut; see :meth:`.record.Saved.pieces`."""
        if name not in {*self._was, *self._now}:
            return self._parts[0].pieces(name, start, stop)
        found: dict[str, list[Tensor]] = {}
        for part in self._parts:
            shape = part.header.shapes[name]
            pieces = part.pieces(name, 0, math.prod(shape))
            for key in pieces[0].tensors:
                found.setdefault(key, []).append(value_in(pieces, key, shape))
        tensors = {}
        for key, values in found.items():
            tensors[key] = self.cut_anew(name, values, key)
            if tensors[key].shape == self.header.shapes[name]:
                # A copy, so that memory for one whole state suffices.
                tensors[key] = tensors[key].reshape(-1)[start:stop].clone()
        return [PieceRecord(name, start, tensors.pop(""), tensors)]


def plan_load(
    own: Iterable[PieceRecord],
    saved: Saved,
    rules: Mapping[str, RuleRecord],
    config: LayerWiseConfig,
    *,
    masters: bool,
    states: bool,
) -> LoadPlan:
    """Plan the copies that set ``own`` to the content of ``saved``.

    Args:
        own: views into live memory.
        rules: the optimizer of every parameter of ``own``.
        config: with the policies ``on_missing_state`` and ``on_optimizer_change``.
        masters, states: True to load masters, and states.

    Raises:
        LayerWiseError: a parameter has another size, lacks some of its elements, or has a state
            from which ``own`` cannot continue, and the two policies do not allow it to start fresh.
    """
    plan = LoadPlan(copies=[], loaded=[], restarts={}, reasons={})
    shapes = saved.header.shapes
    for piece in own:
        start = piece.param_start
        stop = piece.param_start + piece.master.numel()
        numel = math.prod(shapes.get(piece.name, ()))
        sources: Pieces = ()
        names = {}
        if piece.name in shapes:
            sources = saved.pieces(piece.name, start, stop)
            if masters:
                names[""] = ""
        if states:
            old = saved.header.rules.get(piece.name)
            kept, why = _kept(piece, old, rules[piece.name], sources, config)
            names |= kept
            if why:
                plan.reasons[piece.name] = why
        plan.copies.extend(_copies(piece, names, sources, numel))
        plan.loaded.append((piece, frozenset(names)))
        wanted = [""] * masters + [*piece.state] * states
        if restarts := tuple(key for key in wanted if key not in names):
            plan.restarts[piece.name] = restarts
    return plan


def check_shapes(own: Mapping[str, tuple[int, ...]], saved: Mapping[str, tuple[int, ...]]) -> None:
    """Compare the shapes of the parameters that both have.

    Raises:
        LayerWiseError: one differs. Shapes in ``saved`` may be flat, because DeepSpeed's converter
            leaves parameters of ZeRO-3 flat; then the number of elements is compared.
    """
    for name, shape in own.items():
        if name not in saved or fits(saved[name], shape):
            continue
        if tuple(saved[name]) != (math.prod(shape),):
            raise LayerWiseError(
                f"{name} is {tuple(saved[name])} in the checkpoint, {tuple(shape)} in the model; a "
                "parameter that changed its shape needs another name, or a checkpoint without it, "
                "and as many tensor-parallel parts of other lengths a universal checkpoint"
            )


def _kept(
    piece: PieceRecord,
    old: RuleRecord | None,
    new: RuleRecord,
    sources: Pieces,
    config: LayerWiseConfig,
) -> tuple[dict[str, str], str]:
    """Return the states of ``new``, each with the state of ``old`` that it continues from, and the
    reason why the others start fresh.
    """
    name = piece.name
    if not new.state_keys:
        return {}, ""
    if old is None:
        if config.on_missing_state == "error":
            raise LayerWiseError(
                f"the checkpoint holds no state of {name}; set layerwise.on_missing_state to "
                f"'fresh' to start it from zeros, or {_WEIGHTS_ALONE}"
            )
        return {}, "no state in the checkpoint"
    if new.has_states_of(old):
        what = "other shapes"
        told = ", ".join(_of_other_shapes(piece, new.state_keys, sources))
        # An older version, or another package, does not store the meaning.
        if not told and old.meaning and new.meaning and old.meaning != new.meaning:
            told = f"{old.meaning}, now {new.meaning}"
            what = "another meaning"
        if not told:
            return {key: key for key in new.state_keys}, ""
        before = f"{old.family} with other settings, which gave its states {what} ({told})"
        reason = f"{old.family} with states of {what} before ({told})"
    else:
        before = (
            f"{old.family} (states {', '.join(old.state_keys) or 'none'}), this run updates it by "
            f"{new.family} ({', '.join(new.state_keys)})"
        )
        reason = f"{old.family} before, {new.family} now"
    if config.on_optimizer_change == "error":
        raise LayerWiseError(
            f"{name} was updated by {before}; resume with the optimizers and settings of the "
            "checkpoint (optimizer.params and layerwise.overrides), set "
            "layerwise.on_optimizer_change to 'reset' or 'keep_shared', or "
            f"{_WEIGHTS_ALONE}"
        )
    shared: dict[str, str] = {}
    if config.on_optimizer_change == "keep_shared":
        shared = _shared(old, new)
    for key, before in shared.items():
        reason += f"; {key} goes on from {before}"
    return shared, reason


def _shared(old: RuleRecord, new: RuleRecord) -> dict[str, str]:
    """Return the average of gradients from which ``new`` continues, with its name in ``old``."""
    # Moments with a bias correction by a step count need each other.
    counts = any(key.partition(".")[0] == "step" for key in new.state_keys)
    if counts or not old.gradient_average or not new.gradient_average:
        return {}
    return {new.gradient_average: old.gradient_average}


def _of_other_shapes(piece: PieceRecord, keys: Sequence[str], sources: Pieces) -> Iterator[str]:
    """Yield those of ``keys`` whose shapes differ, each with its shape in ``sources`` and in
    ``piece``.
    """
    for key in keys:
        if key not in piece.state or not sources:
            continue
        was = tuple(sources[0].values_of(key).shape)
        now = tuple(piece.state[key].shape)
        # The factors of a square matrix have as many elements as the matrix, and so count as
        # element-wise.
        is_cut = piece.is_elementwise(key) and math.prod(was) == sources[0].master.numel()
        if was != now and not is_cut:
            yield f"{key} {was}, now {now}"


def _copies(
    piece: PieceRecord, names: Mapping[str, str], sources: Pieces, numel: int
) -> Iterator[Copy]:
    """Yield the copies of the states ``names`` of ``piece``.

    Args:
        names: the key in ``sources`` for each key of ``piece``; the key of the master is empty.
        numel: the number of elements of the parameter, by its shape in the checkpoint.
    """
    for key, saved_key in names.items():
        into = piece.values_of(key)
        if not piece.is_elementwise(key):
            yield into, sources[0].values_of(saved_key)
            continue
        start = piece.param_start
        stop = piece.param_start + into.numel()
        what = f"{saved_key or 'the weights'} of {piece.name}"
        covered = 0
        for source in sources:
            # In a universal checkpoint, the states of a 0-d parameter are also 0-d.
            value = source.values_of(saved_key).reshape(-1)
            begin = source.param_start
            end = source.param_start + value.numel()
            if end > numel:
                raise LayerWiseError(
                    f"the checkpoint's files hold {end} elements of {what}, but its shape has "
                    f"{numel}; a file belongs to another save"
                )
            first = max(start, begin)
            last = min(stop, end)
            if first < last:
                covered += last - first
                yield into[first - start : last - start], value[first - begin : last - begin]
        if covered != stop - start:
            raise LayerWiseError(
                f"the checkpoint's files hold {covered} of the {stop - start} elements of {what} "
                f"from {start} on; a file is missing or belongs to another save"
            )


def named_values(model: nn.Module) -> dict[str, tuple[Any, nn.Parameter | None]]:
    """Return the values in the ``state_dict`` of ``model``, each with the parameter that it is of;
    None for others.

    A hook of the module may have copied values, or changed their names.
    """
    params = dict(model.named_parameters(remove_duplicate=False))
    found = {}
    for name, value in model.state_dict(keep_vars=True).items():
        param = value if isinstance(value, nn.Parameter) else params.get(name)
        found[name] = (value, param)
    return found


def untrained(model: nn.Module, trained: Iterable[Tensor]) -> dict[str, Tensor]:
    """Return the frozen parameters and buffers in the ``state_dict`` of ``model``, by all of their
    names there, as in :func:`named_values`.
    """
    left_out = {id(param) for param in trained}
    found = {}
    for name, (value, param) in named_values(model).items():
        own = value if param is None else param
        if isinstance(own, Tensor) and id(own) not in left_out:
            found[name] = own
    return found


def find_others(
    saved: Saved,
    model: nn.Module,
    *,
    trained: Iterable[Tensor],
    in_file: Mapping[str, Tensor],
) -> tuple[list[Copy], set[str]]:
    """Return the copies that load everything in the ``state_dict`` of ``model`` except the
    parameters ``trained``; and the names of what the checkpoint lacks.

    Args:
        saved: the checkpoint, or the file of whole parameters, by new names.
        in_file: the tensors of its model's file, by new names.

    Raises:
        LayerWiseError: something has another shape.
    """
    held = untrained(model, trained)
    # A parameter may have several names. Activation checkpointing adds its wrapper to the names of
    # parameters, but not to those in state_dict.
    names: dict[int, list[str]] = {}
    for name, own in (*held.items(), *model.named_parameters(remove_duplicate=False)):
        names.setdefault(id(own), []).append(name)
    copies = []
    lacking = set()
    for name, own in held.items():
        # Its other names, if it is tied, stand for it.
        of_own = names.pop(id(own), [])
        if not of_own:
            continue
        if name in in_file and fits(in_file[name].shape, own.shape):
            copies.append((own, in_file[name]))
        elif known := saved.header.shapes.keys() & of_own:
            first = min(known, key=of_own.index)
            check_shapes({first: tuple(own.shape)}, saved.header.shapes)
            copies.append((own, weights_in(saved, first, tuple(own.shape))))
        else:
            lacking.add(name)
    return copies, lacking


def in_model_file(
    folder: Path,
    rename: Mapping[str, str],
    beside: Iterable[str] | None = None,
    mp_rank: int = 0,
) -> dict[str, Tensor]:
    """Read the tensors of the model's file that are whole in it, by new names. A universal
    checkpoint has them also elsewhere, but DeepSpeed's converter rounds buffers to float32, and
    leaves out those of ZeRO-3.

    Args:
        beside: the names of the masters in a regular checkpoint that has trained weights as masters
            alone; None for a universal checkpoint.
        mp_rank: the number of the piece of a model that is cut, in a regular checkpoint.

    Raises:
        LayerWiseError: two names become one; or, in a regular checkpoint, the file is missing or
            damaged, or a glob of ``rename`` matches no name of the file or of ``beside``.
    """
    module: Mapping[str, Tensor] = {}
    if beside is not None:
        path = folder / MODEL_FILE.format(mp_rank=mp_rank)
        # A pipeline has its layers in files of their own.
        module = load_safely(path, with_objects=True)["module"] or {}
    else:
        # A client may have stored anything in it. The engine loads it next, at the user's risk.
        with suppress(LayerWiseError):
            if model := ModelFile.read(folder, trust=False):
                module = model.module
    known = {**dict.fromkeys(beside or ()), **module}
    renamed = new_names(known, rename, use_all=beside is not None)
    return {renamed[name]: each for name, each in module.items() if isinstance(each, Tensor)}
