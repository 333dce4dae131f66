"""The state of a run on this rank: parameters, their memory, and the collectives between ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from ds_layerwise.optimizers.registry import check_recipes
from ds_layerwise.parallel.pipeline import is_pipeline
from ds_layerwise.plan.forecast.forecast import kept_dtypes, wires_of
from ds_layerwise.plan.forecast.memory import owner_dtype, pieces_on_host, state_bytes_of
from ds_layerwise.ranks.comm import comm, group_pool
from ds_layerwise.ranks.owned.buffers import (
    DTYPES,
    FlatBuffer,
    ParamViews,
    ShardBuffer,
    new_shards,
)
from ds_layerwise.ranks.owned.captured import graphs_of
from ds_layerwise.ranks.owned.owned import Owned, OwnedSettings
from ds_layerwise.ranks.sync.bucket_transfers import make_wires
from ds_layerwise.ranks.sync.cut_sync import CutSync
from ds_layerwise.ranks.sync.grad_sync import GradSync
from ds_layerwise.ranks.sync.param_cuts import ParamCuts
from ds_layerwise.ranks.sync.param_sync import ParamSync
from ds_layerwise.zero.setup import numerics_context
from ds_layerwise.zero.setup.matmul_dtype import Products
from ds_layerwise.zero.setup.param_groups import LayerWiseOptimizer
from ds_layerwise.zero.setup.run_plan import Planned
from ds_layerwise.zero.setup.run_settings import Settings
from ds_layerwise.zero.step_progress import Interrupted, Progress


class RunState:
    """The parameters, buffers, states and process groups of this rank, shared by all parts of the
    optimizer.

    :meth:`allocate` makes everything that needs memory. :meth:`connect`, called after it, makes
    everything that needs process groups.

    Args:
        engine: returns the engine, or None once it is gone.
    """

    products: Products
    places: ParamViews | ParamCuts
    """The trained parameters, where they live."""
    shards: ShardBuffer
    """This rank's shards of the parameters."""
    grads: FlatBuffer | None
    """The memory of the gradients; None from ZeRO stage 2 on, where only owners have them."""
    owned: Owned
    """The masters, the states and the averaged gradients of this rank."""
    grad_sync: GradSync
    progress: Progress
    param_sync: ParamSync | CutSync

    def __init__(
        self,
        model: nn.Module,
        optimizer: LayerWiseOptimizer,
        settings: Settings,
        planned: Planned,
        engine: Callable[[], Any],
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.config = settings.layerwise
        self.settings = settings
        self.planned = planned
        self.engine = engine
        self.scaling = settings.scaling
        self.interrupted = Interrupted()
        self.rank = comm.rank_of(settings.group)
        self.groups: dict[int, comm.Group] = {}
        """The groups of ranks that hold the same experts, by the number of consecutive ranks that
        hold different ones.
        """
        for group in (*settings.expert_groups.values(), settings.group):
            self.groups[comm.size_of(settings.group) // comm.size_of(group)] = group
        self.pieces = {piece.name: piece for piece in planned.layout.pieces(self.rank)}
        """The pieces of parameters that this rank owns, by name, in memory order."""
        self.ep_sizes = {spec.name: spec.ep_size for spec in planned.specs}
        """The number of consecutive ranks that hold different experts under a name, by parameter in
        model order.
        """
        self.params = planned.trained
        """The trained parameters by name."""
        self.shapes = {name: tuple(param.shape) for name, param in self.params.items()}
        """The shapes of whole parameters by name."""
        self.wires = wires_of(planned.layout, planned.specs)
        """The dtype in which gradients are sent, by bucket."""
        self.device = next(iter(self.params.values())).device
        self.tied: list[tuple[str, comm.Group]] = []
        """The parameters that other pipeline stages hold as well, each with the group of the ranks
        that hold it.
        """
        stages: Any = model
        # In the same order on all stages.
        for weight, group in stages.get_tied_weights_and_groups() if is_pipeline(model) else ():
            self.tied += [(name, group) for name, param in self.params.items() if param is weight]

    def allocate(self) -> None:
        """Allocate the buffers and move the parameters into them.

        Raises:
            LayerWiseError: on every rank, if any rank lacks the memory, on its device or
                page-locked.
        """
        recipes = self.planned.recipes
        self.products = Products.agree(recipes, self.device)
        self._move_in()
        with comm.errors_on_all_ranks(), numerics_context.set_aside(self.device):
            self.grads = None
            if self.settings.stage == 1:
                layout = self.planned.layout
                stored_as = {}
                for dtype in layout.buffers:
                    stored_as[dtype] = DTYPES[self.settings.stored_as(dtype)]
                self.grads = FlatBuffer(layout, self.device, stored_as=stored_as)
            check_recipes(recipes, self.device)
            self.owned = self._make_owned()
            self.optimizer.hold(
                {self.params[name]: self.owned.states[name] for name in self.pieces}
            )
        # The former memory of the parameters, which torch would keep.
        get_accelerator().empty_cache()

    def _move_in(self) -> None:
        """Move the parameters into the buffer, or at ZeRO stage 3 their cuts and what this rank
        owns into its shards.
        """
        layout = self.planned.layout
        if self.settings.stage < 3:
            with comm.errors_on_all_ranks(), numerics_context.set_aside(self.device):
                views = ParamViews(self.params, layout, self.device)
            self.places = views
            self.shards = views.values.shards(self.rank)
            return
        with comm.errors_on_all_ranks():
            dtype_of = partial(
                owner_dtype,
                master_dtype=self.config.master_dtype,
                host_ratio=self.settings.host_ratio,
            )
            shards = new_shards(layout, self.rank, self.device, dtype_of)
            cuts = ParamCuts(self.params, shards, self.settings.fetcher)
        self.places = cuts
        self.shards = shards
        self.param_sync = CutSync(shards, cuts, groups=self.groups, ep_size=self.ep_sizes)
        self.param_sync.fetch()
        shards.take_written()

    def _make_owned(self) -> Owned:
        planned = self.planned
        settings = self.settings
        peers = None if settings.tensor_group is None else comm.Peers(settings.tensor_group)
        owned = OwnedSettings(
            names=planned.names,
            expert_rank=settings.expert_rank,
            sums_as=kept_dtypes(self.wires, planned.reduction, settings),
            batch_matrices=self.config.batch_matrices,
            on_host=pieces_on_host(
                planned.layout,
                self.rank,
                settings.host_ratio,
                state_bytes=state_bytes_of(planned.routes),
            ),
            pin_memory=settings.pin_memory,
            peers=peers,
            fast_dtypes=self.products.dtypes,
            master_dtype=self.config.master_dtype,
            rounding_seed=self.config.rounding_seed,
            new_graph=graphs_of(self.device) if self.config.cuda_graph else None,
        )
        return Owned(planned.routes, self.shards, self.grads, owned)

    def connect(self) -> None:
        """Set up the reduction of gradients and the gathering of parameters. All ranks must call
        this at the same point.
        """
        settings = self.settings
        planned = self.planned
        fetching = {}
        if settings.fetcher is not None:
            for param in self.params.values():
                fetching[param.ds_process_group] = settings.fetcher  # type: ignore[attr-defined]
        wires = make_wires(
            group_pool.take(self.groups, self, self.device, fetching),
            planned.where,
            device=self.device,
            native=planned.reduction == "native",
        )
        if settings.lanes > 1:
            # AutoEP marks the parameters of its routers.
            mark = "ds_autoep_folding_param_family"
            routers = filter(lambda name: hasattr(self.params[name], mark), self.pieces)
            self.owned.reduced.add_lanes(settings.tensor_group, routers)

        with comm.errors_on_all_ranks(), numerics_context.set_aside(self.device):
            self.grad_sync = GradSync(
                self.params,
                self.owned.reduced,
                self.grads,
                wires=wires,
                divide_by=settings.divide_by,
                sent_as=self.wires,
                max_waiting=self.config.max_waiting_buckets,
            )
            self.progress = Progress(self.engine, self.grad_sync.state)
            if isinstance(self.places, ParamViews):
                values = self.places.values
                self.param_sync = ParamSync(self.rank, self.params, values, wires=wires)
        for _, wire in sorted(wires.items()):
            wire.connect(self.device)

    def send(self, indices: Iterable[int]) -> None:
        """Send the buckets ``indices`` to all ranks, in this order, and wait until nothing is
        pending.
        """
        for index in indices:
            self.param_sync.launch(index)
        self.param_sync.finish()

    def group_of(self, name: str) -> comm.Group:
        """Return the group of ranks that share the parameter ``name``."""
        return self.groups[self.ep_sizes[name]]

    def whole(self, name: str, own: Callable[[str], Tensor]) -> Tensor:
        """Gather the parts of the parameter ``name`` from its ranks. Return the whole on all of
        them, 1-D and float32.

        Args:
            own: returns this rank's part of a parameter, 1-D.
        """
        whole = torch.zeros(math.prod(self.shapes[name]), dtype=torch.float32, device=self.device)
        piece = self.pieces.get(name)
        if piece is not None:
            whole[piece.param_start : piece.param_start + piece.numel].copy_(own(name))
        return comm.sum_over_ranks(whole, group=self.group_of(name))
