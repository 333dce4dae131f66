"""What a run costs each rank, from names, shapes and the config alone: the numbers of the start-up
table.

Training and ``ds-layerwise plan`` both end in a :class:`Forecast`. What differs is where shapes
come from: from the model there, from a file here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple, TypedDict

from ds_layerwise.config.run_config import RunConfig
from ds_layerwise.errors import RoutingError
from ds_layerwise.plan.forecast.cost import (
    LayoutReport,
    RankMemory,
    RankTraffic,
    memory_bytes,
    state_bytes_by,
    traffic_bytes,
    wire_elements,
)
from ds_layerwise.plan.layout.layout import Bucket, Layout, ParamSpec, Slot
from ds_layerwise.plan.network.links import NVLINK_IB, Links
from ds_layerwise.plan.network.reduction import Reduction, sum_dtype
from ds_layerwise.plan.planner.planner import plan_layout
from ds_layerwise.plan.routes.routes import Axis, Route, whole_shape
from ds_layerwise.recipes.base.dtypes import DTYPE_BYTES, MasterDtype
from ds_layerwise.recipes.base.recipe import Recipe
from ds_layerwise.recipes.rules.newton_schulz_settings import most_together


def specs_of(
    params: Iterable[tuple[str, tuple[int, ...], str]],
    routes: Mapping[str, Route],
    *,
    ep_size: Mapping[str, int] | None = None,
    wires: Mapping[str, str] | None = None,
    tp_size: int = 1,
) -> list[ParamSpec]:
    """What the planner needs to know of the parameters that have a route.

    Args:
        params: name, shape and dtype of each, in model order.
        tp_size: how many parts tensor parallelism has cut matrices into.
        ep_size, wires: by name, see :class:`.plan.layout.layout.ParamSpec`; 1 and float32 where
            nothing is said.

    Raises:
        RoutingError: a recipe cannot update a parameter of such a shape, or one that is cut like
            that.
    """

    @cache
    def work(recipe: Recipe, shape: tuple[int, ...], axis: Axis | None) -> int:
        return recipe.work(whole_shape(shape, None if recipe.sees_tensor_shards else axis, tp_size))

    def spec(name: str, shape: tuple[int, ...], dtype: str) -> ParamSpec:
        route = routes[name]
        seen = route.seen(math.prod(shape))
        for part, its in seen.items() if route.whole else ():
            if why := route.recipe.refusal(
                whole_shape(its, route.tp_axis, tp_size), cut_axis=route.tp_axis
            ):
                raise RoutingError(f"{name} {shape}{f', part {part} {its},' * bool(part)} {why}")
        flops = sum(work(route.recipe, its, route.tp_axis) for its in seen.values() if route.whole)
        return ParamSpec(
            name=name,
            shape=shape,
            dtype=dtype,
            whole=route.whole,
            work=flops,
            ep_size=(ep_size or {}).get(name, 1),
            wire=(wires or {}).get(name, "float32"),
            state_bytes=sum(route.recipe.state_bytes(its) for its in seen.values()),
        )

    return [spec(*param) for param in params if param[0] in routes]


class Sent(NamedTuple):
    """Bytes that each rank sends, by rank."""

    gradients: tuple[int, ...]
    """In a step at stage 1, in a backward pass at stage 2."""
    parameters: tuple[int, ...]
    """In a step."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """A layout and all that there is to say about its costs. Tuples are by rank, mappings by dtype
    of the layout.
    """

    layout: Layout
    stage: int
    reduction: Reduction
    stored_as: Mapping[str, str]
    """What gradients are accumulated in."""
    wires: tuple[str, ...]
    """What gradients travel in, by bucket."""
    report: LayoutReport
    memory: tuple[RankMemory, ...]
    """Bytes held between two steps."""
    traffic: tuple[RankTraffic, ...]
    """Bytes held for buckets under way, at most."""
    workspace: tuple[int, ...]
    """Bytes that a step works in, at most; see :func:`workspace_bytes`."""
    in_float32: tuple[RankMemory, ...]
    """``memory``, if masters and states were kept in float32."""
    opened: tuple[int, ...]
    """Bytes in float32 of the bucket that has most of them, of what is kept in fewer bits; see
    :func:`opened_bytes`.
    """
    max_waiting: int | None = None
    """The buckets whose gradients may wait at stage 2; None for all."""

    @classmethod
    def of(
        cls,
        layout: Layout,
        specs: list[ParamSpec],
        routes: Mapping[str, Route],
        *,
        stage: int,
        stored_as: Mapping[str, str],
        host_ratio: float = 0.0,
        tp_size: int = 1,
        reduction: Reduction = "ordered",
        links: Links | None = None,
        master_dtype: MasterDtype = "float32",
        max_waiting: int | None = None,
    ) -> Forecast:
        """The forecast for ``layout``, a plan of exactly these ``specs``.

        Args:
            routes: by name, of at least these.
            tp_size: how many parts tensor parallelism has cut matrices into.
            host_ratio: how much of masters and states lives in host memory.
            reduction: how sums are made; see :mod:`.plan.network.reduction`.
            links: see :func:`.plan.forecast.cost.traffic_bytes`.
            master_dtype: what masters are kept in.
            max_waiting: see :attr:`max_waiting`.
        """
        wires = wires_of(layout, specs)
        opened = [opened_bytes(bucket, routes, master_dtype) for bucket in layout.buckets]
        bytes_of = partial(
            memory_bytes,
            layout,
            stage=stage,
            grads_stored_as=stored_as,
            wires=wires,
            reduction=reduction,
            host_ratio=host_ratio,
        )
        memory = in_float32 = bytes_of(
            state_bytes=state_bytes_by(routes, specs), master_dtype=master_dtype
        )
        if any(opened):
            in_float32 = bytes_of(state_bytes=state_bytes_by(routes, specs, in_float32=True))
        return cls(
            layout,
            stage,
            reduction,
            stored_as,
            wires,
            LayoutReport.of(layout, specs),
            memory,
            traffic_bytes(
                layout,
                stage=stage,
                stored_as=stored_as,
                wires=wires,
                reduction=reduction,
                links=links,
            ),
            workspace_bytes(layout, routes, opened, tp_size=tp_size, hosted=host_ratio > 0),
            in_float32,
            _most_by_rank(opened, layout.world_size),
            max_waiting,
        )

    @property
    def saved(self) -> tuple[int, ...]:
        """Bytes that each rank holds less, on its device and on the host, than in float32."""
        return tuple(
            wide.total + wide.host - held.total - held.host
            for wide, held in zip(self.in_float32, self.memory, strict=True)
        )

    @property
    def waiting(self) -> int:
        """Bytes of gradients that wait for the reduction of others at most; at stage 1 they have a
        buffer.
        """
        return (
            sum(sorted(self._bucket_bytes, reverse=True)[: self.max_waiting])
            if self.stage == 2
            else 0
        )

    @property
    def _bucket_bytes(self) -> list[int]:
        return [bucket.numel * DTYPE_BYTES[bucket.dtype] for bucket in self.layout.buckets]

    @property
    def start_up(self) -> tuple[int, ...]:
        """Bytes held at most until the first step: parameters move into their buffer a bucket at a
        time, the rest is made after that, and goes to the host, or into fewer bits, a bucket at a
        time."""
        bucket = max(self._bucket_bytes, default=0)
        return tuple(
            max(rank.params + bucket, rank.total + rank.staging + opened)
            for rank, opened in zip(self.memory, self.opened, strict=True)
        )

    @property
    def in_step(self) -> tuple[int, ...]:
        """Bytes that each rank's step takes at most: what an update works in, and what comes from
        the host for it.
        """
        return tuple(
            works + held.staging for works, held in zip(self.workspace, self.memory, strict=True)
        )

    @property
    def needed(self) -> tuple[int, ...]:
        """Bytes that each rank needs of its device, if the forward and the backward pass keep
        nothing there.

        That is the more of :attr:`start_up`, and of what it holds between two steps with what is
        under way and what a step takes: parameters of one bucket may travel while the next is
        updated, so the two add up.
        """
        return tuple(
            max(start, held.total + traffic.total + step)
            for start, held, traffic, step in zip(
                self.start_up, self.memory, self.traffic, self.in_step, strict=True
            )
        )

    @property
    def fullest(self) -> int:
        """The rank that holds most between two steps."""
        totals = [rank.total for rank in self.memory]
        return totals.index(max(totals))

    def wire_as(self, dtype: str) -> str:
        """What gradients of parameters of ``dtype`` travel in."""
        return " and ".join(
            sorted(
                {
                    wire
                    for bucket, wire in zip(self.layout.buckets, self.wires, strict=True)
                    if bucket.dtype == dtype
                }
            )
        )

    def sent(self) -> dict[str, Sent]:
        """What each rank sends for parameters of each dtype; see the note on what travels in
        :mod:`.plan.forecast.cost`.
        """
        found = {}
        for dtype in self.layout.dtypes:
            reduced = gathered = [0] * len(self.memory)
            for name in sorted(
                {
                    wire
                    for bucket, wire in zip(self.layout.buckets, self.wires, strict=True)
                    if bucket.dtype == dtype
                }
            ):
                wire = wire_elements(
                    self.layout, dtype, {i for i, other in enumerate(self.wires) if other == name}
                )
                sum_bytes = DTYPE_BYTES[sum_dtype(name, self.reduction, self.stage)]
                reduced = [
                    total + reduce * DTYPE_BYTES[name] + forward * sum_bytes
                    for total, reduce, forward in zip(
                        reduced, wire.reduce, wire.forward, strict=True
                    )
                ]
                gathered = [
                    total + gather * DTYPE_BYTES[dtype]
                    for total, gather in zip(gathered, wire.gather, strict=True)
                ]
            found[dtype] = Sent(tuple(reduced), tuple(gathered))
        return found

    def sent_by_busiest(self) -> dict[str, tuple[int, int]]:
        """Bytes of gradients and of parameters of each dtype, sent by the rank that sends most of
        all together.
        """
        sent = self.sent()
        totals = [
            sum(each.gradients[rank] + each.parameters[rank] for each in sent.values())
            for rank in range(len(self.memory))
        ]
        busiest = totals.index(max(totals))
        return {
            dtype: (each.gradients[busiest], each.parameters[busiest])
            for dtype, each in sent.items()
        }


def wires_of(layout: Layout, specs: Iterable[ParamSpec]) -> tuple[str, ...]:
    """What gradients travel in, by bucket of a plan of ``specs``."""
    wire_of = {spec.name: spec.wire for spec in specs}
    return tuple(wire_of[bucket.slots[0].name] for bucket in layout.buckets)


def opened_bytes(
    bucket: Bucket, routes: Mapping[str, Route], master_dtype: MasterDtype
) -> Counter[int]:
    """By rank, what is float32 of its shard of ``bucket`` while that is updated, and is kept in
    fewer bits.
    """
    opened: Counter[int] = Counter()
    if (master_dtype, bucket.dtype) == ("bfloat16+remainder", "bfloat16"):
        opened.update({rank: 4 * numel for rank, numel in bucket.non_empty_shards()})
    keeps = any(
        spec.kept_as for slot in bucket.slots for spec in routes[slot.name].states(1).values()
    )
    for rank, _ in bucket.non_empty_shards() if keeps else ():
        opened[rank] += sum(
            spec.rule_nbytes
            for piece in bucket.pieces(rank)
            for spec in routes[piece.name].states(piece.numel).values()
            if spec.kept_as
        )
    return opened


def _most_by_rank(counts: Iterable[Counter[int]], world_size: int) -> tuple[int, ...]:
    """The most of each rank. Few are in each of ``counts``, of which there may be ten thousand."""
    most = [0] * world_size
    for each in counts:
        for rank, nbytes in each.items():
            most[rank] = max(most[rank], nbytes)
    return tuple(most)


class _Kind(NamedTuple):
    """Matrices that an owner may update together."""

    recipe: Recipe
    rows: int
    cols: int
    alone: str
    """The parameter that is updated alone; else empty."""
    copied: int
    """Bytes of what is copied for its update."""


def _kinds_of(slot: Slot, route: Route, tp_size: int) -> Iterator[tuple[_Kind, int]]:
    """What an owner of ``slot`` updates, and how many matrices of it."""
    # What is copied for its update is updated alone.
    alone = slot.name if route.copied else ""
    for seen in route.seen(slot.numel).values():
        *batch, rows, cols = route.multiplied(seen if len(seen) > 1 else (1, *seen), tp_size)
        yield _Kind(route.recipe, rows, cols, alone, route.copied), math.prod(batch)


def workspace_bytes(
    layout: Layout,
    routes: Mapping[str, Route],
    opened: Sequence[Counter[int]] | None = None,
    *,
    tp_size: int = 1,
    hosted: bool = False,
) -> tuple[int, ...]:
    """What each rank takes at most while it updates what it owns, beside parameters, gradients,
    masters and states.

    Buckets are updated one after another, and in them matrices of each shape, with those of other
    buckets that are taken along, see :mod:`.plan.planner.update_batches`; all pieces of split
    parameters together.

    Args:
        opened: by bucket, see :func:`opened_bytes`; None if all is kept in float32.
        hosted: whether masters or states live on the host, so that nothing is taken along.
    """
    opened = opened or [Counter() for _ in layout.buckets]
    most = [0] * layout.world_size
    # There may be ten thousand buckets, and recipes take long to tell apart: once a slot.
    kinds: list[_Kind] = []
    number_of: dict[_Kind, int] = {}
    along: Counter[tuple[int, int]] = Counter()

    @cache
    def works_in(number: int, count: int) -> int:
        kind = kinds[number]
        return kind.recipe.workspace((count, kind.rows, kind.cols)) + kind.copied

    for bucket in layout.buckets:
        own = opened[bucket.index]
        if not bucket.whole:
            recipes = {routes[slot.name].recipe for slot in bucket.slots}
            for rank, numel in bucket.non_empty_shards():
                most[rank] = max(
                    most[rank], own[rank] + max(recipe.workspace((numel,)) for recipe in recipes)
                )
            continue
        together: Counter[tuple[int, int]] = Counter()
        for slot in bucket.slots:
            owners = bucket.owners(slot)
            for kind, count in _kinds_of(slot, routes[slot.name], tp_size):
                number = number_of.setdefault(kind, len(kinds))
                if number == len(kinds):
                    kinds.append(kind)
                for owner in owners:
                    together[owner, number] += count
        for (owner, number), count in together.items():
            most[owner] = max(most[owner], works_in(number, count) + own[owner])
            if not (hosted or own[owner]):
                along[owner, number] += count
    for (owner, number), count in along.items():
        kind = kinds[number]
        most[owner] = max(
            most[owner],
            works_in(
                number, most_together(count, kind.rows * kind.cols, kind.recipe.full_batch_numel)
            ),
        )
    return tuple(most)


class Placing(TypedDict):
    """The settings of a run that :func:`.plan.planner.planner.plan_layout` takes."""

    policy: str
    alignment: int
    stage: int


def placing(run: RunConfig) -> Placing:
    """Those of ``run``."""
    return {
        "policy": run.layerwise.layout,
        "alignment": run.layerwise.alignment,
        "stage": run.stage,
    }


def on_the_wire(specs: Iterable[ParamSpec], run: RunConfig) -> list[ParamSpec]:
    """``specs`` with the dtype that ``run`` sends their gradients in; those that have it are not
    copied.
    """
    sent_as = cache(run.sent_as)
    return [
        spec if spec.wire == sent_as(spec.dtype) else replace(spec, wire=sent_as(spec.dtype))
        for spec in specs
    ]


def forecast(
    specs: Sequence[ParamSpec],
    routes: Mapping[str, Route],
    run: RunConfig,
    num_ranks: int,
    *,
    bucket_numel: int | None = None,
    links: Links | None = None,
    reduction: Reduction = "ordered",
    tp_size: int = 1,
) -> Forecast:
    """Place ``specs`` over ``num_ranks`` as training would, and say what that costs.

    Args:
        bucket_numel: the run's own if None.
        tp_size: how many parts tensor parallelism has cut matrices into.
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
        **placing(run),
    )
    return Forecast.of(
        layout,
        specs,
        routes,
        stage=run.stage,
        host_ratio=run.host_ratio,
        reduction=reduction,
        links=links or NVLINK_IB,
        master_dtype=run.layerwise.master_dtype,
        max_waiting=run.layerwise.max_waiting_buckets,
        tp_size=tp_size,
        stored_as={dtype: run.stored_as(dtype) for dtype in layout.dtypes},
    )
