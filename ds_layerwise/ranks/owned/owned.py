"""The masters, averaged gradients and optimizer states of one rank's shards, and their update."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import methodcaller

import torch
from torch import Tensor

from ds_layerwise.checkpoint.new_names import place_of
from ds_layerwise.checkpoint.record import PieceRecord
from ds_layerwise.errors import StepError
from ds_layerwise.optimizers.dtypes import MasterDtype
from ds_layerwise.optimizers.recipe import Hyper, Site, State, StateSpec, UpdateError
from ds_layerwise.optimizers.scalars import multiply_
from ds_layerwise.orthogonalize.batching import max_batch_numel
from ds_layerwise.orthogonalize.tensor_shards import ShardPeers
from ds_layerwise.plan.layout.layout import Piece
from ds_layerwise.ranks.owned.buffers import DTYPES, FlatBuffer, ShardBuffer
from ds_layerwise.ranks.owned.captured import Captured, CudaGraph, NewGraph, Numbers
from ds_layerwise.ranks.owned.forms import Chance, Form, form_of
from ds_layerwise.ranks.owned.host_memory import HostMemory
from ds_layerwise.ranks.owned.masters import Masters, OwnMasters, SplitMasters
from ds_layerwise.ranks.owned.reductions import ReducedGradients
from ds_layerwise.ranks.owned.row_scaling import Factors
from ds_layerwise.ranks.owned.update_sets import UpdateSet, update_sets
from ds_layerwise.ranks.owned.weight_writes import follow_, followed, weights_of
from ds_layerwise.routing.part_views import Seen
from ds_layerwise.routing.routes import ParamGroups, Route, Routes

#: The key of a master among the keys of states.
MASTER = "fp32"


@dataclass(frozen=True)
class OwnedSettings:
    """The settings of an :class:`Owned`."""

    names: Mapping[str, Sequence[str]]
    """The names of a parameter's experts in a checkpoint, by parameter; see
    :func:`.checkpoint.new_names.expert_names`.
    """
    batch_matrices: bool
    """True if a rule gets whole parameters together, and not one by one."""
    on_host: Collection[str]
    """The parameters whose masters and states are in host memory and come to the device one bucket
    at a time. The master of a float32 parameter is the parameter itself, which stays on the device.
    """
    pin_memory: bool
    """True if that host memory is page-locked."""
    master_dtype: MasterDtype
    """The form of the masters of bfloat16 parameters between updates; float32 with ``on_host``."""
    rounding_seed: int
    """The seed of stochastic rounding of states."""
    peers: ShardPeers | None
    """The ranks with the other tensor shards; None if there are none."""
    fast_dtypes: frozenset[torch.dtype]
    """See :attr:`.Site.fast_dtypes`."""
    expert_rank: int
    """The number of this rank among those that experts are dealt out to."""
    new_graph: NewGraph | None = None
    """Makes graphs of the device, to capture updates; None to capture none."""
    sums_as: Sequence[str] | None = None
    """The dtype in which sums of gradients are kept, by bucket; None for float32."""

    def site(self, route: Route) -> Site:
        """Return the place where the parameter of ``route`` is updated."""
        if self.peers is None or route.tp_axis is None:
            return Site(self.fast_dtypes)
        return Site(self.fast_dtypes, (route.tp_axis, self.peers.with_lengths(route.tp_lengths)))


def unwatched(*_: object) -> AbstractContextManager[None]:
    """Enclose a call of a rule in nothing. The call is given by the rule's name, and the names,
    masters and states of what it updates, which are as many.
    """
    return nullcontext()


@dataclass(eq=False)
class OneUpdate:
    """The settings of one update of all buckets, as all ranks have decided them."""

    groups: ParamGroups
    number: int
    """The number of this update in the run. A skipped step is tried again under the same number."""
    factor_of: Callable[[str], float]
    """Returns the factor of a parameter's averaged gradient."""
    leave_out: frozenset[str]
    """The parameters that do not change."""
    scaled: dict[str, Factors] = field(default_factory=dict)
    """The factors by which masters are multiplied after their update, by parameter."""
    around: Callable[..., AbstractContextManager[None]] = unwatched
    """Encloses each call of a rule; see :func:`unwatched`."""

    def hyper(self, route: Route) -> Hyper:
        """Return the settings of the parameters of ``route``."""
        return Hyper(**route.hyper(self.groups[route.group]))


class Owned:
    """The shards of one rank in every bucket, which rules update in float32.

    The masters of float32 parameters share the memory of the parameter buffer. If gradients are
    accumulated in float32, the averaged gradients share the memory of the gradient buffer.

    Args:
        values: the rank's shards of the parameters, which are the initial masters.
        grads: the gradient buffer; None if averaged gradients have memory of their own.
    """

    def __init__(
        self,
        routes: Routes,
        values: ShardBuffer,
        grads: FlatBuffer | None,
        settings: OwnedSettings,
    ) -> None:
        self.layout = layout = values.layout
        self.rank = rank = values.rank
        self._routes = routes
        self._settings = settings
        self.saved_as: dict[str, str] = {}
        """The checkpoint name of this rank's piece of a parameter, by parameter."""
        self._parts_before: dict[str, int] = {}
        """The parts before this rank's under that name; see :func:`.new_names.place_of`."""
        for name, names in settings.names.items():
            self.saved_as[name], self._parts_before[name] = place_of(names, settings.expert_rank)
        self._known_as = {saved: name for name, saved in self.saved_as.items()}
        self._values = values
        self.pieces = values.pieces
        """This rank's pieces, by bucket, in memory order."""
        self.device = values.tensors[0].device
        """The device that runs the updates."""
        self.reduced = ReducedGradients(layout, rank, grads, self.device, settings.sums_as)
        self.host = HostMemory(self.device, pin_memory=settings.pin_memory)
        self.written = torch.zeros((), dtype=torch.bool, device=self.device)
        """True after masters have followed written weights."""
        self.masters: list[Masters] = []
        """The masters of this rank, in the order of buckets."""
        self._master_of: dict[str, tuple[Masters, slice]] = {}
        """The masters of each parameter, and their place among those."""
        self._forms: dict[str, dict[str, Form]] = {}
        """The states by parameter and name, in the shape that the parameter's rule sees; if it sees
        parts, in the shape of the whole.
        """
        self._opening: list[list[Form]] = []
        """The forms to open and close in an update, by bucket."""
        for index in range(len(self.pieces)):
            self._make_bucket(index)
        self.states: dict[str, State] = {}
        """The stored states by parameter and name."""
        self._fixed: set[str] = set()
        """The parameters whose views never change, so that they are made once."""
        self._views_once: dict[str, list[Seen]] = {}
        for name, forms in self._forms.items():
            self.states[name] = {key: form.memory for key, form in forms.items()}
            if all(form.fixed for form in (self._master_of[name][0], *forms.values())):
                self._fixed.add(name)
        self._updates = update_sets(
            self.pieces,
            routes,
            batch_matrices=settings.batch_matrices,
            in_place=() if settings.on_host else self._fixed,
            tp_size=1 if settings.peers is None else settings.peers.size,
            most=max_batch_numel(self.device),
        )
        self._captured = Captured(self.device, settings.new_graph or CudaGraph)
        self.reduced.stays = settings.new_graph is not None

    # --- the initial masters and states

    def _make_bucket(self, index: int) -> None:
        """Create the masters and initial states of a bucket. Those ``on_host`` move there at
        once.
        """
        pieces = self.pieces[index]
        hosted = [piece.name for piece in pieces if piece.name in self._settings.on_host]
        masters = self._make_masters(index, apart=bool(hosted))
        self.masters += masters
        for piece in pieces:
            self._init_states(piece)
        moving: list[Form] = []
        for name in hosted:
            own, _ = self._master_of[name]
            if isinstance(own, OwnMasters):
                moving.append(own)
            for key, spec in self._state_specs(name).items():
                if not spec.on_host:
                    moving.append(self._forms[name][key])
        if moving:
            places = self.host.put(index, {form: form.memory for form in moving})
            for form, memory in places.items():
                form.move(memory)
        opening: list[Form] = list(masters)
        for piece in pieces:
            opening += [form for form in self._forms[piece.name].values() if not form.fixed]
        self._opening.append(opening)

    def _make_masters(self, index: int, *, apart: bool) -> list[Masters]:
        """Return the masters of a bucket: those of the whole shard, or, if 16-bit ones are
        ``apart``, of each piece by itself.
        """
        shard = self._values.tensors[index]
        apart = apart and shard.dtype != torch.float32
        found = [] if apart else [self._masters_of(index, shard)]
        for piece in self.pieces[index]:
            start = 0
            if apart:
                found.append(self._masters_of(index, self._values.piece(piece.name)))
            else:
                start = piece.start - self.layout.buckets[index].shard(self.rank)[0]
            self._master_of[piece.name] = (found[-1], slice(start, start + piece.numel))
        return found

    def _masters_of(self, index: int, values: Tensor) -> Masters:
        if values.dtype == torch.float32:
            return Masters(values, values.detach())
        if values.dtype == torch.bfloat16 and self._settings.master_dtype == "bfloat16+remainder":
            return SplitMasters(values, self.written)
        return OwnMasters(values, self.written, in_mxfp8=self.layout.buckets[index].in_mxfp8)

    def _init_states(self, piece: Piece) -> None:
        """Create the initial states of a piece."""
        name = piece.name
        specs = self._state_specs(name)
        self._forms[name] = {}
        for key, value in self._first_state(name).items():
            chance = None
            if self._routes[name].recipe.rounds_by_chance:
                chance = Chance(
                    self._settings.rounding_seed,
                    self.saved_as[name],
                    key,
                    self._first_saved(piece),
                )
            self._forms[name][key] = form_of(specs[key], value, chance)

    def _state_specs(self, name: str) -> Mapping[str, StateSpec]:
        """Return the specs of the states that the recipe of ``name`` has for this rank's piece."""
        return self._routes[name].states(self._values.piece(name).numel())

    def _first_state(self, name: str) -> State:
        """Return the initial state for the present master, in the memory order of the parameter."""
        route = self._routes[name]
        master = self.value(name).view_as(self._gradient(name))
        if route.parts is None:
            return route.recipe.init_state(master)
        return route.parts.first_state(route.recipe, master)

    # --- the update

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Enter this context to update all buckets, once each."""
        self._follow_written()
        self._begun: set[int] = set()
        try:
            with self.host:
                yield
        finally:
            # An interrupted update may have opened some.
            for form in chain(*self._opening):
                form.forget()

    def update(self, index: int, turn: OneUpdate) -> None:
        """Update the masters and states of bucket ``index``, and write the values.

        Call it inside ``with owned.updating():``, last bucket first. It also updates some
        parameters of other buckets, batched with those of this one.

        Raises:
            StepError: a rule cannot update a parameter; names the parameter. Others are updated.
        """
        if index == len(self.pieces) - 1:
            self._captured.begin(self._captured_for(turn))
        self._captured.run(index, turn, partial(self._update, index))

    def _captured_for(self, turn: OneUpdate) -> Hashable:
        """Return all that a captured update depends on, beside its numbers; None if none is
        captured, or something wants to see this one.
        """
        if turn.scaled or turn.around is not unwatched or not self.reduced.stays:
            return None
        memory = [*self._values.tensors, *self.reduced.tensors, *self.stored]
        for masters in self.masters:
            memory += masters.tensors
        addresses = tuple(tensor.data_ptr() for tensor in memory)
        return turn.leave_out, self.reduced.divide_by, addresses

    def _update(self, index: int, turn: OneUpdate, numbers: Numbers | None) -> None:
        """Do what :meth:`update` does; with ``numbers``, for a captured update."""
        brought = self.host.bring(index)
        touched = [index]
        for update in self._updates[index]:
            touched += update.buckets
        for bucket in touched:
            if bucket not in self._begun:
                self._begun.add(bucket)
                self._open(bucket, brought, turn, numbers)
        for update in self._updates[index]:
            self._run(update, turn, numbers)
        for piece in self.pieces[index]:
            if piece.name in turn.scaled:
                factors = turn.scaled[piece.name]
                factors.scale_(self._opened_master(piece.name), piece.param_start)
        for form in self._opening[index]:
            form.close(turn.number)
            form.forget()
        self.host.send_back(index)

    def _open(
        self,
        index: int,
        brought: Mapping[Form, Tensor],
        turn: OneUpdate,
        numbers: Numbers | None,
    ) -> None:
        """Average and rescale the gradients of bucket ``index``, and open its masters and
        states. Gradients that are kept as they arrived become float32 for their rule alone.
        """
        together: dict[float, list[Tensor]] = {}
        for piece in self.reduced.average_(index):
            gradient = self.reduced.piece(piece.name)
            factor = turn.factor_of(piece.name)
            if numbers is not None:
                multiply_([gradient], numbers.register(methodcaller("factor_of", piece.name)))
            elif factor != 1:
                together.setdefault(factor, []).append(gradient)
        for factor, gradients in together.items():
            multiply_(gradients, factor)
        for form in self._opening[index]:
            form.open(brought.get(form, form.memory))

    def _run(self, update: UpdateSet, turn: OneUpdate, numbers: Numbers | None) -> None:
        """Run a rule on those of its parameters that are not left out."""
        names: list[str] = []
        views: list[Seen] = []
        for name in update.names:
            if name not in turn.leave_out:
                stays = self.reduced.piece(name).dtype == torch.float32
                own = self._views_once.get(name) if stays else None
                if own is None:
                    own = self._make_views(name, turn)
                    if stays and name in self._fixed:
                        self._views_once[name] = own
                views += own
                names += [name] * len(own)
        if not views:
            return
        copies = [view.copy() for view in views]
        params, grads, states, *_ = zip(*copies, strict=True)
        route = update.route
        hyper = turn.hyper(route)
        if numbers is not None:

            def register(function: Callable[[Hyper], float]) -> Tensor:
                return numbers.register(lambda now: function(now.hyper(route)))

            hyper = replace(hyper, register=register)
        with turn.around(route.recipe.rule, names, params, states):
            try:
                route.recipe.update_(params, grads, states, hyper, self._settings.site(route))
            except UpdateError as error:
                raise StepError(f"{names[error.index]}: {error}") from error
        for view, copy in zip(views, copies, strict=True):
            view.take_back(copy)

    def _make_views(self, name: str, turn: OneUpdate) -> list[Seen]:
        """Return the master, gradient and state of ``name``, or of each of its parts, in the shapes
        that its rule sees.
        """
        route = self._routes[name]
        grad = self._gradient(name)
        if grad.dtype != torch.float32:
            grad = self.reduced.average(name).view_as(grad)
            if (factor := turn.factor_of(name)) != 1:
                multiply_([grad], factor)
        master = self._opened_master(name).view_as(grad)
        state = {key: form.opened for key, form in self._forms[name].items()}
        return route.views(master, grad, state)

    def _opened_master(self, name: str) -> Tensor:
        """Return the master of ``name`` that rules update, 1-D."""
        masters, place = self._master_of[name]
        return masters.opened[place]

    def _gradient(self, name: str) -> Tensor:
        """Return the gradient of ``name``: a matrix, a batch of matrices, or 1-D."""
        gradient = self.reduced.piece(name)
        return gradient.view(self._routes[name].matrix_shape or gradient.shape)

    # --- masters and weights

    def followed(self, name: str) -> Tensor:
        """Return the master that the next update of a parameter starts from.

        It is the stored master, or, if its weight was written, a copy on the host that follows the
        write. The stored master stays as it is, because the old weight may come back before the
        update.
        """
        master = self.value(name)
        value = self._weight(name)
        if value.dtype == torch.float32:
            return master
        return followed(master, value, in_mxfp8=self.layout.bucket_of(name).in_mxfp8)

    def weights_of(self, name: str, masters: Tensor) -> Tensor:
        """Return the weights that ``masters`` of a parameter round to, 1-D from its first element
        on; on any rank.
        """
        bucket = self.layout.bucket_of(name)
        return weights_of(masters, DTYPES[bucket.dtype], in_mxfp8=bucket.in_mxfp8)

    def _weight(self, name: str) -> Tensor:
        """Return the weight of a parameter as this rank has it: float32 if it is its master."""
        return self._values.written.get(name, self._values.piece(name))

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
        for piece in chain(*self.pieces):
            name = piece.name
            follows = to_save and self._is_live(name, MASTER)
            master = self.followed(name) if follows else self._recorded(name, MASTER)
            state = {}
            for key in self.states[name]:
                state[key] = self._recorded(name, key)
            start = self._first_saved(piece)
            records.append(PieceRecord(self.saved_as[name], start, master, state))
        return records

    def _first_saved(self, piece: Piece) -> int:
        """Return the number of the first element of ``piece`` in the parameter as a checkpoint has
        it.
        """
        before = self._parts_before[piece.name]
        return before * self.layout.slot(piece.name).numel + piece.param_start

    def _recorded(self, name: str, key: str) -> Tensor:
        """Return a master or a state in the form of :meth:`record`."""
        value = self.value(name, key)
        if not self._is_live(name, key):
            value = value.cpu()
        if value.shape == self._gradient(name).shape:
            return value.view(-1)
        return value

    def _is_live(self, name: str, key: str) -> bool:
        if key == MASTER:
            return self._master_of[name][0].is_live
        return self._forms[name][key].is_live

    def take_back(
        self, loaded: Iterable[tuple[PieceRecord, Iterable[str]]], *, masters_win: bool
    ) -> None:
        """Store the tensors of :meth:`record` that were loaded and are not views of live memory.

        Args:
            loaded: pieces of the record, with the keys of what was loaded; that of a master is
                empty.
            masters_win: True to set weights to the rounded masters; False to set masters to weights
                that they do not round to.
        """
        for piece, keys in loaded:
            name = self._known_as[piece.name]
            for key in keys:
                if self._is_live(name, key or MASTER):
                    continue
                value = piece.values_of(key)
                if not key and not masters_win:
                    follow_(value, self._values.piece(name))
                self.set_value(name, key or MASTER, value)

    def value(self, name: str, key: str = MASTER) -> Tensor:
        """Return this rank's piece of the master of a parameter, or of one of its states. It is
        live memory, or a float32 copy if the stored form means nothing by itself.
        """
        if key == MASTER:
            masters, place = self._master_of[name]
            return masters.piece(place)
        return self._forms[name][key].read()

    def set_value(self, name: str, key: str, value: Tensor) -> None:
        """Set the piece that :meth:`value` returns. For a split master, this also sets the weights
        it rounds to.
        """
        if key == MASTER:
            masters, place = self._master_of[name]
            masters.set_piece(place, value)
            self._values.written.pop(name, None)
        else:
            self._forms[name][key].write(value)

    @property
    def stored(self) -> list[Tensor]:
        """The memory of states."""
        found: list[Tensor] = []
        for forms in self._forms.values():
            for form in forms.values():
                found += form.tensors
        return found

    def follow_weights(self) -> None:
        """Set masters to weights that they do not round to."""
        self._follow_written()
        for masters in self.masters:
            masters.follow()

    def _follow_written(self) -> None:
        """Do so where weights came from cuts to shards that are masters."""
        written = self._values.written
        while written:
            name, value = written.popitem()
            in_mxfp8 = self.layout.bucket_of(name).in_mxfp8
            master = self._values.piece(name)
            follow_(master, value, written=self.written, in_mxfp8=in_mxfp8)

    def restart(self, saved_as: str, keys: Sequence[str]) -> None:
        """Reset states of a parameter, given by its name in a checkpoint, to their initial values;
        with the empty key its master to the weights, before.
        """
        name = self._known_as[saved_as]
        weight = self._weight(name)
        if "" in keys and weight.dtype != torch.float32:
            self.set_value(name, MASTER, weight)
        states = [key for key in keys if key]
        if states:
            start = self._first_state(name)
            for key in states:
                self.set_value(name, key, start[key])
