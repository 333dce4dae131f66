"""What one rank owns: masters, averaged gradients and optimizer states of its shards, and what updates them."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ds_layerwise.checkpoint.record import PieceRecord, RuleRecord, ShardRecord
from ds_layerwise.errors import StepError
from ds_layerwise.optimizers.rule import Hyper, State, UpdateError, UpdateRule
from ds_layerwise.orthogonalize.parts import Seen, first_state, seen_parts
from ds_layerwise.plan.layout import Layout, Piece
from ds_layerwise.plan.routes import Route
from ds_layerwise.ranks.buffers import FlatBuffer, ShardBuffer
from ds_layerwise.ranks.host_memory import HostMemory
from ds_layerwise.ranks.sums import number_of_zeros, sum_of_squares
from ds_layerwise.ranks.watch import Watch
from ds_layerwise.ranks.writes import follow_
from ds_layerwise.recipes.parts import whole_states
from ds_layerwise.recipes.recipe import StateSpec

#: Beside the names of states, what a master goes by on the host.
MASTER = "fp32"


@dataclass(frozen=True, slots=True)
class UpdateSet:
    """Parameters of one bucket that one rule updates with the same hyper-parameters."""

    rule: UpdateRule
    route: Route
    """The route of the first; the others' differ in nothing that an update asks for."""
    names: tuple[str, ...]


class Owned:
    """Shards of ``rank`` of every bucket, in float32.

    Where parameters are float32, masters share the memory of the parameter buffer; where gradients accumulate in
    float32, averaged gradients share the memory of the gradient buffer.

    Args:
        values: the parameter buffer; masters start as its shards.
        grads: the gradient buffer; None if averaged gradients have memory of their own.
        rules: by parameter, what updates it.
        names: by parameter, those that its experts have in a checkpoint; see :func:`.checkpoint.names.expert_names`.
        batch_matrices: whether a rule gets all whole parameters of a bucket at once, or one by one.
        on_host: names of the parameters whose master and states are to live in host memory. The master of a float32
            parameter is the parameter, which stays on the device.
        pin_memory: whether that memory is page-locked.
    """

    def __init__(self, layout: Layout, rank: int, routes: Mapping[str, Route], values: FlatBuffer,
                 grads: FlatBuffer | None, rules: Mapping[str, UpdateRule], *,
                 names: Mapping[str, Sequence[str]], batch_matrices: bool,
                 on_host: Container[str] = (), pin_memory: bool = False) -> None:
        self.layout, self.rank, self._rules = layout, rank, rules
        self._routes, self._names, self._batch_matrices = routes, names, batch_matrices
        self.saved_as = {name: own[rank % len(own)] for name, own in names.items()}
        """By parameter, the name that a checkpoint has for what this rank holds of it."""
        self._known_as = {saved: name for name, saved in self.saved_as.items()}
        self._values = ShardBuffer(layout, rank, [values.shard(b, rank) for b in layout.buckets])
        self.pieces = self._values.pieces
        """By bucket, what this rank holds, in memory order."""
        self.reduced = ShardBuffer(layout, rank, [
            torch.zeros_like(self._values.bucket(b.index), dtype=torch.float32) if grads is None
            else _float32(grads.shard(b, rank)) for b in layout.buckets])
        self.device = self._values.bucket(0).device
        """Where the work is done."""
        self.host = HostMemory(self.device, pin_memory=pin_memory)
        """Open while buckets are updated."""
        self.states: dict[str, State] = {}
        """By parameter name, shaped as the parameter's rule sees it, or like the whole of which it sees parts."""
        shards, apart = [], {}
        for index, pieces in enumerate(self.pieces):
            shard = self._values.bucket(index)
            hosted = [piece.name for piece in pieces if piece.name in on_host]
            if hosted and shard.dtype != torch.float32:
                apart.update({piece.name: _float32(self._values.piece(piece.name)) for piece in pieces})
                shards.append(torch.empty(0, dtype=torch.float32, device=shard.device))
            else:
                shards.append(_float32(shard))
            self._init_states(index, hosted, shards[index], apart)
        self.masters = ShardBuffer(layout, rank, shards, apart)
        self.written = torch.zeros((), dtype=torch.bool, device=self._values.bucket(0).device)
        """Whether masters had to follow values since somebody has set this to False."""
        self._updates = [self._update_sets(pieces) for pieces in self.pieces]
        # Made before anybody counts who looks into the memory of the parameters, see ParamSync.
        self._seen_once = {piece.name: self._make_views(piece.name, {}) for pieces in self.pieces for piece in pieces
                           if piece.name not in on_host}

    def _init_states(self, index: int, hosted: Sequence[str], masters: Tensor, apart: dict[str, Tensor]) -> None:
        """Start the states of bucket ``index``; those of ``hosted``, and their masters, go to the host."""
        origin = self.layout.buckets[index].shard(self.rank)[0]
        for piece in self.pieces[index]:
            first = piece.start - origin
            master = apart[piece.name] if piece.name in apart else masters[first:first + piece.numel]
            self.states[piece.name] = self._first_state(
                piece.name, master.view(self._routes[piece.name].stored_shape or master.shape))
        moving = {(name, key): self.states[name][key] for name in hosted
                  for key, spec in self._specs_of_states(name).items() if not spec.on_host}
        moving.update({(name, MASTER): apart[name] for name in hosted if name in apart})
        if moving:
            for (name, key), tensor in self.host.put(index, moving).items():
                if key == MASTER:
                    apart[name] = tensor
                else:
                    self.states[name][key] = tensor

    def _specs_of_states(self, name: str) -> dict[str, StateSpec]:
        """What the recipe of ``name`` keeps of this rank's piece, as its rule sees that."""
        return self._routes[name].states(self._values.piece(name).numel())

    def _first_state(self, name: str, master: Tensor) -> State:
        """The state before the first update. What is like the parameter lies in memory as that does."""
        route, init = self._routes[name], self._rules[name].init_state
        if route.parts is not None:
            return first_state(master, route.parts.places(tuple(master.shape)), whole_states(route.recipe), init)
        seen = self._seen(name, master)
        return {key: value.transpose(0, 1).contiguous() if route.by_columns and value.shape == seen.shape else value
                for key, value in init(seen).items()}

    def _update_sets(self, pieces: Sequence[Piece]) -> list[UpdateSet]:
        sets: dict[object, list[str]] = {}
        for piece in pieces:
            route = self._routes[piece.name]
            # Copies are as large as what is copied: one parameter after another.
            alone = piece.name if route.copied or (route.whole and not self._batch_matrices) else None
            same = replace(route, name="", reason="", matrix_shape=None, transposed=False, parts=None, is_cut=False,
                           by_user=False, sent_away=False)
            sets.setdefault((same, alone), []).append(piece.name)
        return [UpdateSet(self._rules[names[0]], self._routes[names[0]], tuple(names)) for names in sets.values()]

    def _shaped(self, shards: ShardBuffer, name: str) -> Tensor:
        """This rank's piece of ``name``: a matrix, a batch of them, or 1-D; blocks of columns as they lie."""
        shape = self._routes[name].stored_shape
        return shards.piece(name) if shape is None else shards.piece(name).view(shape)

    def _seen(self, name: str, value: Tensor) -> Tensor:
        """``value``, shaped like the piece of ``name``, as its rule sees it: blocks of columns are a batch, too."""
        return value.transpose(0, 1) if self._routes[name].by_columns and value.dim() == 3 else value

    def _seen_state(self, name: str, value: Tensor) -> Tensor:
        """One of the states of ``name`` as its rule sees it."""
        return self._seen(name, value) if value.shape == self._routes[name].stored_shape else value

    def sum_of_squares(self, *, leave_out: Collection[str] = (), only: Collection[str] | None = None) -> Tensor:
        """The sum of squares of this rank's averaged gradients, 0-d; see :func:`.ranks.sums.sum_of_squares`.

        Args:
            leave_out, only: parameters that do not count, and those that do alone; None for all.
        """
        return sum_of_squares([self.reduced.piece(piece.name) for pieces in self.pieces for piece in pieces
                               if piece.name not in leave_out and (only is None or piece.name in only)], self.device)

    def zeros_in_gradients(self, *, leave_out: Collection[str]) -> Tensor:
        """How many elements of this rank's averaged gradients are zero, 0-d."""
        return number_of_zeros([self.reduced.piece(piece.name) for pieces in self.pieces for piece in pieces
                                if piece.name not in leave_out], self.device)

    def update(self, index: int, param_groups: Sequence[Mapping[str, Any]], factor: float, *,
               factors: Mapping[str, float] | None = None, leave_out: Collection[str] = (),
               watch: Watch | None = None) -> None:
        """Multiply the gradients of bucket ``index`` by ``factor``, update masters and states, and write the values.

        Nothing of the parameters ``leave_out`` changes. Inside ``with owned.host:``, last bucket first.

        Args:
            factors: by parameter, what replaces ``factor``.
            watch: what looks on.

        Raises:
            StepError: a rule cannot update a parameter, which it names; others are updated.
        """
        self._multiply_gradients(index, factor, factors or {})
        brought = self.host.bring(index)
        self._follow_values(index, brought)
        for update in self._updates[index]:
            hyper = update.route.hyper(param_groups[update.route.group])
            seen = [(name, each) for name in update.names if name not in leave_out
                    for each in self._views_of(name, brought)]
            if not seen:
                continue
            copies = [each.copy() for _, each in seen]
            params, grads, states, *_ = zip(*copies, strict=True)
            names = [name for name, _ in seen]
            before = None if watch is None else watch.before(names, params)
            try:
                update.rule.update_(params, grads, states, Hyper(**hyper))
            except UpdateError as error:
                raise StepError(f"{names[error.index]}: {error}") from error
            if watch is not None and before is not None:
                watch.after(update.route.recipe.rule, names, before, params, states)
            for (_, each), copy in zip(seen, copies, strict=True):
                each.take_back(copy)
        self._write_values(index, brought)
        self.host.send_back(index)

    def _multiply_gradients(self, index: int, factor: float, factors: Mapping[str, float]) -> None:
        alike: dict[float, list[Tensor]] = {}
        for piece in self.pieces[index]:
            alike.setdefault(factors.get(piece.name, factor), []).append(self.reduced.piece(piece.name))
        for each, gradients in alike.items():
            if each != 1:
                torch._foreach_mul_(gradients, each)

    def _views_of(self, name: str, brought: Mapping[tuple[str, str], Tensor]) -> list[Seen]:
        """Master, gradient and state of ``name``, or of each of its parts, as its rule sees them; what is always the
        same is made once."""
        return self._seen_once.get(name) or self._make_views(name, brought)

    def _make_views(self, name: str, brought: Mapping[tuple[str, str], Tensor]) -> list[Seen]:
        route, grad = self._routes[name], self._shaped(self.reduced, name)
        master = brought.get((name, MASTER), self.masters.piece(name)).view_as(grad)
        state = {key: brought.get((name, key), value) for key, value in self.states[name].items()}
        if route.parts is not None:
            return seen_parts(master, grad, state, route.parts.places(tuple(grad.shape)), whole_states(route.recipe))
        return [Seen(self._seen(name, master), self._seen(name, grad),
                     {key: self._seen_state(name, value) for key, value in state.items()})]

    def masters_to_values(self, index: int) -> None:
        """Write this rank's shard of the parameter buffer from its masters."""
        self._write_values(index, {})

    def _write_values(self, index: int, brought: Mapping[tuple[str, str], Tensor]) -> None:
        for name, values, masters in self._homes(index):
            if values.data_ptr() != masters.data_ptr():
                values.copy_(brought.get((name, MASTER), masters))

    def follow_values(self, index: int) -> None:
        """Let masters follow what somebody else than :meth:`update` has written into this rank's shard of the parameter
        buffer; see :mod:`.ranks.writes`. States stay as they are."""
        self._follow_values(index, {})

    def follow_value(self, name: str) -> None:
        """Let the master of what this rank holds of one parameter follow its value."""
        self._follow(self._values.piece(name), self.masters.piece(name))

    def _follow_values(self, index: int, brought: Mapping[tuple[str, str], Tensor]) -> None:
        for name, values, masters in self._homes(index):
            self._follow(values, brought.get((name, MASTER), masters))

    def _follow(self, values: Tensor, masters: Tensor) -> None:
        if values.data_ptr() != masters.data_ptr():
            self.written |= follow_(masters, values).to(self.written.device)

    def values_to_masters(self, index: int) -> None:
        """Masters from this rank's shard of the parameter buffer."""
        for _, values, masters in self._homes(index):
            if values.data_ptr() != masters.data_ptr():
                masters.copy_(values)

    def _homes(self, index: int) -> list[tuple[str, Tensor, Tensor]]:
        """Values and masters of bucket ``index``: piece by piece by name, or all at once where neither is apart."""
        values, masters = self._values.bucket(index), self.masters.bucket(index)
        if values.numel() == masters.numel():
            return [("", values, masters)]
        return [(piece.name, self._values.piece(piece.name), self.masters.piece(piece.name))
                for piece in self.pieces[index]]

    def rule_records(self, elsewhere: Mapping[str, Route] | None = None) -> dict[str, RuleRecord]:
        """By name in a checkpoint, over all ranks, what that needs to know of a parameter's optimizer; also of those
        ``elsewhere``, which are not in this layout."""
        here = {saved: self._routes[slot.name]
                for bucket in self.layout.buckets for slot in bucket.slots for saved in self._names[slot.name]}
        routes = {**(elsewhere or {}), **here}
        # What a class that nobody here wrote keeps may depend on the shape, and what has parts keeps by part.
        kinds = {name: (route.recipe, route.parts, route.matrix_shape) for name, route in routes.items()}
        records = {kind: _rule_record(routes[name]) for name, kind in kinds.items()}
        return {name: records[kind] for name, kind in kinds.items()}

    def state_keys(self, name: str) -> tuple[str, ...]:
        """The states of ``name`` that have one element for each of the parameter, and ``step`` if there is one."""
        route = self._routes[name]
        shape = route.matrix_shape or (1,)
        return tuple(sorted(key for key, spec in route.states(1).items() if spec.shape == shape or key == "step"))

    def record(self) -> ShardRecord:
        """Masters and states by name in a checkpoint, as views into live memory."""
        pieces = tuple(
            PieceRecord(self.saved_as[piece.name], piece.param_start, self.masters.piece(piece.name),
                        {key: value.view(-1) if value.shape == self._shaped(self.masters, piece.name).shape else value
                         for key, value in self.states[piece.name].items()})
            for pieces in self.pieces for piece in pieces)
        return ShardRecord(self.rank, self.layout.world_size, self.layout.to_json(), self.layout.digest(), pieces,
                           {name: tuple(saved) for name, saved in self._names.items() if len(saved) > 1})

    def restart(self, saved_as: str, keys: Iterable[str]) -> None:
        """Set states of a parameter, by its name in a checkpoint, back to what they are before the first update."""
        name = self._known_as[saved_as]
        start = self._first_state(name, self._shaped(self.masters, name))
        for key in keys:
            self.states[name][key].copy_(start[key])

    def master_from_values(self, saved_as: str) -> None:
        """The master of what this rank holds of a parameter from its place in the parameter buffer."""
        name = self._known_as[saved_as]
        values, master = self._values.piece(name), self.masters.piece(name)
        if values.data_ptr() != master.data_ptr():
            master.copy_(values)


def _rule_record(route: Route) -> RuleRecord:
    return RuleRecord(route.recipe.family, tuple(sorted(route.states(1))), route.recipe.gradient_average)


def _float32(shard: Tensor) -> Tensor:
    """A float32 copy of ``shard``, or ``shard`` itself where it is float32 already."""
    return shard.detach().float()
