"""The parameters of ZeRO stage 3: a cut on each rank, and whole while a module runs.

DeepSpeed cuts, fetches, prefetches and releases them. A cut is ``param.ds_tensor``, with ceil(numel
/ ranks) elements. On the last ranks, the excess is padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.runtime.torch_autocast import get_comm_dtype
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.utils import groups
from torch import Tensor, nn

from ds_layerwise.errors import ConfigError, few
from ds_layerwise.instance_patches import patch, refusing
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.comm.streams import SideStream
from ds_layerwise.ranks.owned.buffers import ShardBuffer
from ds_layerwise.ranks.owned.weight_writes import differs


def refuse_unfetchable(model: nn.Module) -> None:
    """Refuse a model of which DeepSpeed cannot fetch all parameters at ZeRO stage 3.

    Raises:
        ConfigError: names the way out.
    """
    for name, param in model.named_parameters():
        if not getattr(param, "ds_numel", param.numel()):
            raise ConfigError(
                f"{name} has no elements, and DeepSpeed cannot make such a parameter whole at ZeRO "
                "stage 3; take it out of the model, or set zero_optimization.stage to 2"
            )
    for name, module in model.named_modules():
        if isinstance(module, torch._dynamo.OptimizedModule):
            raise ConfigError(
                f"{name or 'the model'} is what torch.compile(module) returned, and DeepSpeed "
                "fetches no parameters into that at ZeRO stage 3; call module.compile() instead, "
                "or engine.compile() after initialize()"
            )


def refuse_second(size: int, num_ranks: int) -> None:
    """Refuse second copies of weights over groups of ``size`` ranks that leave some ranks over.

    Raises:
        ConfigError: names the key.
    """
    if num_ranks % max(size, 1):
        raise ConfigError(
            f"zero_optimization.zero_hpz_partition_size is {size}, which does not divide the "
            f"{num_ranks} ranks; set it to the number of ranks of a node"
        )


def make_fetcher(
    make: Callable[[None], DeepSpeedZeRoOffload],
    engine: Any,
    group: comm.Group,
    expert_groups: Mapping[str, comm.Group],
) -> DeepSpeedZeRoOffload:
    """Cut the parameters of ``engine`` over the ranks, except those that ``zero.Init`` has cut, and
    return the object that fetches them.

    Args:
        make: DeepSpeed's method that makes the object for an engine without an optimizer.
        group: the ranks over which parameters are cut, except experts.
        expert_groups: those of experts, by DeepSpeed's name of the experts.

    Raises:
        ConfigError: they are cut over other ranks than those of their group, or twice.
    """
    second = engine.zero_hpz_partition_size()
    if second > 1:
        refuse_second(second, comm.size_of(group))
        # DeepSpeed's engine makes these groups for its own optimizer alone.
        if groups._get_zero_param_intra_parallel_group() is None:
            groups._create_zero_param_parallel_group(second)
    mpu = engine.mpu
    # The config is read again, for as many sequences as before. Without groups of an mpu, DeepSpeed
    # cuts over all ranks, as ranks of a sequence share cuts.
    engine.mpu = SimpleNamespace(get_data_parallel_world_size=lambda: engine._config.world_size)
    try:
        fetcher = make(None)
    finally:
        engine.mpu = mpu
    if second > 1:
        # Whatever has written weights since the last pass, all ranks fetch the new ones.
        register = engine.module.register_forward_pre_hook
        fetcher.forward_hooks.append(register(_forget_second_copies, prepend=True))
    told = []
    with comm.errors_on_all_ranks():
        for name, param in engine.module.named_parameters():
            ranks = comm.ranks_of(expert_groups.get(getattr(param, "group_name", ""), group))
            if comm.ranks_of(param.ds_process_group) != ranks:
                raise ConfigError(
                    f"{name} is cut over the ranks {comm.ranks_of(param.ds_process_group)}, and "
                    f"its gradients are averaged over {ranks}; give zero.Init() the "
                    "same config and the same mpu as initialize()"
                )
            inside = param.ds_zero_param_process_group
            found = 1 if inside is None else comm.size_of(inside)
            if found != max(second, 1):
                raise ConfigError(
                    f"{name} has second cuts over {found} rank(s), and zero_hpz_partition_size is "
                    f"{second}; give zero.Init() the same config as initialize(), and all engines "
                    "of a process the same size"
                )
            cut = param.ds_tensor
            # A script may have converted the module, which does nothing to cuts.
            if param.dtype != cut.dtype and cut.is_floating_point():
                told.append(f"{name} from {cut.dtype} to {param.dtype}")
                param.data = param.data.to(cut.dtype)
    if told:
        comm.report(
            f"the script has converted {few(told)} after zero.Init(), which converts no cuts: they "
            "are trained in the former dtype"
        )
    return fetcher


@contextmanager
def whole_shapes(params: Iterable[nn.Parameter]) -> Iterator[None]:
    """Give every cut parameter the shape of the whole while a model is inspected.

    The parameter then has the memory of one element: its values must not be read or written.
    """
    held = []
    try:
        for param in params:
            if hasattr(param, "ds_id"):
                held.append((param, param.data))
                shape: torch.Size = param.ds_shape  # type: ignore[attr-defined]
                one = torch.zeros(1, dtype=param.dtype, device=param.device)
                param.data = one.as_strided(shape, [0] * len(shape))
        yield
    finally:
        for param, data in held:
            param.data = data


def filled_cut(param: nn.Parameter) -> tuple[Tensor, int]:
    """Return this rank's cut of ``param``, without padding, and the number of its first element in
    the whole.
    """
    cut: Tensor = param.ds_tensor.data  # type: ignore[attr-defined]
    numel: int = param.ds_numel  # type: ignore[attr-defined]
    rank = comm.rank_of(param.ds_process_group)  # type: ignore[attr-defined]
    start = min(rank * cut.numel(), numel)
    return cut[: numel - start], start


def own_part(param: nn.Parameter, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return this rank's cut of ``param``, without padding, and its part of ``value``, which is
    whole and 1-D.
    """
    cut, start = filled_cut(param)
    return cut, value[start : start + cut.numel()]


def write_cut(param: nn.Parameter, value: Tensor) -> None:
    """Write this rank's cut of ``param`` from the whole ``value``, 1-D."""
    cut, part = own_part(param, value)
    cut.copy_(part)
    param.ds_secondary_tensor = None  # type: ignore[attr-defined]


def _forget_second_copies(model: nn.Module, *_: Any) -> None:
    """Let the next fetch be of cuts, and not of copies within a group of ranks."""
    for param in model.parameters():
        param.ds_secondary_tensor = None  # type: ignore[attr-defined]


class ParamCuts:
    """This rank's cuts of the trained parameters, bucket by bucket.

    Those of parameters that are cut by element move into the shards of ``values``, where they are
    updated; the others stay where DeepSpeed has put them, on the host with ``offload_param``.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        values: ShardBuffer,
        fetcher: DeepSpeedZeRoOffload,
    ) -> None:
        self._params = params
        self._fetcher = fetcher
        self._fetches = SideStream(fetcher._DeepSpeedZeRoOffload__allgather_stream)
        self._device = values.tensors[0].device
        self._places: dict[str, Tensor] = {}
        self._fetched: list[Tensor] | None = None
        """The values of what stays whole, as they were fetched, one tensor per dtype; None where
        they are not known.
        """
        self._were_whole = False
        """True once persistent parameters have been whole."""
        self._refusing: dict[nn.Parameter, ExitStack] = {}
        apart: list[Tensor] = []
        for bucket in values.layout.buckets:
            for slot in bucket.slots:
                cut = self.of(slot.name)
                filled, _ = filled_cut(params[slot.name])
                if bucket.whole:
                    cut[filled.numel() :] = 0
                    apart.append(cut)
                else:
                    first = bucket.offset_in_shard(slot)
                    place = values.tensors[bucket.index].narrow(0, first, cut.numel())
                    # Elements past the parameter's end keep their zeros.
                    place[: filled.numel()].copy_(filled)
                    self._cut(slot.name).data = cut = place
                self._places[slot.name] = cut
        self.tensors = (*values.weights, *apart)
        """The memory of the weights that this rank owns, and of cuts that are no shards."""
        self.take_note()

    def take_note(self) -> None:
        """Let cuts count as not written.

        DeepSpeed's fetches, which have a stream of their own, wait for all that the current stream
        has written into cuts so far.
        """
        self._fetches.follow()
        self._versions = self._versions_now()
        self._followed = False

    def _versions_now(self) -> list[int]:
        # DeepSpeed writes a cut where GatheredParameters has a modifier_rank. The views of
        # :meth:`of` count apart, so that what this package writes is none.
        return [self._cut(name)._version for name in self._params]

    def of(self, name: str) -> Tensor:
        """Return this rank's cut of ``name``, 1-D, wherever it lies now."""
        return self._cut(name).data

    def _cut(self, name: str) -> Tensor:
        cut: Tensor = self._params[name].ds_tensor  # type: ignore[attr-defined]
        return cut

    def release(self) -> None:
        """Let no parameter be whole, so that the next who uses one fetches it anew. What was
        written into persistent ones is lost; see :meth:`follow_persistent`.
        """
        self._were_whole = self._were_whole or bool(self.persistent())
        self._fetcher.partition_all_parameters()
        _forget_second_copies(self._fetcher.module)
        self._fetched = None

    def fetch_persistent(self) -> None:
        """Gather the parameters that stay whole between steps, if they have been whole before. A
        collective.

        In the first forward pass, DeepSpeed must meet them released: it takes note of those that a
        module uses of another while it fetches them.
        """
        if self._were_whole:
            persistent = self._fetcher.persistent_parameters
            persistent[0].all_gather(persistent)
            self._fetched = self._values_of_persistent()

    def persistent(self) -> dict[str, Tensor]:
        """Return the parameters that stay whole, and are, by name; 1-D."""
        stay = set(self._fetcher.persistent_parameters)
        found = {}
        for name, param in self._fetcher.module.named_parameters():
            if param in stay and param.numel() == param.ds_numel:
                found[name] = param.data.view(-1)
        return found

    def written(self) -> Tensor:
        """Tell whether a signal shows that somebody has written a cut, or what stays whole, since
        :meth:`take_note`: 0-d bool; nobody waits for the device.
        """
        known = self._followed or self._versions != self._versions_now()
        return self._persistent_written() | known

    def _persistent_written(self) -> Tensor:
        """Tell whether somebody has written into what stays whole since it was fetched: 0-d bool;
        nobody waits for the device.
        """
        found = torch.zeros((), dtype=torch.bool, device=self._device)
        if self._fetched is None:
            for cut, part in self._persistent_parts():
                found |= differs(cut.to(part.device), part).any()
            return found
        for fetched, now in zip_longest(self._fetched, self._values_of_persistent()):
            if fetched is None or now is None or fetched.numel() != now.numel():
                # Others are whole now.
                return found.logical_not_()
            found |= differs(fetched, now).any()
        return found

    def _values_of_persistent(self) -> list[Tensor]:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for value in self.persistent().values():
            by_dtype.setdefault(value.dtype, []).append(value)
        return [torch.cat(values) for values in by_dtype.values()]

    def _persistent_parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the cut of each parameter that stays whole, and what it has to be."""
        for name, value in self.persistent().items():
            param = self._fetcher.module.get_parameter(name)
            cut, part = own_part(param, value)
            before = cut.to(part.device)
            # Under torch_autocast it was rounded to be fetched, which is no write.
            fetched = before.to(get_comm_dtype(param)).to(cut.dtype)
            yield cut, torch.where(differs(part, fetched), part, before)

    def follow_persistent(self) -> None:
        """Let cuts follow what somebody has written into what stays whole. Where nobody has, a cut
        keeps what was written into it.
        """
        if self._persistent_written():
            for cut, new in self._persistent_parts():
                cut.copy_(new)
            self._followed = True
            if self._fetched is not None:
                self._fetched = self._values_of_persistent()

    def write(self, name: str, value: Tensor) -> None:
        """Write this rank's cut of a whole parameter, 1-D, and the parameter itself if it is whole
        now.
        """
        param = self._params[name]
        write_cut(param, value)
        if param.numel() == value.numel():
            param.data.view(-1).copy_(value)

    def whole(self, name: str) -> Tensor:
        """Return a copy of a parameter, 1-D, put together of the cuts of its ranks, which must all
        call this.
        """
        return self.together(name, self.of(name))

    def part(self, param: nn.Parameter, whole: Tensor) -> Tensor:
        """Return a copy of this rank's cut of ``whole``, 1-D, with zeros for padding."""
        _, part = own_part(param, whole)
        padding = param.ds_tensor.numel() - part.numel()  # type: ignore[attr-defined]
        return nn.functional.pad(part, (0, padding)).clone()

    def together(self, name: str, cut: Tensor) -> Tensor:
        """Put values of the parameter ``name`` together of the ``cut`` of each of its ranks, which
        must all call this. Return them 1-D, in the dtype of the cuts.
        """
        param: Any = self._params[name]
        group = param.ds_process_group
        cut = cut.to(self._device).reshape(-1)
        whole = cut.new_empty(comm.size_of(group) * cut.numel())
        comm.all_gather(whole, cut, group=group).wait()
        return whole[: param.ds_numel]

    def take_away(self) -> None:
        """Let whoever makes a parameter whole meet an error, while the memory of cuts is away.
        Cuts have what was written into persistent ones.
        """
        self.follow_persistent()
        self.release()
        for param in self._fetcher.module.parameters():
            if param not in self._refusing:
                self._refusing[param] = patch(
                    param, all_gather=_refuse_to_fetch, all_gather_coalesced=_refuse_to_fetch
                )

    def put_back(self) -> None:
        """Undo :meth:`take_away`. A collective."""
        if self._refusing:
            for undo in self._refusing.values():
                undo.close()
            self._refusing = {}
            self.fetch_persistent()

    def misplaced(self) -> str | None:
        """Return the name of the first parameter whose cut is not in its place; None if all are."""
        for name, place in self._places.items():
            if self._cut(name).data_ptr() != place.data_ptr():
                return name
        return None


_refuse_to_fetch = refusing("parameters are offloaded; call engine.reload_states() first")
