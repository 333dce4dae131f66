"""What one rank owns: masters, averaged gradients and optimizer states of its shards, and what
updates them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ds_layerwise.checkpoint.record import PieceRecord, RuleRecord, ShardRecord
from ds_layerwise.errors import StepError
from ds_layerwise.optimizers.rule import Hyper, State, UpdateError, UpdateRule
from ds_layerwise.orthogonalize.batching import max_batch_numel
from ds_layerwise.orthogonalize.part_views import Seen, first_state, seen_parts
from ds_layerwise.plan.layout.layout import Layout
from ds_layerwise.plan.routes.routes import Route
from ds_layerwise.ranks.owned.buffers import FlatBuffer, ShardBuffer
from ds_layerwise.ranks.owned.host_memory import HostMemory
from ds_layerwise.ranks.owned.low_bit_states import KeptStates
from ds_layerwise.ranks.owned.reductions import ReducedGradients
from ds_layerwise.ranks.owned.row_scaling import Factors
from ds_layerwise.ranks.owned.split_master_store import Remaindered
from ds_layerwise.ranks.owned.update_sets import update_sets
from ds_layerwise.ranks.owned.update_stats import Watch
from ds_layerwise.ranks.owned.weight_writes import follow_, followed
from ds_layerwise.recipes.base.dtypes import MasterDtype
from ds_layerwise.recipes.base.recipe import StateSpec
from ds_layerwise.recipes.targets.fused_parts import whole_states

#: Beside the names of states, what a master goes by on the host.
MASTER = "fp32"


class Owned:
    """Shards of ``rank`` of every bucket, which rules update in float32.

    Where parameters are float32, masters share the memory of the parameter buffer; where gradients
    accumulate in float32, averaged gradients share the memory of the gradient buffer.

    Args:
        values: the parameter buffer; masters start as its shards.
        grads: the gradient buffer; None if averaged gradients have memory of their own.
        rules: by parameter, what updates it.
        names: by parameter, those that its experts have in a checkpoint; see
            :func:`.checkpoint.new_names.expert_names`.
        batch_matrices: whether a rule gets whole parameters together, or one by one.
        on_host: names of the parameters whose master and states are to live in host memory: who has
            little memory works in little, too, a bucket at a time. The master of a float32
            parameter is that, which stays on the device.
        pin_memory: whether that memory is page-locked.
        master_dtype: what masters of bfloat16 parameters are kept in between two updates; nothing
            is ``on_host`` unless in float32.
        rounding_seed: what chance begins with where states are rounded by chance.
        tp_size: how many parts tensor parallelism has cut matrices into.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        routes: Mapping[str, Route],
        values: FlatBuffer,
        grads: FlatBuffer | None,
        rules: Mapping[str, UpdateRule],
        *,
        names: Mapping[str, Sequence[str]],
        batch_matrices: bool,
        on_host: Collection[str] = (),
        pin_memory: bool = False,
        master_dtype: MasterDtype = "float32",
        rounding_seed: int = 0,
        tp_size: int = 1,
    ) -> None:
        self.layout, self.rank, self._rules = layout, rank, rules
        self._routes, self._names = routes, names
        self.saved_as = {name: own[rank % len(own)] for name, own in names.items()}
        """By parameter, the name that a checkpoint has for what this rank holds of it."""
        self._known_as = {saved: name for name, saved in self.saved_as.items()}
        self._values = ShardBuffer(layout, rank, [values.shard(b, rank) for b in layout.buckets])
        self.pieces = self._values.pieces
        """By bucket, what this rank holds, in memory order."""
        self.reduced = ReducedGradients(
            layout,
            rank,
            [
                torch.zeros_like(self._values.bucket(b.index), dtype=torch.float32)
                if grads is None
                else _float32(grads.shard(b, rank))
                for b in layout.buckets
            ],
        )
        self.device = self._values.bucket(0).device
        """Where the work is done."""
        self.host = HostMemory(self.device, pin_memory=pin_memory)
        self.states: dict[str, State] = {}
        """By parameter name, shaped as the parameter's rule sees it, or like the whole of which it
        sees parts.
        """
        self._kept, self._remaindered = (
            KeptStates(rounding_seed),
            Remaindered(
                layout,
                rank,
                self._values,
                [
                    b.index
                    for b in layout.buckets
                    if (master_dtype, b.dtype) == ("bfloat16+remainder", "bfloat16")
                ],
            ),
        )
        shards: list[Tensor | None] = []
        apart: dict[str, Tensor] = {}
        for index, pieces in enumerate(self.pieces):
            shard = self._values.bucket(index)
            hosted = [piece.name for piece in pieces if piece.name in on_host]
            if hosted and shard.dtype != torch.float32:
                apart.update(
                    {piece.name: _float32(self._values.piece(piece.name)) for piece in pieces}
                )
                masters = torch.empty(0, dtype=torch.float32, device=shard.device)
            else:
                masters = _float32(shard)
            self._init_states(index, hosted, masters, apart)
            shards.append(None if index in self._remaindered else masters)
        self._masters = ShardBuffer(layout, rank, shards, apart)
        self.written = torch.zeros((), dtype=torch.bool, device=self.device)
        """Whether masters had to follow values since somebody has set this to False."""
        # Made before anybody counts who looks into the memory of the parameters, see ParamSync.
        self._seen_once = {
            piece.name: self._make_views(piece.name, {})
            for pieces in self.pieces
            for piece in pieces
            if piece.name not in on_host
            and not self._remaindered.has(piece.name)
            and not any(self._kept.of(piece.name))
        }
        self._updates = update_sets(
            self.pieces,
            routes,
            rules,
            batch_matrices=batch_matrices,
            in_place=() if on_host else self._seen_once,
            tp_size=tp_size,
            most=max_batch_numel(self.device),
        )
        self._begun: set[int] = set()

    def _init_states(
        self, index: int, hosted: Sequence[str], masters: Tensor, apart: dict[str, Tensor]
    ) -> None:
        """Start the states of bucket ``index``; those of ``hosted``, and their masters, go to the
        host.
        """
        origin = self.layout.buckets[index].shard(self.rank)[0]
        for piece in self.pieces[index]:
            first = piece.start - origin
            master = (
                apart[piece.name] if piece.name in apart else masters[first : first + piece.numel]
            )
            route = self._routes[piece.name]
            by_chance = (
                (self.saved_as[piece.name], piece.param_start)
                if route.recipe.rounds_by_chance
                else None
            )
            specs = self._specs_of_states(piece.name)
            started = self._first_state(piece.name, master.view(route.stored_shape or master.shape))
            self.states[piece.name] = {
                key: self._kept.keep(piece.name, key, specs[key], value, by_chance=by_chance)
                for key, value in started.items()
            }
        moving = {
            (name, key): self.states[name][key]
            for name in hosted
            for key, spec in self._specs_of_states(name).items()
            if not spec.on_host
        }
        moving.update({(name, MASTER): apart[name] for name in hosted if name in apart})
        if moving:
            for (name, key), tensor in self.host.put(index, moving).items():
                if key == MASTER:
                    apart[name] = tensor
                else:
                    self.states[name][key] = tensor

    def _specs_of_states(self, name: str) -> Mapping[str, StateSpec]:
        """What the recipe of ``name`` keeps of this rank's piece, as its rule sees that."""
        return self._routes[name].states(self._values.piece(name).numel())

    def _first_state(self, name: str, master: Tensor) -> State:
        """The state before the first update. What is like the parameter lies in memory as that
        does.
        """
        route, init = self._routes[name], self._rules[name].init_state
        if route.parts is not None:
            return first_state(
                master, route.parts.places(tuple(master.shape)), whole_states(route.recipe), init
            )
        seen = self._seen(name, master)
        return {
            key: value.transpose(0, 1).contiguous()
            if route.by_columns and value.shape == seen.shape
            else value
            for key, value in init(seen).items()
        }

    def _shaped(self, shards: ShardBuffer, name: str) -> Tensor:
        """This rank's piece of ``name``: a matrix, a batch of them, or 1-D; blocks of columns as
        they lie.
        """
        shape = self._routes[name].stored_shape
        return shards.piece(name) if shape is None else shards.piece(name).view(shape)

    def _seen(self, name: str, value: Tensor) -> Tensor:
        """``value``, shaped like the piece of ``name``, as its rule sees it: blocks of columns are
        a batch, too.
        """
        return (
            value.transpose(0, 1) if self._routes[name].by_columns and value.dim() == 3 else value
        )

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Open while all buckets are updated, once each."""
        # An update that was left half-way may have begun some.
        self._begun.clear()
        with self.host:
            yield

    def update(
        self,
        index: int,
        param_groups: Sequence[Mapping[str, Any]],
        factor: float,
        *,
        step: int,
        factors: Mapping[str, float] | None = None,
        leave_out: Collection[str] = (),
        scaled: Mapping[str, Factors] | None = None,
        watch: Watch | None = None,
    ) -> None:
        """Multiply the gradients of bucket ``index`` by ``factor``, update masters and states, and
        write the values.

        Nothing of the parameters ``leave_out`` changes. Inside ``with owned.updating():``, last
        bucket first: some parameters of others are updated with them. It is update number ``step``
        of the run.

        Args:
            factors: by parameter, what replaces ``factor``.
            scaled: by parameter, what masters are multiplied with after their update.
            watch: what looks on.

        Raises:
            StepError: a rule cannot update a parameter, which it names; others are updated.
        """
        brought = self.host.bring(index)
        self._begin(index, brought, factor, factors or {})
        masters, opened = self._open(index, brought, leave_out)
        for update in self._updates[index]:
            for ahead in update.buckets:
                self._begin(ahead, {}, factor, factors or {})
            hyper = update.route.hyper(param_groups[update.route.group])
            seen = [
                (name, each)
                for name in update.names
                if name not in leave_out
                # What is always the same is made once.
                for each in self._seen_once.get(name) or self._make_views(name, opened)
            ]
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
        for piece in self.pieces[index]:
            if scaled and piece.name in scaled:
                master = opened.get((piece.name, MASTER))
                scaled[piece.name].scale_(
                    self._masters.piece(piece.name) if master is None else master, piece.param_start
                )
        for (name, key), value in opened.items():
            # What was brought for a parameter that is left out is there as it is kept.
            if (name, key) in self._kept and name not in leave_out:
                self._kept.write(
                    name, key, brought.get((name, key), self.states[name][key]), value, step
                )
        if masters is None:
            self._write_values(index, brought)
        else:
            self._remaindered.close(index, masters)
        self.host.send_back(index)

    def _begin(
        self,
        index: int,
        brought: Mapping[tuple[str, str], Tensor],
        factor: float,
        factors: Mapping[str, float],
    ) -> None:
        """Multiply the gradients of bucket ``index``, and let its masters follow, unless it was
        done ahead.
        """
        if index not in self._begun:
            self._begun.add(index)
            self.reduced.multiply_(index, factor, factors)
            self.follow_values(index, brought)

    def _open(
        self, index: int, brought: Mapping[tuple[str, str], Tensor], leave_out: Collection[str]
    ) -> tuple[Tensor | None, dict[tuple[str, str], Tensor]]:
        """What rules update of bucket ``index`` that is not where it lies between two updates: all
        that was ``brought``, and what is kept in fewer bits; first the masters of the whole shard,
        if they are."""
        opened, masters = dict(brought), None
        if index in self._remaindered:
            masters, pieces, written = self._remaindered.open(index)
            self.written |= written
            opened.update({(name, MASTER): master for name, master in pieces.items()})
        for piece in self.pieces[index]:
            for key in self._kept.of(piece.name) if piece.name not in leave_out else ():
                kept = brought.get((piece.name, key), self.states[piece.name][key])
                opened[piece.name, key] = self._kept.read(piece.name, key, kept)
        return masters, opened

    def _make_views(self, name: str, brought: Mapping[tuple[str, str], Tensor]) -> list[Seen]:
        """Master, gradient and state of ``name``, or of each of its parts, as its rule sees
        them.
        """
        route, grad = self._routes[name], self._shaped(self.reduced, name)
        found = brought.get((name, MASTER))
        master = (self._masters.piece(name) if found is None else found).view_as(grad)
        state = {key: brought.get((name, key), value) for key, value in self.states[name].items()}
        if route.parts is not None:
            return seen_parts(
                master,
                grad,
                state,
                route.parts.places(tuple(grad.shape)),
                whole_states(route.recipe),
            )
        return [
            Seen(
                self._seen(name, master),
                self._seen(name, grad),
                {
                    key: self._seen(name, value) if value.shape == route.stored_shape else value
                    for key, value in state.items()
                },
            )
        ]

    def masters_to_values(self, index: int) -> None:
        """Write this rank's shard of the parameter buffer from its masters."""
        if index not in self._remaindered:
            self._write_values(index, {})

    def _write_values(self, index: int, brought: Mapping[tuple[str, str], Tensor]) -> None:
        for name, values, masters in self._homes(index):
            values.copy_(brought.get((name, MASTER), masters))

    def values(self, index: int) -> Tensor:
        """This rank's shard of the parameter buffer."""
        return self._values.bucket(index)

    def follow_values(
        self, index: int, brought: Mapping[tuple[str, str], Tensor] | None = None
    ) -> None:
        """Let masters follow what somebody else than :meth:`update` has written into this rank's
        shard of the parameter buffer; see :mod:`.ranks.owned.weight_writes`. States stay as they
        are."""
        # Those with remainders follow whenever they are read.
        for name, values, masters in self._homes(index) if index not in self._remaindered else ():
            self.written |= follow_((brought or {}).get((name, MASTER), masters), values).to(
                self.device
            )

    def followed(self, name: str) -> Tensor:
        """What the next update of a parameter starts from: its master, live, or a copy of it on the
        host that has followed what was written into its value. The master waits: the old value may
        come back before the update."""
        master, value = self.value(name), self._values.piece(name)
        return followed(master, value) if value.dtype != torch.float32 else master

    def values_to_masters(self, index: int) -> None:
        """Masters from this rank's shard of the parameter buffer."""
        if index in self._remaindered:
            self._remaindered.follow(index)
            return
        for _, values, masters in self._homes(index):
            masters.copy_(values)

    def _homes(self, index: int) -> list[tuple[str, Tensor, Tensor]]:
        """Values of bucket ``index`` and masters with memory of their own: by name, or all at once
        if none is apart.
        """
        values, masters = self._values.bucket(index), self._masters.bucket(index)
        homes = (
            [("", values, masters)]
            if values.numel() == masters.numel()
            else [
                (piece.name, self._values.piece(piece.name), self._masters.piece(piece.name))
                for piece in self.pieces[index]
            ]
        )
        return [home for home in homes if home[1].data_ptr() != home[2].data_ptr()]

    def rule_records(self, elsewhere: Mapping[str, Route] | None = None) -> dict[str, RuleRecord]:
        """By name in a checkpoint, over all ranks, what that needs to know of a parameter's
        optimizer; also of those ``elsewhere``, which are not in this layout."""
        here = {
            saved: self._routes[slot.name]
            for bucket in self.layout.buckets
            for slot in bucket.slots
            for saved in self._names[slot.name]
        }
        routes = {**(elsewhere or {}), **here}
        # What a class that nobody here wrote keeps may depend on the shape, and what has parts
        # keeps by part.
        kinds = {
            name: (route.recipe, route.parts, route.matrix_shape, route.is_cut)
            for name, route in routes.items()
        }
        records = {kind: _rule_record(routes[name]) for name, kind in kinds.items()}
        return {name: records[kind] for name, kind in kinds.items()}

    def state_keys(self, name: str) -> tuple[str, ...]:
        """The states of ``name`` that have one element for each of the parameter, and ``step`` if
        there is one.
        """
        route = self._routes[name]
        shape = route.matrix_shape or (1,)
        return tuple(
            sorted(
                key for key, spec in route.states(1).items() if spec.shape == shape or key == "step"
            )
        )

    def record(self, *, to_save: bool = False) -> ShardRecord:
        """Masters and states by name in a checkpoint, as views into live memory.

        What says nothing by itself, remainders and codes, is float32 on the host, which
        :meth:`take_back` takes. With ``to_save`` masters are :meth:`followed`, to be read alone.
        """
        pieces = tuple(
            PieceRecord(
                self.saved_as[piece.name],
                piece.param_start,
                self._recorded(
                    piece.name, MASTER, self.followed if to_save else self._masters.piece
                ),
                {key: self._recorded(piece.name, key) for key in self.states[piece.name]},
            )
            for pieces in self.pieces
            for piece in pieces
        )
        return ShardRecord(
            self.rank,
            self.layout.world_size,
            self.layout.to_json(),
            self.layout.digest(),
            pieces,
            {name: tuple(saved) for name, saved in self._names.items() if len(saved) > 1},
        )

    def _recorded(
        self, name: str, key: str, master: Callable[[str], Tensor] | None = None
    ) -> Tensor:
        if self._is_live(name, key):
            value = self.states[name][key] if master is None else master(name)
        else:
            value = self.value(name, key).cpu()
        return value.view(-1) if value.shape == self._shaped(self.reduced, name).shape else value

    def _is_live(self, name: str, key: str) -> bool:
        return not (
            self._remaindered.has(name) if key == MASTER else self._kept.is_codes(name, key)
        )

    def take_back(
        self, record: ShardRecord, written: Callable[[Tensor], bool], *, masters_win: bool
    ) -> None:
        """Take over what of :meth:`record` is no view of live memory, and was ``written`` since.

        Args:
            masters_win: whether weights become what masters round to, or masters those weights that
                they do not.
        """
        for piece in record.pieces:
            name = self._known_as[piece.name]
            for key, value in {MASTER: piece.master, **piece.state}.items():
                if not self._is_live(name, key) and written(value):
                    if key == MASTER and not masters_win:
                        follow_(value, self._values.piece(name))
                    self.set_value(name, key, value)

    def value(self, name: str, key: str = MASTER) -> Tensor:
        """What this rank holds of the master of a parameter, or of one of its states; of what is
        kept in fewer bits than say it by themselves a float32 copy, else live."""
        if self._is_live(name, key):
            return self._masters.piece(name) if key == MASTER else self.states[name][key]
        return (
            self._remaindered.piece(name)
            if key == MASTER
            else self._kept.read(name, key, self.states[name][key])
        )

    def set_value(self, name: str, key: str, value: Tensor) -> None:
        """Write what :meth:`value` gives; with remainders, the weights that a master rounds to as
        well.
        """
        if key != MASTER:
            self._kept.write(
                name, key, self.states[name][key], value.view_as(self.states[name][key])
            )
        elif self._remaindered.has(name):
            self._remaindered.set_piece(name, value)
        else:
            self._masters.piece(name).copy_(value)

    @property
    def masters(self) -> tuple[Tensor, ...]:
        """The memory of masters; what it shares with parameters is in it."""
        return (*self._masters.tensors, *self._remaindered.tensors)

    @property
    def scales(self) -> tuple[Tensor, ...]:
        """The memory of states that is not in them."""
        return self._kept.tensors

    def restart(self, saved_as: str, keys: Iterable[str]) -> None:
        """Set states of a parameter, by its name in a checkpoint, back to what they are before the
        first update.
        """
        name = self._known_as[saved_as]
        start = self._first_state(name, self.value(name).view_as(self._shaped(self.reduced, name)))
        for key in keys:
            self.set_value(name, key, start[key])

    def master_from_values(self, saved_as: str) -> None:
        """The master of what this rank holds of a parameter from its place in the parameter
        buffer.
        """
        name = self._known_as[saved_as]
        values = self._values.piece(name)
        if self._remaindered.has(name) or values.data_ptr() != self._masters.piece(name).data_ptr():
            self.set_value(name, MASTER, values)


def _rule_record(route: Route) -> RuleRecord:
    return RuleRecord(
        route.recipe.family,
        tuple(sorted(route.states(1))),
        route.recipe.gradient_average,
        route.meaning,
    )


def _float32(shard: Tensor) -> Tensor:
    """A float32 copy of ``shard``, or ``shard`` itself where it is float32 already."""
    return shard.detach().float()
