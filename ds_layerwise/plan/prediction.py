"""What a step takes on given links: seconds to reduce, to update and to gather, and the bucket size that suits.

What the model of the links leaves out is said in :mod:`.plan.links`; what is missing here is the forward and the
backward pass, of which shapes say nothing. A reduction hides behind the backward pass but for what can only begin with
the last gradient, which is told apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ds_layerwise.plan.forecast import Forecast, planned
from ds_layerwise.plan.layout import Layout, ParamSpec
from ds_layerwise.plan.links import NVLINK_IB, Links
from ds_layerwise.plan.run_config import RunConfig
from ds_layerwise.plan.ways import Load, Reduction, WireTime, wire_time

#: Bucket sizes that a plan compares with its own, elements.
BUCKET_NUMELS = (100_000_000, 250_000_000, 500_000_000, 1_000_000_000)

#: Of bucket sizes that take up to so many percent longer than the fastest, the best is the one that leaves least to do
#: after the last gradient.
_AS_FAST_PERCENT = 5


@dataclass(frozen=True, slots=True)
class BucketSize:
    """What becomes of a step with another bucket size."""

    bucket_numel: int
    num_buckets: int
    wire: WireTime


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

    @property
    def total(self) -> int:
        """What a step takes altogether, if nothing hides behind the backward pass."""
        return self.wire.total + self.update

    @property
    def best(self) -> BucketSize:
        """The best bucket size of those that are compared."""
        fastest = min(size.wire.total for size in self.sizes)
        fast = [size for size in self.sizes if 100 * size.wire.total <= (100 + _AS_FAST_PERCENT) * fastest]
        return min(fast, key=lambda size: (size.wire.tail, size.wire.total))


def predict(forecast: Forecast, specs: Sequence[ParamSpec], run: RunConfig, *, links: Links | None = None,
            reduction: Reduction = "ordered", bucket_numels: Sequence[int] = BUCKET_NUMELS) -> Prediction:
    """What a step of ``forecast`` takes, a plan of ``specs`` for the same ``links`` and ``reduction``.

    Args:
        links: :data:`.plan.links.NVLINK_IB` if None.
        bucket_numels: sizes that the plan's own is compared with.
    """
    links, layout = links or NVLINK_IB, forecast.layout
    own = BucketSize(run.bucket_numel, len(layout.buckets),
                     _wire_time(layout, forecast.wires, links, reduction, run.stage))
    sizes = [own]
    for bucket_numel in sorted({*bucket_numels} - {run.bucket_numel}):
        other, wires = planned(specs, run, layout.world_size, bucket_numel=bucket_numel, links=links,
                               reduction=reduction)
        sizes.append(BucketSize(bucket_numel, len(other.buckets),
                                _wire_time(other, wires, links, reduction, run.stage)))
    ways = Counter(bucket.way for bucket in layout.buckets if bucket.whole)
    # TFLOP/s are 1,000 FLOPs a nanosecond.
    return Prediction(links, reduction, {way: ways[way] for way in ("even", "ragged", "cuts") if ways[way]}, own.wire,
                      round(max(forecast.report.work) / (1000 * links.tflops)),
                      sorted(sizes, key=lambda size: size.bucket_numel))


def _wire_time(layout: Layout, wires: Sequence[str], links: Links, reduction: Reduction, stage: int) -> WireTime:
    loads = [Load.of_bucket(bucket, wire, reduction, stage) for bucket, wire in zip(layout.buckets, wires, strict=True)]
    return wire_time(loads, [bucket.way for bucket in layout.buckets], links, reduction)
