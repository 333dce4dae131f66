"""What a step takes on given links: seconds to reduce, to update and to gather, and the bucket size
that suits.

What the model of the links leaves out is said in :mod:`.plan.network.links`; what is missing here
is the forward and the backward pass, of which shapes say nothing. A reduction hides behind the
backward pass but for what can only begin with the last gradient, which is told apart. Where it is
said how much memory a device has, sizes are also asked whether they fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ds_layerwise.config.run_config import RunConfig
from ds_layerwise.plan.forecast.forecast import Forecast, forecast, on_the_wire, placing
from ds_layerwise.plan.layout.layout import ParamSpec
from ds_layerwise.plan.network.links import NVLINK_IB, Links
from ds_layerwise.plan.network.reduction import Reduction
from ds_layerwise.plan.network.transport import Load, WireTime, time_of_drafts, wire_time
from ds_layerwise.plan.planner.planner import draft_layout
from ds_layerwise.plan.routes.routes import Route

#: Bucket sizes that a plan compares with its own, elements.
BUCKET_NUMELS = (100_000_000, 250_000_000, 500_000_000, 1_000_000_000)

#: Of bucket sizes that take up to so many percent longer than the fastest, the best is the one that
#: leaves least to do after the last gradient.
_AS_FAST_PERCENT = 5


@dataclass(frozen=True, slots=True)
class BucketSize:
    """What becomes of a step with another bucket size."""

    bucket_numel: int
    num_buckets: int
    wire: WireTime
    left: int | None = None
    """Bytes of its device that the rank which needs most leaves, less than 0 if it lacks them; None
    where nobody says what a device has."""

    @property
    def fits(self) -> bool:
        """Whether every rank has what it needs; so it is taken to be where nobody says what a
        device has.
        """
        return self.left is None or self.left >= 0


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one plan takes a step, in nanoseconds."""

    links: Links
    reduction: Reduction
    ways: Mapping[str, int]
    """How many buckets of whole parameters go which way."""
    wire: WireTime
    update: int
    """Newton-Schulz on the busiest rank, at the rate that the links have for products."""
    sizes: Sequence[BucketSize]
    """By size, the plan's own among them."""
    memory_bytes: int | None = None
    """What one device has, where somebody says so."""

    @property
    def total(self) -> int:
        """What a step takes altogether, if nothing hides behind the backward pass."""
        return self.wire.total + self.update

    @property
    def own(self) -> BucketSize:
        """The plan's own bucket size."""
        return next(size for size in self.sizes if size.wire is self.wire)

    @property
    def best(self) -> BucketSize | None:
        """The best bucket size of those that are compared and fit; None if none of them does."""
        fitting = [size for size in self.sizes if size.fits]
        if not fitting:
            return None
        fastest = min(size.wire.total for size in fitting)
        fast = [
            size for size in fitting if 100 * size.wire.total <= (100 + _AS_FAST_PERCENT) * fastest
        ]
        return min(fast, key=lambda size: (size.wire.tail, size.wire.total))


def predict(
    plan: Forecast,
    specs: Sequence[ParamSpec],
    routes: Mapping[str, Route],
    run: RunConfig,
    *,
    links: Links | None = None,
    reduction: Reduction = "ordered",
    tp_size: int = 1,
    memory_bytes: int | None = None,
    bucket_numels: Sequence[int] = BUCKET_NUMELS,
) -> Prediction:
    """What a step of ``plan`` takes, the forecast of ``specs`` for the same ``links``,
    ``reduction`` and ``tp_size``.

    Args:
        routes: by name, of at least ``specs``.
        links: :data:`.plan.network.links.NVLINK_IB` if None.
        tp_size: how many parts tensor parallelism has cut matrices into.
        memory_bytes: what one device has; if None, nothing is asked whether it fits.
        bucket_numels: sizes that the plan's own is compared with.
    """
    links, layout, specs = links or NVLINK_IB, plan.layout, on_the_wire(specs, run)

    def size_of(costs: Forecast, bucket_numel: int) -> BucketSize:
        buckets = costs.layout.buckets
        loads = [
            Load.of_bucket(bucket, wire, reduction, run.stage)
            for bucket, wire in zip(buckets, costs.wires, strict=True)
        ]
        return BucketSize(
            bucket_numel,
            len(buckets),
            wire_time(loads, [bucket.way for bucket in buckets], links, reduction),
            None if memory_bytes is None else memory_bytes - max(costs.needed),
        )

    own = size_of(plan, run.bucket_numel)
    sizes = [own]
    for bucket_numel in sorted({*bucket_numels} - {run.bucket_numel}):
        if memory_bytes is None:
            drafts = draft_layout(
                specs,
                layout.world_size,
                bucket_numel=bucket_numel,
                links=links,
                reduction=reduction,
                **placing(run),
            )
            sizes.append(
                BucketSize(
                    bucket_numel, len(drafts), time_of_drafts(drafts, links, reduction, run.stage)
                )
            )
        else:
            sizes.append(
                size_of(
                    forecast(
                        specs,
                        routes,
                        run,
                        layout.world_size,
                        bucket_numel=bucket_numel,
                        links=links,
                        reduction=reduction,
                        tp_size=tp_size,
                    ),
                    bucket_numel,
                )
            )
    ways = Counter(bucket.way for bucket in layout.buckets if bucket.whole)
    # TFLOP/s are 1,000 FLOPs a nanosecond.
    return Prediction(
        links,
        reduction,
        {way: ways[way] for way in ("even", "ragged", "cuts") if ways[way]},
        own.wire,
        round(max(plan.report.work) / (1000 * links.tflops)),
        sorted(sizes, key=lambda size: size.bucket_numel),
        memory_bytes,
    )
