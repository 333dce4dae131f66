"""The parameters of ZeRO stage 3: a cut on each rank, and whole while a module runs.

DeepSpeed cuts, fetches, prefetches and releases them. A cut is ``param.ds_tensor``, with ceil(numel
/ ranks) elements. On the last ranks, the excess is padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from torch import Tensor, nn

from ds_layerwise.errors import ConfigError
from ds_layerwise.plan.layout.layout import Bucket, Layout, Slot
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.owned.buffers import OwnShards


def make_fetcher(engine: Any, group: comm.Group) -> DeepSpeedZeRoOffload:
    """Cut the parameters of ``engine`` over the ranks, except those that ``zero.Init`` has cut, and
    return the object that fetches them.

    Raises:
        ConfigError: they are cut over other ranks than those of ``group``.
    """
    fetcher = DeepSpeedZeRoOffload(
        engine.module,
        timers=engine.timers,
        ds_config=engine.config,
        overlap_comm=engine.zero_overlap_comm(),
        prefetch_bucket_size=engine.zero_prefetch_bucket_size(),
        max_reuse_distance=engine.zero_max_reuse_distance(),
        max_live_parameters=engine.zero_max_live_parameters(),
        param_persistence_threshold=engine.zero_param_persistence_threshold(),
        model_persistence_threshold=engine.zero_model_persistence_threshold(),
        dp_process_group=group,
        offload_param_config=engine.zero_offload_param(),
        mpu=engine.mpu,
        zero_module_granularity_threshold=engine.zero_module_granularity_threshold(),
        log_trace_cache_warnings=engine.zero_log_trace_cache_warnings(),
    )
    with comm.errors_on_all_ranks(None):
        for name, param in engine.module.named_parameters():
            if comm.ranks_of(param.ds_process_group) != comm.ranks_of(group):
                raise ConfigError(
                    f"{name} is cut over the ranks {comm.ranks_of(param.ds_process_group)}, and "
                    f"gradients are averaged over {comm.ranks_of(group)}; give zero.Init() the "
                    "same config and the same mpu as initialize()"
                )
    return fetcher


@contextmanager
def whole_shapes(params: Iterable[nn.Parameter]) -> Iterator[None]:
    """Give every cut parameter the shape of the whole while a model is inspected.

    The parameter then has the memory of one element: its values must not be read or written.
    """
    held = []
    for param in params:
        if hasattr(param, "ds_id"):
            held.append((param, param.data))
            param.data = torch.zeros(1, dtype=param.dtype, device=param.device).expand(
                param.ds_shape  # type: ignore[attr-defined]
            )
    try:
        yield
    finally:
        for param, data in held:
            param.data = data


def own_cut(param: nn.Parameter, rank: int, value: Tensor) -> None:
    """Write the cut of ``rank`` into ``param``, from the whole ``value``, 1-D."""
    cut: Tensor = param.ds_tensor.data  # type: ignore[attr-defined]
    own = value[rank * cut.numel() :][: cut.numel()]
    cut[: own.numel()].copy_(own)


class ParamCuts:
    """This rank's cuts of the trained parameters, bucket by bucket.

    The cuts of parameters that are split by element move into the shards of ``values``, where they
    are updated. The others move into memory of their own.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        layout: Layout,
        rank: int,
        values: OwnShards,
        fetcher: DeepSpeedZeRoOffload,
    ) -> None:
        self._params = params
        self._rank = rank
        self._fetcher = fetcher
        self._places: dict[str, Tensor] = {}
        apart = []
        for bucket in layout.buckets:
            if bucket.whole:
                apart.append(self._move_apart(bucket))
            else:
                self._move_in(bucket, values.shard(bucket, rank))
        self.tensors = tuple(apart)
        """The memory of the cuts that are no shards, one tensor per bucket."""

    def _move_apart(self, bucket: Bucket) -> Tensor:
        sizes = [bucket.cut_of(slot) for slot in bucket.slots]
        memory = self.of(bucket.slots[0].name).new_zeros(sum(sizes))
        for slot, place in zip(bucket.slots, memory.split_with_sizes(sizes), strict=True):
            self._move(slot, place)
        return memory

    def _move_in(self, bucket: Bucket, shard: Tensor) -> None:
        for slot in bucket.slots:
            first = bucket.offset_in_shard(slot)
            self._move(slot, shard.narrow(0, first, bucket.cut_of(slot)))

    def _move(self, slot: Slot, place: Tensor) -> None:
        """Move the cut of a parameter to ``place``. Elements past the parameter's end keep their
        zeros.
        """
        numel = min(max(slot.numel - self._rank * place.numel(), 0), place.numel())
        place[:numel].copy_(self.of(slot.name)[:numel])
        self._params[slot.name].ds_tensor.data = place  # type: ignore[attr-defined]
        self._places[slot.name] = place

    def of(self, name: str) -> Tensor:
        """Return this rank's cut of ``name``, 1-D, wherever it lies now."""
        cut: Tensor = self._params[name].ds_tensor.data  # type: ignore[attr-defined]
        return cut

    def release(self) -> None:
        """Release all parameters, so that the next use fetches them anew."""
        self._fetcher.partition_all_parameters()

    def fetch_persistent(self) -> None:
        """Gather the parameters that stay whole between steps. A collective."""
        persistent = self._fetcher.persistent_parameters
        if persistent:
            persistent[0].all_gather(persistent)

    def follow_persistent(self) -> None:
        """Copy writes into parameters that stay whole to their cuts."""
        trained = set(self._params.values())
        for param in self._fetcher.persistent_parameters:
            if param in trained and param.numel() == param.ds_numel:
                own_cut(param, self._rank, param.data.view(-1))

    def write(self, name: str, value: Tensor) -> None:
        """Write this rank's cut of a whole parameter, 1-D, and the parameter itself if it is whole
        now.
        """
        param = self._params[name]
        own_cut(param, self._rank, value)
        if param.numel() == value.numel():
            param.data.view(-1).copy_(value)

    def misplaced(self) -> str | None:
        """Return the name of the first parameter whose cut is not in its place; None if all are."""
        for name, place in self._places.items():
            if self.of(name).data_ptr() != place.data_ptr():
                return name
        return None
