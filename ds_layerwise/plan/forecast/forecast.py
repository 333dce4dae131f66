"""The forecast of a run: what each rank computes, holds, works in and sends, from names, shapes and
the config alone.

Training and ``ds-layerwise plan`` both produce a :class:`Forecast`. Shapes come from the model in
training, and from a model without memory in a plan.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from ds_layerwise.config.run_config import RunConfig, Whole
from ds_layerwise.errors import RoutingError
from ds_layerwise.optimizers.recipe import Recipe, Shape
from ds_layerwise.orthogonalize.tensor_shards import Axis
from ds_layerwise.plan.forecast.memory import (
    RankMemory,
    Working,
    gathered_bytes,
    memory_bytes,
    state_bytes_of,
    sums_bytes,
    transfer_bytes,
    update_bytes,
)
from ds_layerwise.plan.forecast.sent import Sent, sent_bytes, totals
from ds_layerwise.plan.layout.layout import Layout, ParamSpec
from ds_layerwise.plan.layout.planner import plan_layout
from ds_layerwise.plan.layout.transport import Reduction, itemsize
from ds_layerwise.routing.routes import Routes


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
        ep_size: the number of consecutive ranks that hold different experts, by name; 1 if a name
            is missing.
        wires: the dtype in which the gradient is sent, by name; float32 if a name is missing.
        tp_size: the number of tensor-parallel parts of a matrix.

    Raises:
        RoutingError: a recipe cannot update a parameter of such a shape, or one that is cut in such
            a way.
    """

    @cache
    def work(recipe: Recipe, multiplied: Shape, axis: Axis | None) -> tuple[int, int]:
        return recipe.shared_work(multiplied, axis, tp_size)

    specs = []
    for name, shape, dtype in params:
        route = routes.get(name)
        if route is None:
            continue
        seen = route.seen(math.prod(shape))
        flops = to_peers = 0
        for part, its in seen.items() if route.whole else ():
            whole = route.whole_shape(its, tp_size)
            if why := route.recipe.refusal(whole, cut_axis=route.tp_axis):
                of_part = f", part {part} {its}," if part else ""
                raise RoutingError(f"{name} {shape}{of_part} {why}")
            own = work(route.recipe, route.multiplied(its, tp_size), route.tp_axis)
            flops += own[0]
            to_peers += own[1]
        specs.append(
            ParamSpec(
                name=name,
                shape=shape,
                dtype=dtype,
                whole=route.whole,
                work=flops,
                ep_size=(ep_size or {}).get(name, 1),
                wire=(wires or {}).get(name, "float32"),
                to_peers=to_peers,
            )
        )
    return specs


def max_over_mean(loads: Sequence[int]) -> float:
    """Return the load of the busiest rank over the mean; 1 if there is no load."""
    if any(loads):
        return max(loads) * len(loads) / sum(loads)
    return 1.0


@dataclass(frozen=True)
class LayoutReport:
    """The balance and padding of a layout. Tuples are by rank."""

    num_buckets: int
    numel: int
    """The number of elements in all parameters of a rank's model."""
    padding: int
    """The number of elements of the buffers that belong to no parameter."""
    work: tuple[int, ...]
    """The FLOPs of matrix updates (Newton-Schulz)."""
    whole_numel: tuple[int, ...]
    """The elements of whole parameters, which ownership can unbalance."""
    to_peers: tuple[int, ...]
    """The bytes sent to the ranks with the other tensor shards in a step."""

    @classmethod
    def of(cls, layout: Layout, specs: Sequence[ParamSpec]) -> LayoutReport:
        """Report on ``layout``, a plan of exactly these ``specs``."""
        by_name = {spec.name: spec for spec in specs}
        work = [0] * layout.world_size
        whole = [0] * layout.world_size
        to_peers = [0] * layout.world_size
        for bucket in layout.buckets:
            for slot in bucket.slots if bucket.whole else ():
                for owner in bucket.owners(slot):
                    work[owner] += by_name[slot.name].work
                    whole[owner] += slot.numel
                    to_peers[owner] += by_name[slot.name].to_peers
        numel = sum(spec.numel for spec in specs)
        padding = sum(layout.buffers.values()) - numel
        return cls(len(layout.buckets), numel, padding, tuple(work), tuple(whole), tuple(to_peers))


@dataclass(frozen=True)
class Forecast:
    """A layout and its costs. Tuples are by rank, mappings by dtype of the layout."""

    layout: Layout
    stage: int
    micro_batches: int
    """The number in a step; 1 if the config alone does not say."""
    reduction: Reduction
    stored_as: Mapping[str, str]
    """The dtype in which gradients accumulate."""
    wires: tuple[str, ...]
    """The dtype in which gradients are sent, by bucket."""
    kept_as: tuple[str, ...]
    """The dtype in which sums of gradients are kept, by bucket."""
    report: LayoutReport
    memory: tuple[RankMemory, ...]
    """The bytes held between two steps."""
    working: Working
    """The bytes that a rank works in beside them."""
    sent: Mapping[str, Sent]
    """The bytes sent to the ranks that share a gradient, by dtype of the parameters."""
    sent_by_axis: Mapping[str, int]
    """The bytes that the busiest rank of each axis of the mesh sends: to those that share gradients
    of ``data`` and ``expert-data``, to those with other ``tensor`` shards, and to other stages for
    ``pipeline ties``.
    """

    @classmethod
    def of(
        cls,
        layout: Layout,
        specs: Sequence[ParamSpec],
        routes: Routes,
        run: RunConfig,
        *,
        tp_size: int = 1,
        reduction: Reduction = "ordered",
        tied: Mapping[str, int] | None = None,
    ) -> Forecast:
        """Forecast the costs of ``layout``, a plan of exactly these ``specs``.

        Args:
            routes: the routes of at least these, by name.
            tp_size: the number of tensor-parallel parts of a matrix.
            reduction: the method of sums; see :mod:`.plan.layout.transport`.
            tied: the number of pipeline stages that hold a parameter, by name; 1 for others.
        """
        wires = wires_of(layout, specs)
        stored_as = {dtype: run.stored_as(dtype) for dtype in layout.buffers}
        master_dtype = run.layerwise.master_dtype
        whole = _whole(specs, run)
        memory = memory_bytes(
            layout,
            state_bytes=state_bytes_of(routes),
            stage=run.stage,
            stored_as=stored_as,
            host_ratio=run.host_ratio,
            params_on_host=run.params_on_host,
            master_dtype=master_dtype,
            persistent=whole.always,
        )
        kept_as = kept_dtypes(wires, reduction, run)
        update = update_bytes(layout, routes, master_dtype, tp_size=tp_size, kept_as=kept_as)
        sending: dict[str, Any] = {
            "stage": run.stage,
            "stored_as": stored_as,
            "wires": wires,
            "reduction": reduction,
        }
        sums = sums_bytes(
            layout, **sending, kept_as=kept_as, beside=[rank.total for rank in memory]
        )
        working = Working(
            update=sums.update + update + max(rank.staging for rank in memory),
            in_pass=sums.in_pass + _waiting(layout, run) + whole.most - whole.always,
            exchange=sums.exchange,
            transfers=transfer_bytes(layout, **sending) + gathered_bytes(layout, stage=run.stage),
        )
        report = LayoutReport.of(layout, specs)
        sends = partial(sent_bytes, layout, wires=wires, reduction=reduction, stage=run.stage)
        sent = sends()
        to_experts = totals(sends(experts_alone=True))
        ties = []
        for spec in specs:
            held = (tied or {}).get(spec.name, 1)
            ties.append(2 * (held - 1) * spec.numel * itemsize(stored_as[spec.dtype]) // held)
        return cls(
            layout,
            run.stage,
            run.micro_batches or 1,
            reduction,
            stored_as,
            wires,
            kept_as,
            report,
            memory,
            working,
            sent,
            {
                "data": int((totals(sent) - to_experts).max()),
                "expert-data": int(to_experts.max()),
                "tensor": max(report.to_peers),
                "pipeline ties": sum(ties),
            },
        )

    @property
    def transports(self) -> dict[str, int]:
        """The number of buckets of whole parameters by transport."""
        count = Counter(bucket.transport for bucket in self.layout.buckets if bucket.whole)
        return {"even": count["even"], "cuts": count["cuts"]}

    @property
    def fullest(self) -> int:
        """The rank that holds most between two steps."""
        totals = [rank.total for rank in self.memory]
        return totals.index(max(totals))

    @property
    def needed(self) -> int:
        """The bytes that the fullest rank needs on its device, apart from activations and what else
        the forward and backward pass keep.
        """
        return self.memory[self.fullest].total + self.working.total

    def wire_as(self, dtype: str) -> str:
        """Return the names of the dtypes in which gradients of parameters of ``dtype`` are sent."""
        wires = set()
        for bucket, wire in zip(self.layout.buckets, self.wires, strict=True):
            if bucket.dtype == dtype:
                wires.add(wire)
        return " and ".join(sorted(wires))

    def sent_by_busiest(self) -> dict[str, tuple[int, int]]:
        """Return the bytes of gradients and of parameters on the busiest rank, by dtype of the
        parameters.

        The busiest rank is the one that sends most of both together.
        """
        busiest = int(totals(self.sent).argmax())
        return {
            dtype: (sent.gradients[busiest], sent.parameters[busiest])
            for dtype, sent in self.sent.items()
        }

    @property
    def sent_in_step(self) -> int:
        """The bytes that the busiest rank of each kind sends in a step, over all axes."""
        beside = self.sent_by_axis["tensor"] + self.sent_by_axis["pipeline ties"]
        gradients, parameters = map(sum, zip(*self.sent_by_busiest().values()))
        if self.stage > 1:
            gradients *= self.micro_batches
        return beside + gradients + parameters


def _waiting(layout: Layout, run: RunConfig) -> int:
    """Return the most bytes of gradients that wait for the reduction of others, or without
    ``overlap_comm`` for the end of the backward pass.

    At stage 1 they have a buffer, so nothing is counted.
    """
    if run.stage == 1:
        return 0
    nbytes = [bucket.numel * itemsize(bucket.dtype) for bucket in layout.buckets]
    most = run.layerwise.max_waiting_buckets
    # One more bucket fills while others wait.
    return sum(sorted(nbytes, reverse=True)[: most and most + 1])


def _whole(specs: Sequence[ParamSpec], run: RunConfig) -> Whole:
    """Return the bytes of parameters that DeepSpeed makes whole on each rank at stage 3."""
    if run.fetching is None:
        return Whole(0, 0)
    return run.fetching.whole((spec.numel, spec.numel * itemsize(spec.dtype)) for spec in specs)


def wires_of(layout: Layout, specs: Iterable[ParamSpec]) -> tuple[str, ...]:
    """Return the dtype in which gradients are sent, by bucket of a plan of ``specs``."""
    wire_of = {spec.name: spec.wire for spec in specs}
    return tuple(wire_of[bucket.slots[0].name] for bucket in layout.buckets)


def kept_dtypes(wires: Iterable[str], reduction: Reduction, run: RunConfig) -> tuple[str, ...]:
    """Return the dtype in which a rank keeps its sums of gradients, by bucket, from the only
    backward pass of a step to the update; those of further ones are added in float32.

    The backend's sums in bfloat16 are kept as they arrive, and those in float16 are not: they
    include a factor. Captured updates find them in one place, in float32.

    Args:
        wires: the dtype in which gradients are sent, by bucket.
    """
    adds = run.stage == 1 or run.micro_batches != 1 or run.layerwise.cuda_graph
    adds |= reduction == "ordered"
    return tuple("float32" if adds or wire != "bfloat16" else wire for wire in wires)


def forecast(
    specs: Sequence[ParamSpec],
    routes: Routes,
    run: RunConfig,
    num_ranks: int,
    *,
    bucket_numel: int | None = None,
    **options: Any,
) -> Forecast:
    """Place ``specs`` over ``num_ranks`` as training would, and forecast the costs.

    Args:
        bucket_numel: the bucket size; None for that of the run.
        options: as in :meth:`Forecast.of`.

    Raises:
        LayoutError: ``num_ranks`` is less than 1.
    """
    layout = plan_layout(
        specs,
        num_ranks,
        bucket_numel=bucket_numel or run.bucket_numel,
        policy=run.layerwise.layout,
        alignment=run.layerwise.alignment,
        stage=run.stage,
        param_wire=run.layerwise.param_wire,
    )
    return Forecast.of(layout, specs, routes, run, **options)
