"""The predicted time of a step on given links, and the best bucket size.

:mod:`.plan.network.links` lists what the model of the links leaves out. The forward and the
backward pass are not included, because shapes do not determine their times. Reductions overlap with
the backward pass, except for the part that can only begin with the last gradient; that part is a
separate number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ds_layerwise.config.run_config import RunConfig
from ds_layerwise.plan.forecast.forecast import Forecast, forecast, on_the_wire
from ds_layerwise.plan.layout.layout import ParamSpec
from ds_layerwise.plan.network.links import NVLINK_IB, Links
from ds_layerwise.plan.network.reduction import Reduction
from ds_layerwise.plan.network.transport import Load, WireTime, time_of_drafts, wire_time
from ds_layerwise.plan.planner.planner import draft_layout
from ds_layerwise.routing.routes import Routes

#: The bucket sizes, in elements, that a plan compares with its own.
BUCKET_NUMELS = (100_000_000, 250_000_000, 500_000_000, 1_000_000_000)

#: Among bucket sizes at most this many percent slower than the fastest, the best is the one that
#: leaves least to do after the last gradient.
_AS_FAST_PERCENT = 5


@dataclass(frozen=True)
class BucketSize:
    """A bucket size, and the resulting step."""

    bucket_numel: int
    num_buckets: int
    wire: WireTime
    left: int | None = None
    """The bytes of device memory that are left on the rank that needs most; negative if memory is
    missing; None if the device memory is not given.
    """

    @property
    def fits(self) -> bool:
        """Tell whether every rank has enough memory; True if the device memory is not given."""
        return self.left is None or self.left >= 0


@dataclass(frozen=True)
class Prediction:
    """The predicted time of one plan's step, in nanoseconds."""

    links: Links
    reduction: Reduction
    ways: Mapping[str, int]
    """The number of buckets of whole parameters, by transport."""
    own: BucketSize
    """The plan's own bucket size."""
    update: int
    """The time of Newton-Schulz on the busiest rank, at the links' rate of products."""
    sizes: Sequence[BucketSize]
    """The compared bucket sizes in ascending order, with the plan's own."""
    memory_bytes: int | None = None
    """The memory of one device; None if it is not given."""

    @property
    def wire(self) -> WireTime:
        """The times of the collectives."""
        return self.own.wire

    @property
    def total(self) -> int:
        """The time of a step without any overlap with the backward pass."""
        return self.wire.total + self.update

    @property
    def best(self) -> BucketSize | None:
        """The best of the bucket sizes that fit; None if none fits."""
        fitting = [size for size in self.sizes if size.fits]
        if not fitting:
            return None
        limit = (100 + _AS_FAST_PERCENT) * min(size.wire.total for size in fitting)
        fast = [size for size in fitting if 100 * size.wire.total <= limit]
        return min(fast, key=lambda size: (size.wire.tail, size.wire.total))


def predict(
    plan: Forecast,
    specs: Sequence[ParamSpec],
    routes: Routes,
    run: RunConfig,
    *,
    links: Links = NVLINK_IB,
    reduction: Reduction = "ordered",
    tp_size: int = 1,
    memory_bytes: int | None = None,
    bucket_numels: Sequence[int] = BUCKET_NUMELS,
) -> Prediction:
    """Predict a step of ``plan``, the forecast of ``specs`` for the same settings.

    Args:
        routes: by name, of at least ``specs``.
        tp_size: the number of tensor-parallel parts of a matrix.
        memory_bytes: the memory of one device; None if it is unknown.
        bucket_numels: the sizes that the plan's own is compared with.
    """
    layout = plan.layout

    def size_of(costs: Forecast, bucket_numel: int) -> BucketSize:
        buckets = costs.layout.buckets
        loads = [
            Load.of_bucket(bucket, wire, reduction, run.stage)
            for bucket, wire in zip(buckets, costs.wires, strict=True)
        ]
        left = None
        if memory_bytes is not None:
            left = memory_bytes - costs.needed
        ways = [bucket.way for bucket in buckets]
        wire = wire_time(loads, ways, links, reduction, run.stage)
        return BucketSize(bucket_numel, len(buckets), wire, left)

    own = size_of(plan, run.bucket_numel)
    sizes = [own]
    sent = on_the_wire(specs, run)
    for bucket_numel in {*bucket_numels} - {run.bucket_numel}:
        if memory_bytes is None:
            drafts = draft_layout(
                sent,
                layout.world_size,
                bucket_numel=bucket_numel,
                policy=run.layerwise.layout,
                alignment=run.layerwise.alignment,
                links=links,
                reduction=reduction,
                stage=run.stage,
            )
            wire = time_of_drafts(drafts, links, reduction, run.stage)
            sizes.append(BucketSize(bucket_numel, len(drafts), wire))
            continue
        costs = forecast(
            specs,
            routes,
            run,
            layout.world_size,
            bucket_numel=bucket_numel,
            links=links,
            reduction=reduction,
            tp_size=tp_size,
        )
        sizes.append(size_of(costs, bucket_numel))
    ways = Counter(bucket.way for bucket in layout.buckets if bucket.whole)
    # 1 TFLOP/s is 1,000 FLOPs per nanosecond.
    return Prediction(
        links,
        reduction,
        {way: ways[way] for way in ("even", "ragged", "cuts") if ways[way]},
        own,
        round(max(plan.report.work) / (1000 * links.tflops)),
        sorted(sizes, key=lambda size: size.bucket_numel),
        memory_bytes,
    )
