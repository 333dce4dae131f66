"""The forecast of a run, all costs of each rank together, from names, shapes and the config alone.

Training and ``ds-layerwise plan`` both produce a :class:`Forecast`. Shapes come from the model in
training, and from a file in a plan.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from ds_layerwise.config.fetching import Whole
from ds_layerwise.config.run_config import RunConfig
from ds_layerwise.errors import RoutingError
from ds_layerwise.optimizers.base.dtypes import DTYPE_BYTES, MasterDtype
from ds_layerwise.optimizers.base.recipe import Recipe, Shape
from ds_layerwise.orthogonalize.newton_schulz_cost import most_together
from ds_layerwise.orthogonalize.tensor_shards import whole_shape
from ds_layerwise.plan.forecast.cost import (
    LayoutReport,
    RankMemory,
    RankTraffic,
    checkpoint_bytes,
    cut_elements,
    fetched_elements,
    memory_bytes,
    state_bytes_by,
    traffic_bytes,
    wire_elements,
)
from ds_layerwise.plan.layout.layout import Bucket, Layout, ParamSpec, Slot
from ds_layerwise.plan.network.links import NVLINK_IB, Links
from ds_layerwise.plan.network.reduction import Reduction, sum_dtype
from ds_layerwise.plan.planner.planner import plan_layout
from ds_layerwise.routing.routes import Route, Routes


def specs_of(
    params: Iterable[tuple[str, Shape, str]],
    routes: Routes,
    *,
    ep_size: Mapping[str, int] | None = None,
    wires: Mapping[str, str] | None = None,
    tp_size: int = 1,
) -> list[ParamSpec]:
    """Return the specs that the planner needs, for the parameters that have a route.

    Args:
        params: the name, shape and dtype of each, in model order.
        tp_size: the number of tensor-parallel parts of a matrix.
        ep_size, wires: by name, see :class:`.plan.layout.layout.ParamSpec`; the defaults are 1 and
            float32.

    Raises:
        RoutingError: a recipe cannot update a parameter of such a shape, or one that is cut in such
            a way.
    """

    @cache
    def work(recipe: Recipe, multiplied: Shape) -> int:
        return recipe.work(multiplied)

    specs = []
    for name, shape, dtype in params:
        route = routes.get(name)
        if route is None:
            continue
        seen = route.seen(math.prod(shape))
        flops = 0
        for part, its in seen.items() if route.whole else ():
            whole = whole_shape(its, route.tp_axis, tp_size)
            if why := route.recipe.refusal(whole, cut_axis=route.tp_axis):
                of_part = f", part {part} {its}," if part else ""
                raise RoutingError(f"{name} {shape}{of_part} {why}")
            flops += work(route.recipe, route.multiplied(its, tp_size))
        specs.append(
            ParamSpec(
                name=name,
                shape=shape,
                dtype=dtype,
                whole=route.whole,
                work=flops,
                ep_size=(ep_size or {}).get(name, 1),
                wire=(wires or {}).get(name, "float32"),
                state_bytes=sum(map(route.recipe.state_bytes, seen.values())),
            )
        )
    return specs


class Sent(NamedTuple):
    """The bytes that each rank sends, by rank."""

    gradients: tuple[int, ...]
    """The bytes in a step at stage 1, in a backward pass at stage 2; at stage 3 in a forward and a
    backward pass, with the parameters that DeepSpeed gathers for them.
    """
    parameters: tuple[int, ...]
    """The bytes in a step."""


@dataclass(frozen=True)
class Forecast:
    """A layout and its costs. Tuples are by rank, mappings by dtype of the layout."""

    layout: Layout
    stage: int
    reduction: Reduction
    stored_as: Mapping[str, str]
    """The dtype in which gradients accumulate."""
    wires: tuple[str, ...]
    """The dtype in which gradients are sent, by bucket."""
    report: LayoutReport
    memory: tuple[RankMemory, ...]
    """The bytes held between two steps."""
    traffic: tuple[RankTraffic, ...]
    """The most bytes held for pending buckets."""
    workspace: tuple[int, ...]
    """The most bytes of working memory in a step; see :func:`workspace_bytes`."""
    in_float32: tuple[RankMemory, ...]
    """``memory``, as it would be with float32 masters and states."""
    opened: tuple[int, ...]
    """The float32 bytes of states and masters that are stored in fewer bits, for the bucket with
    most of them; see :func:`opened_bytes`.
    """
    checkpoint: int
    """The bytes of a checkpoint, of all ranks together; of a pipeline, those of one stage."""
    max_waiting: int | None = None
    """The number of buckets whose gradients may wait at stage 2; None for all."""
    whole: Whole = Whole(0, 0)
    """The bytes of parameters that DeepSpeed makes whole on each rank at stage 3."""

    @classmethod
    def of(
        cls,
        layout: Layout,
        specs: list[ParamSpec],
        routes: Routes,
        run: RunConfig,
        *,
        tp_size: int,
        reduction: Reduction,
        links: Links,
    ) -> Forecast:
        """Forecast the costs of ``layout``, a plan of exactly these ``specs``.

        Args:
            routes: by name, of at least these.
            tp_size: how many parts tensor parallelism has cut matrices into.
            reduction: how sums are made; see :mod:`.plan.network.reduction`.
            links: see :func:`.plan.forecast.cost.traffic_bytes`.
        """
        wires = wires_of(layout, specs)
        stage = run.stage
        stored_as = {dtype: run.stored_as(dtype) for dtype in layout.dtypes}
        master_dtype = run.layerwise.master_dtype
        opened = [opened_bytes(bucket, routes, master_dtype) for bucket in layout.buckets]
        bytes_of = partial(
            memory_bytes,
            layout,
            stage=stage,
            grads_stored_as=stored_as,
            wires=wires,
            reduction=reduction,
            host_ratio=run.host_ratio,
            params_on_host=run.params_on_host,
        )
        as_saved = state_bytes_by(routes, specs)
        memory = in_float32 = bytes_of(state_bytes=as_saved, master_dtype=master_dtype)
        if any(opened):
            wide = state_bytes_by(routes, specs, in_float32=("bfloat16", "8bit"))
            in_float32 = bytes_of(state_bytes=wide)
            # A save writes the numbers of 8-bit states, and bfloat16 ones as they are.
            as_saved = state_bytes_by(routes, specs, in_float32=("8bit",))
        traffic = traffic_bytes(
            layout,
            stage=stage,
            stored_as=stored_as,
            wires=wires,
            reduction=reduction,
            links=links,
        )
        most_opened = [0] * layout.world_size
        for counts in opened:
            for rank, nbytes in counts.items():
                most_opened[rank] = max(most_opened[rank], nbytes)
        whole = Whole(0, 0)
        if run.fetching is not None:
            whole = run.fetching.whole(map(_size_of, specs))
        hosted = run.host_ratio > 0
        workspace = workspace_bytes(layout, routes, opened, tp_size=tp_size, hosted=hosted)
        # What stays whole is compared with a copy.
        workspace = tuple(works + whole.always for works in workspace)
        return cls(
            layout,
            stage,
            reduction,
            stored_as,
            wires,
            LayoutReport.of(layout, specs),
            memory,
            traffic,
            workspace,
            in_float32,
            tuple(most_opened),
            tp_size * checkpoint_bytes(layout, as_saved, stage),
            run.layerwise.max_waiting_buckets,
            whole,
        )

    @property
    def saved(self) -> tuple[int, ...]:
        """The bytes that each rank saves, on its device and on the host, compared with float32."""
        return tuple(
            wide.total + wide.host - held.total - held.host
            for wide, held in zip(self.in_float32, self.memory, strict=True)
        )

    @property
    def waiting(self) -> int:
        """The most bytes of gradients that wait for the reduction of others, or without
        ``overlap_comm`` for the end of the backward pass.

        At stage 1 they have a buffer, so nothing is counted.
        """
        if self.stage == 1:
            return 0
        # One more bucket fills while others wait.
        most = self.max_waiting and self.max_waiting + 1
        return sum(sorted(self._bucket_bytes, reverse=True)[:most])

    @property
    def in_pass(self) -> int:
        """The most bytes of gradients that wait, and of parameters that DeepSpeed makes whole."""
        return self.waiting + self.whole.most

    @property
    def _bucket_bytes(self) -> list[int]:
        return [bucket.numel * DTYPE_BYTES[bucket.dtype] for bucket in self.layout.buckets]

    @property
    def start_up(self) -> tuple[int, ...]:
        """The most bytes held until the first step.

        Parameters move into their buffer one bucket at a time; at stage 3 there is no buffer.
        Masters and states are made after that, and move to the host or into fewer bits one bucket
        at a time.
        """
        bucket = max(self._bucket_bytes, default=0) if self.stage < 3 else 0
        return tuple(
            max(rank.params + bucket, rank.total + rank.staging + opened)
            for rank, opened in zip(self.memory, self.opened, strict=True)
        )

    @property
    def in_step(self) -> tuple[int, ...]:
        """The most bytes of working memory for each rank's update, with the data that comes from
        the host for it.
        """
        return tuple(
            works + held.staging for works, held in zip(self.workspace, self.memory, strict=True)
        )

    @property
    def needed(self) -> tuple[int, ...]:
        """The bytes that each rank needs on its device, apart from activations and what else the
        forward and backward pass keep.

        It is the larger of :attr:`start_up` and of the memory between two steps, plus pending
        buckets, plus the working memory or, if more, :attr:`in_pass`. Parameters of one bucket may
        be sent while the next is updated, so these add up.
        """
        return tuple(
            max(start, held.total + traffic.total + max(step, self.in_pass))
            for start, held, traffic, step in zip(
                self.start_up, self.memory, self.traffic, self.in_step, strict=True
            )
        )

    @property
    def fullest(self) -> int:
        """The rank that holds most between two steps."""
        totals = [rank.total for rank in self.memory]
        return totals.index(max(totals))

    def _by_wire(self, dtype: str) -> dict[str, set[int]]:
        """Return the buckets of parameters of ``dtype``, by the dtype in which their gradients are
        sent.
        """
        found: dict[str, set[int]] = {}
        for bucket, wire in zip(self.layout.buckets, self.wires, strict=True):
            if bucket.dtype == dtype:
                found.setdefault(wire, set()).add(bucket.index)
        return found

    def wire_as(self, dtype: str) -> str:
        """Return the names of the dtypes in which gradients of parameters of ``dtype`` are sent."""
        return " and ".join(sorted(self._by_wire(dtype)))

    def sent(self) -> dict[str, Sent]:
        """Return the bytes that each rank sends, by dtype of the parameters.

        See the note in :mod:`.plan.forecast.cost`.
        """
        found = {}
        for dtype in self.layout.dtypes:
            gradients = parameters = np.zeros(self.layout.world_size, np.int64)
            for name, buckets in self._by_wire(dtype).items():
                wire = wire_elements(self.layout, buckets)
                sum_bytes = DTYPE_BYTES[sum_dtype(name, self.reduction, self.stage)]
                gradients = gradients + np.array(wire.reduce) * DTYPE_BYTES[name]
                gradients += np.array(wire.forward) * sum_bytes
                parameters = parameters + np.array(wire.gather) * DTYPE_BYTES[dtype]
            if self.stage == 3:
                parameters = np.array(cut_elements(self.layout, dtype)) * DTYPE_BYTES[dtype]
                # Once in the forward pass, and once in the backward pass.
                gradients += 2 * fetched_elements(self.layout, dtype) * DTYPE_BYTES[dtype]
            found[dtype] = Sent(tuple(gradients.tolist()), tuple(parameters.tolist()))
        return found

    def sent_by_busiest(self) -> dict[str, tuple[int, int]]:
        """Return the bytes of gradients and of parameters on the busiest rank, by dtype of the
        parameters.

        The busiest rank is the one that sends most of both together.
        """
        sent = self.sent()
        totals = list(map(sum, zip(*itertools.chain(*sent.values()), strict=True)))
        busiest = totals.index(max(totals))
        found = {}
        for dtype, each in sent.items():
            found[dtype] = (each.gradients[busiest], each.parameters[busiest])
        return found


def _size_of(spec: ParamSpec) -> tuple[int, int]:
    return spec.numel, spec.numel * DTYPE_BYTES[spec.dtype]


def wires_of(layout: Layout, specs: Iterable[ParamSpec]) -> tuple[str, ...]:
    """Return the dtype in which gradients are sent, by bucket of a plan of ``specs``."""
    wire_of = {spec.name: spec.wire for spec in specs}
    return tuple(wire_of[bucket.slots[0].name] for bucket in layout.buckets)


def opened_bytes(bucket: Bucket, routes: Routes, master_dtype: MasterDtype) -> Counter[int]:
    """Return, by rank, the float32 bytes of masters and states of a shard of ``bucket`` that are
    stored in fewer bits, while the bucket is updated.
    """
    opened: Counter[int] = Counter()
    if (master_dtype, bucket.dtype) == ("bfloat16+remainder", "bfloat16"):
        opened.update({rank: 4 * numel for rank, numel in bucket.non_empty_shards()})
    if not any(_opened_states(routes[slot.name], 1) for slot in bucket.slots):
        return opened
    for rank, _ in bucket.non_empty_shards():
        for piece in bucket.pieces(rank):
            opened[rank] += _opened_states(routes[piece.name], piece.numel)
    return opened


def _opened_states(route: Route, numel: int) -> int:
    return sum(spec.rule_nbytes for spec in route.states(numel).values() if spec.kept_as)


class _Kind(NamedTuple):
    """The kind of matrices that an owner may update together."""

    recipe: Recipe
    rows: int
    cols: int
    alone: str
    """The name of a parameter that is updated alone; else empty."""
    copied: int
    """The bytes that are copied for the update of a matrix."""

    def works_in(self, count: int) -> int:
        """Return the bytes of working memory for an update of ``count`` matrices."""
        return self.recipe.workspace((count, self.rows, self.cols)) + self.copied


def _kinds_of(slot: Slot, route: Route, tp_size: int) -> Iterator[tuple[_Kind, int]]:
    """Yield the kinds of matrices that an owner of ``slot`` updates, with their numbers."""
    # A parameter that is copied for its update is updated alone.
    alone = slot.name if route.copied else ""
    for seen in route.seen(slot.numel).values():
        *batch, rows, cols = route.multiplied(seen if len(seen) > 1 else (1, *seen), tp_size)
        yield _Kind(route.recipe, rows, cols, alone, route.copied), math.prod(batch)


def workspace_bytes(
    layout: Layout,
    routes: Routes,
    opened: Sequence[Counter[int]] | None = None,
    *,
    tp_size: int = 1,
    hosted: bool = False,
) -> tuple[int, ...]:
    """Count the most bytes of working memory in each rank's update, in addition to
    :func:`memory_bytes`.

    Buckets are updated one after another. In a bucket, the matrices of each shape are updated
    together, with those added from other buckets, see :mod:`.plan.planner.update_batches`; all
    pieces of split parameters are updated together.

    Args:
        opened: by bucket, see :func:`opened_bytes`; None if everything is stored in float32.
        hosted: True if masters or states are on the host, so that no matrices of other buckets are
            added.
    """
    opened = opened or [Counter()] * len(layout.buckets)
    most = [0] * layout.world_size
    along: dict[_Kind, Counter[int]] = {}

    def take(owner: int, nbytes: int) -> None:
        most[owner] = max(most[owner], nbytes)

    for bucket in layout.buckets:
        own = opened[bucket.index]
        if not bucket.whole:
            recipes = {routes[slot.name].recipe for slot in bucket.slots}
            for rank, numel in bucket.non_empty_shards():
                take(rank, own[rank] + max(recipe.workspace((numel,)) for recipe in recipes))
            continue
        # Once per slot: there may be ten thousand buckets, and comparing recipes is slow.
        together: dict[_Kind, Counter[int]] = {}
        for slot in bucket.slots:
            for kind, count in _kinds_of(slot, routes[slot.name], tp_size):
                counts = together.setdefault(kind, Counter())
                for owner in bucket.owners(slot):
                    counts[owner] += count
        for kind, counts in together.items():
            taken_along = along.setdefault(kind, Counter())
            # Thousands of owners may have as many.
            works_in = cache(kind.works_in)
            for owner, count in counts.items():
                take(owner, works_in(count) + own[owner])
                if not (hosted or own[owner]):
                    taken_along[owner] += count
    for kind, counts in along.items():
        works_in = cache(kind.works_in)
        for owner, count in counts.items():
            numel = kind.rows * kind.cols
            take(owner, works_in(most_together(count, numel, kind.recipe.full_batch_numel)))
    return tuple(most)


def on_the_wire(specs: Iterable[ParamSpec], run: RunConfig) -> list[ParamSpec]:
    """Return ``specs`` with the dtype that ``run`` sends their gradients in; those that have it are
    not copied.
    """
    sent = []
    for spec in specs:
        wire = run.sent_as(spec.dtype)
        if spec.wire != wire:
            spec = replace(spec, wire=wire)
        sent.append(spec)
    return sent


def forecast(
    specs: Sequence[ParamSpec],
    routes: Routes,
    run: RunConfig,
    num_ranks: int,
    *,
    bucket_numel: int | None = None,
    links: Links = NVLINK_IB,
    reduction: Reduction = "ordered",
    tp_size: int = 1,
) -> Forecast:
    """Place ``specs`` over ``num_ranks`` as training would, and forecast the costs.

    Args:
        bucket_numel: the bucket size; None for that of the run.
        tp_size: the number of tensor-parallel parts of a matrix.
        links, reduction: see :func:`.plan.planner.planner.plan_layout`.

    Raises:
        LayoutError: ``num_ranks`` is less than 1.
    """
    specs = on_the_wire(specs, run)
    layout = plan_layout(
        specs,
        num_ranks,
        bucket_numel=bucket_numel or run.bucket_numel,
        links=links,
        reduction=reduction,
        policy=run.layerwise.layout,
        alignment=run.layerwise.alignment,
        stage=run.stage,
    )
    return Forecast.of(
        layout,
        specs,
        routes,
        run,
        tp_size=tp_size,
        reduction=reduction,
        links=links,
    )
