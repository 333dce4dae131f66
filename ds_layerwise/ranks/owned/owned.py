"""The masters, averaged gradients and optimizer states of one rank's shards, and their update."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ds_layerwise.checkpoint.record import PieceRecord
from ds_layerwise.config.targets.fused_parts import whole_states
from ds_layerwise.errors import StepError
from ds_layerwise.optimizers.base.dtypes import MasterDtype
from ds_layerwise.optimizers.base.one_step import Hyper, Site, State, UpdateError
from ds_layerwise.optimizers.base.recipe import StateSpec
from ds_layerwise.orthogonalize.batching import max_batch_numel
from ds_layerwise.orthogonalize.tensor_shards import ShardPeers
from ds_layerwise.plan.layout.layout import Piece
from ds_layerwise.ranks.owned.buffers import FlatBuffer, OwnShards, ShardBuffer
from ds_layerwise.ranks.owned.host_memory import HostMemory
from ds_layerwise.ranks.owned.low_bit_states import LowBitStates
from ds_layerwise.ranks.owned.reductions import ReducedGradients
from ds_layerwise.ranks.owned.row_scaling import Factors
from ds_layerwise.ranks.owned.split_master_store import SplitMasters
from ds_layerwise.ranks.owned.update_sets import UpdateSet, update_sets
from ds_layerwise.ranks.owned.update_stats import UpdateStats
from ds_layerwise.ranks.owned.weight_writes import follow_, followed
from ds_layerwise.routing.part_views import Seen, first_state, seen_parts
from ds_layerwise.routing.routes import ParamGroups, Route, Routes

#: The key of a master among the keys of states.
MASTER = "fp32"

#: Masters and states by parameter and name, used instead of those stored in place.
Opened = Mapping[tuple[str, str], Tensor]

#: The empty mapping, as a default value.
NONE: Mapping[Any, Any] = MappingProxyType({})


@dataclass(frozen=True)
class OwnedSettings:
    """The settings of an :class:`Owned`."""

    names: Mapping[str, Sequence[str]]
    """The names of a parameter's experts in a checkpoint, by parameter; see
    :func:`.checkpoint.new_names.expert_names`.
    """
    batch_matrices: bool
    """True if a rule gets whole parameters together, and not one by one."""
    on_host: Collection[str] = ()
    """The parameters whose masters and states are in host memory and come to the device one bucket
    at a time. The master of a float32 parameter is the parameter itself, which stays on the device.
    """
    pin_memory: bool = False
    """True if that host memory is page-locked."""
    master_dtype: MasterDtype = "float32"
    """The form of the masters of bfloat16 parameters between updates; float32 with ``on_host``."""
    rounding_seed: int = 0
    """The seed of stochastic rounding of states."""
    peers: ShardPeers | None = None
    """The ranks with the other tensor shards; None if there are none."""
    fast_dtypes: frozenset[torch.dtype] = frozenset()
    """See :attr:`.Site.fast_dtypes`."""

    def site(self, route: Route) -> Site:
        """Return the place where the parameter of ``route`` is updated."""
        if self.peers is None or route.tp_axis is None:
            return Site(self.fast_dtypes)
        return Site(self.fast_dtypes, (route.tp_axis, self.peers))


class Owned:
    """The shards of ``rank`` in every bucket, which rules update in float32.

    The masters of float32 parameters share the memory of the parameter buffer. If gradients are
    accumulated in float32, the averaged gradients share the memory of the gradient buffer.

    Args:
        values: the parameter buffer, whose shards are the initial masters.
        grads: the gradient buffer; None if averaged gradients have memory of their own.
    """

    def __init__(
        self,
        rank: int,
        routes: Routes,
        values: FlatBuffer | OwnShards,
        grads: FlatBuffer | None,
        settings: OwnedSettings,
    ) -> None:
        self.layout = layout = values.layout
        self.rank = rank
        self._site_of = settings.site
        self._routes = routes
        self._names = settings.names
        self.saved_as = {name: own[rank % len(own)] for name, own in settings.names.items()}
        """The checkpoint name of this rank's piece of a parameter, by parameter."""
        self._known_as = {saved: name for name, saved in self.saved_as.items()}
        self._values = ShardBuffer(layout, rank, [values.shard(b, rank) for b in layout.buckets])
        self.pieces = self._values.pieces
        """This rank's pieces, by bucket, in memory order."""
        reduced = []
        for bucket, shard in zip(layout.buckets, self._values.tensors, strict=True):
            if grads is None:
                reduced.append(torch.zeros_like(shard, dtype=torch.float32))
            else:
                reduced.append(_float32(grads.shard(bucket, rank)))
        self.reduced = ReducedGradients(layout, rank, reduced)
        self.device = self._values.bucket(0).device
        """The device that runs the updates."""
        self.host = HostMemory(self.device, pin_memory=settings.pin_memory)
        self.states: dict[str, State] = {}
        """The states by parameter, in the shape that the parameter's rule sees; if it sees parts,
        in the shape of the whole.
        """
        self._low_bit = LowBitStates(settings.rounding_seed)
        has_split_masters = settings.master_dtype == "bfloat16+remainder"
        self._split = SplitMasters(
            self._values,
            [b.index for b in layout.buckets if has_split_masters and b.dtype == "bfloat16"],
        )
        self._init_masters(settings.on_host)
        self.written = torch.zeros((), dtype=torch.bool, device=self.device)
        """True after masters have followed the values, until a reader sets it to False."""
        self._views_once = {
            name: self._make_views(name, {})
            for name in self.states
            if name not in settings.on_host
            and not self._split.has(name)
            and not self._low_bit.of(name)
        }
        self._updates = update_sets(
            self.pieces,
            routes,
            batch_matrices=settings.batch_matrices,
            in_place=() if settings.on_host else self._views_once,
            tp_size=1 if settings.peers is None else settings.peers.size,
            most=max_batch_numel(self.device),
        )
        self._begun: set[int] = set()

    def _init_masters(self, on_host: Collection[str]) -> None:
        """Create masters and initial states, bucket by bucket. Those ``on_host`` move there at
        once.
        """
        shards: list[Tensor | None] = []
        apart: dict[str, Tensor] = {}
        for index, pieces in enumerate(self.pieces):
            shard = self._values.bucket(index)
            hosted = [piece.name for piece in pieces if piece.name in on_host]
            if hosted and shard.dtype != torch.float32:
                masters = {piece.name: _float32(self._values.piece(piece.name)) for piece in pieces}
                apart.update(masters)
                shards.append(None)
            else:
                shard = _float32(shard)
                masters = self._values.pieces_of(index, shard)
                shards.append(None if index in self._split else shard)
            for piece in pieces:
                self._init_states(piece, masters[piece.name])
            del masters
            self._move_to_host(index, hosted, apart)
        self._masters = ShardBuffer(self.layout, self.rank, shards, apart)

    def _move_to_host(self, index: int, names: Sequence[str], apart: dict[str, Tensor]) -> None:
        """Move the states of bucket ``index``, and the masters in ``apart``, to the host."""
        moving = {(name, MASTER): apart[name] for name in names if name in apart}
        for name in names:
            for key, spec in self._state_specs(name).items():
                if not spec.on_host:
                    moving[name, key] = self.states[name][key]
        if moving:
            for (name, key), tensor in self.host.put(index, moving).items():
                if key == MASTER:
                    apart[name] = tensor
                else:
                    self.states[name][key] = tensor

    def _init_states(self, piece: Piece, master: Tensor) -> None:
        """Create the initial states of a piece."""
        name = piece.name
        route = self._routes[name]
        seed = (self.saved_as[name], piece.param_start) if route.recipe.rounds_by_chance else None
        specs = self._state_specs(name)
        first = self._first_state(name, master.view(route.stored_shape or master.shape))
        self.states[name] = {
            key: self._low_bit.keep(name, key, specs[key], value, by_chance=seed)
            for key, value in first.items()
        }

    def _state_specs(self, name: str) -> Mapping[str, StateSpec]:
        """Return the specs of the states that the recipe of ``name`` has for this rank's piece."""
        return self._routes[name].states(self._values.piece(name).numel())

    def _first_state(self, name: str, master: Tensor) -> State:
        """Return the initial state, in the memory order of the parameter."""
        route = self._routes[name]
        init = route.recipe.init_state
        if route.parts is not None:
            places = route.parts.places(tuple(master.shape))
            return first_state(master, places, whole_states(route.recipe), init)
        seen = self._as_seen(name, master)
        state = init(seen)
        for key, value in state.items():
            if route.by_columns and value.shape == seen.shape:
                state[key] = value.transpose(0, 1).contiguous()
        return state

    def _as_seen(self, name: str, value: Tensor) -> Tensor:
        """Return ``value`` in the shape that the rule of ``name`` sees; blocks of columns become a
        batch, too.
        """
        if self._routes[name].by_columns and value.dim() == 3:
            return value.transpose(0, 1)
        return value

    def _gradient(self, name: str) -> Tensor:
        """Return the gradient of ``name`` in its stored shape: a matrix, a batch of matrices, or
        1-D.
        """
        shape = self._routes[name].stored_shape
        gradient = self.reduced.piece(name)
        if shape is None:
            return gradient
        return gradient.view(shape)

    def _at(self, name: str, key: str, opened: Opened) -> Tensor:
        """Return a state or a master: the one in ``opened``, else the stored one."""
        if (name, key) in opened:
            return opened[name, key]
        if key == MASTER:
            return self._masters.piece(name)
        return self.states[name][key]

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Enter this context to update all buckets, once each."""
        # An interrupted update may have begun some buckets.
        self._begun.clear()
        with self.host:
            yield

    def update(
        self,
        index: int,
        param_groups: ParamGroups,
        rescale_: Callable[[Mapping[str, Tensor]], None],
        *,
        step: int,
        leave_out: Collection[str] = (),
        scaled: Mapping[str, Factors] = NONE,
        watch: UpdateStats | None = None,
    ) -> None:
        """Rescale the gradients of bucket ``index``, update its masters and states, and write the
        values.

        Parameters in ``leave_out`` do not change. Call it inside ``with owned.updating():``, last
        bucket first. It also updates some parameters of other buckets, batched with those of this
        one.

        Args:
            rescale_: rescales gradients in place, by parameter, as all ranks have decided.
            step: the number of this update in the run.
            scaled: the factors for masters after their update, by parameter.
            watch: the statistics to add to.

        Raises:
            StepError: a rule cannot update a parameter; names the parameter. Others are updated.
        """
        brought = self.host.bring(index)
        self._begin(index, brought, rescale_)
        masters, opened = self._open(index, brought, leave_out)
        for update in self._updates[index]:
            for ahead in update.buckets:
                self._begin(ahead, NONE, rescale_)
            self._run(update, param_groups, opened, leave_out, watch)
        for piece in self.pieces[index]:
            if piece.name in scaled:
                master = self._at(piece.name, MASTER, opened)
                scaled[piece.name].scale_(master, piece.param_start)
        for (name, key), value in opened.items():
            # A parameter in ``leave_out`` was brought in its stored form.
            if (name, key) in self._low_bit and name not in leave_out:
                self._low_bit.write(name, key, self._at(name, key, brought), value, step)
        if masters is None:
            self.masters_to_values(index, brought)
        else:
            self._split.close(index, masters)
        self.host.send_back(index)

    def _run(
        self,
        update: UpdateSet,
        param_groups: ParamGroups,
        opened: Opened,
        leave_out: Collection[str],
        watch: UpdateStats | None,
    ) -> None:
        """Run a rule on those of its parameters that are not in ``leave_out``."""
        names: list[str] = []
        views: list[Seen] = []
        for name in update.names:
            if name not in leave_out:
                # Views that never change are made once.
                own = self._views_once.get(name) or self._make_views(name, opened)
                views += own
                names += [name] * len(own)
        if not views:
            return
        copies = [view.copy() for view in views]
        params, grads, states, *_ = zip(*copies, strict=True)
        before = [] if watch is None else watch.before(names, params)
        route = update.route
        hyper = Hyper(**route.hyper(param_groups[route.group]))
        try:
            route.recipe.update_(params, grads, states, hyper, self._site_of(route))
        except UpdateError as error:
            raise StepError(f"{names[error.index]}: {error}") from error
        if watch is not None:
            watch.after(route.recipe.rule, names, before, params, states)
        for view, copy in zip(views, copies, strict=True):
            view.take_back(copy)

    def _begin(
        self, index: int, brought: Opened, rescale_: Callable[[Mapping[str, Tensor]], None]
    ) -> None:
        """Average and rescale the gradients of bucket ``index`` and let its masters follow written
        weights, unless that was done ahead.
        """
        if index not in self._begun:
            self._begun.add(index)
            if self.reduced.divide_by != 1:
                self.reduced.bucket(index).div_(self.reduced.divide_by)
            rescale_({piece.name: self.reduced.piece(piece.name) for piece in self.pieces[index]})
            self.follow_values(index, brought)

    def _open(
        self, index: int, brought: Opened, leave_out: Collection[str]
    ) -> tuple[Tensor | None, Opened]:
        """Return the tensors of bucket ``index`` that rules update in temporary memory: everything
        in ``brought``, and the float32 form of states that are stored in fewer bits.

        If masters are split, the first element is one tensor for the whole shard, else None.
        """
        opened = dict(brought)
        masters = None
        if index in self._split:
            masters, written = self._split.open(index)
            self.written |= written
            for name, master in self._values.pieces_of(index, masters).items():
                opened[name, MASTER] = master
        for piece in self.pieces[index]:
            if piece.name not in leave_out:
                for key in self._low_bit.of(piece.name):
                    kept = self._at(piece.name, key, brought)
                    opened[piece.name, key] = self._low_bit.read(piece.name, key, kept)
        return masters, opened

    def _make_views(self, name: str, opened: Opened) -> list[Seen]:
        """Return the master, gradient and state of ``name``, or of each of its parts, in the shapes
        that its rule sees.
        """
        route = self._routes[name]
        grad = self._gradient(name)
        master = self._at(name, MASTER, opened).view_as(grad)
        state = {key: self._at(name, key, opened) for key in self.states[name]}
        if route.parts is not None:
            places = route.parts.places(tuple(grad.shape))
            return seen_parts(master, grad, state, places, whole_states(route.recipe))
        for key, value in state.items():
            if value.shape == route.stored_shape:
                state[key] = self._as_seen(name, value)
        return [Seen(self._as_seen(name, master), self._as_seen(name, grad), state)]

    def values(self, index: int) -> Tensor:
        """Return this rank's shard of the parameter buffer."""
        return self._values.bucket(index)

    def masters_to_values(self, index: int, brought: Opened = NONE) -> None:
        """Write this rank's shard of the parameter buffer from its masters."""
        for name, values, masters in self._homes(index):
            values.copy_(brought.get((name, MASTER), masters))

    def follow_values(self, index: int, brought: Opened = NONE) -> None:
        """Update masters from weights that something other than :meth:`update` has written into
        this rank's shard of the parameter buffer; see :mod:`.ranks.owned.weight_writes`.

        States do not change. Split masters follow whenever they are read.
        """
        for name, values, masters in self._homes(index):
            followed = follow_(brought.get((name, MASTER), masters), values)
            self.written |= followed.to(self.device)

    def values_to_masters(self, index: int) -> None:
        """Set the masters from this rank's shard of the parameter buffer."""
        if index in self._split:
            self._split.follow(index)
        for _, values, masters in self._homes(index):
            masters.copy_(values)

    def _homes(self, index: int) -> list[tuple[str, Tensor, Tensor]]:
        """List the values of bucket ``index`` with the masters that have memory of their own: by
        name, or as one entry without a name if none is separate.
        """
        values = self._values.bucket(index)
        if values.dtype == torch.float32 or index in self._split:
            return []
        if self._masters.has(index):
            return [("", values, self._masters.bucket(index))]
        found = []
        for piece in self.pieces[index]:
            found.append(
                (piece.name, self._values.piece(piece.name), self._masters.piece(piece.name))
            )
        return found

    def followed(self, name: str) -> Tensor:
        """Return the master that the next update of a parameter starts from.

        It is the stored master, or, if its weight was written, a copy on the host that follows the
        write. The stored master stays as it is, because the old weight may come back before the
        update.
        """
        master = self.value(name)
        value = self._values.piece(name)
        if value.dtype == torch.float32:
            return master
        return followed(master, value)

    def state_keys(self, name: str) -> tuple[str, ...]:
        """Return the names of the states of ``name`` with one element per element of the parameter,
        and ``step`` if there is one.
        """
        route = self._routes[name]
        shape = route.matrix_shape or (1,)
        specs = route.states(1).items()
        return tuple(sorted(key for key, spec in specs if spec.shape == shape or key == "step"))

    def record(self, *, to_save: bool = False) -> list[PieceRecord]:
        """Return masters and states by name in a checkpoint, as views into live memory.

        Split masters and 8-bit codes mean nothing by themselves: they are returned as float32 on
        the host, for :meth:`take_back`. With ``to_save``, masters are those of :meth:`followed` and
        must only be read.
        """
        records = []
        for pieces in self.pieces:
            for piece in pieces:
                name = piece.name
                follows = to_save and self._is_live(name, MASTER)
                master = self.followed(name) if follows else self._recorded(name, MASTER)
                state = {}
                for key in self.states[name]:
                    state[key] = self._recorded(name, key)
                records.append(PieceRecord(self.saved_as[name], piece.param_start, master, state))
        return records

    def _recorded(self, name: str, key: str) -> Tensor:
        """Return a master or a state in the form of :meth:`record`."""
        if self._is_live(name, key):
            value = self._at(name, key, NONE)
        else:
            value = self.value(name, key).cpu()
        if value.shape == self._gradient(name).shape:
            return value.view(-1)
        return value

    def _is_live(self, name: str, key: str) -> bool:
        if key == MASTER:
            return not self._split.has(name)
        return not self._low_bit.is_codes(name, key)

    def take_back(
        self, record: Sequence[PieceRecord], written: Callable[[Tensor], bool], *, masters_win: bool
    ) -> None:
        """Store the tensors of :meth:`record` that are not views of live memory and have been
        ``written`` since.

        Args:
            masters_win: True to set weights to the rounded masters; False to set masters to weights
                that they do not round to.
        """
        for piece in record:
            name = self._known_as[piece.name]
            for key, value in {MASTER: piece.master, **piece.state}.items():
                if not self._is_live(name, key) and written(value):
                    if key == MASTER and not masters_win:
                        follow_(value, self._values.piece(name))
                    self.set_value(name, key, value)

    def value(self, name: str, key: str = MASTER) -> Tensor:
        """Return this rank's piece of the master of a parameter, or of one of its states. It is
        live memory, or a float32 copy if the stored form means nothing by itself.
        """
        if self._is_live(name, key):
            return self._at(name, key, NONE)
        if key == MASTER:
            return self._split.piece(name)
        return self._low_bit.read(name, key, self.states[name][key])

    def set_value(self, name: str, key: str, value: Tensor) -> None:
        """Set the piece that :meth:`value` returns. For a split master, this also sets the weights
        it rounds to.
        """
        if key != MASTER:
            state = self.states[name][key]
            self._low_bit.write(name, key, state, value.view_as(state))
        elif self._split.has(name):
            self._split.set_piece(name, value)
        else:
            self._masters.piece(name).copy_(value)

    def set_weight(self, name: str, value: Tensor) -> None:
        """Write this rank's piece of a parameter. Its master does not follow yet."""
        self._values.piece(name).copy_(value)

    @property
    def masters(self) -> tuple[Tensor, ...]:
        """The memory of masters, including memory that they share with parameters."""
        return (*self._masters.tensors, *self._split.tensors)

    @property
    def scales(self) -> tuple[Tensor, ...]:
        """The memory of scales, which are stored beside their states."""
        return self._low_bit.tensors

    def restart(self, saved_as: str, keys: Iterable[str]) -> None:
        """Reset states of a parameter, given by its name in a checkpoint, to their initial
        values.
        """
        name = self._known_as[saved_as]
        start = self._first_state(name, self.value(name).view_as(self._gradient(name)))
        for key in keys:
            self.set_value(name, key, start[key])

    def master_from_values(self, saved_as: str) -> None:
        """Set this rank's piece of a master, given by its name in a checkpoint, from the
        weights.
        """
        name = self._known_as[saved_as]
        values = self._values.piece(name)
        if values.dtype != torch.float32:
            self.set_value(name, MASTER, values)


def _float32(shard: Tensor) -> Tensor:
    """Return ``shard`` itself if it is float32, else a float32 copy."""
    return shard.detach().float()
