"""``ds-layerwise links``: measures the links between the ranks that a launcher started, and writes
them to a file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator

from ds_layerwise.checkpoint.files.atomic import INCOMPLETE, point
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.plan.network.link_fit import measured_links, missing_keys, require_like
from ds_layerwise.plan.network.links import links_of_run
from ds_layerwise.ranks.comm import comm, nodes
from ds_layerwise.tools.links import link_timing

#: The environment variables of which launchers set one in each process that they start.
_LAUNCHED = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK")

START = "deepspeed --module ds_layerwise.cli links OUT.json"


def join() -> bool:
    """Join the ranks that a launcher has started. Return True if they were not joined already.

    Raises:
        LayerWiseError: no launcher has started this process, or it has started only one.
    """
    joins = not dist.is_initialized()
    if joins:
        if not any(name in os.environ for name in _LAUNCHED):
            raise LayerWiseError(
                "links are measured between processes, and no launcher has started this one; "
                f"start it with: {START}"
            )
        local = os.environ.get("LOCAL_RANK", "")
        if local.isdecimal() and get_accelerator().device_name() != "cpu":
            get_accelerator().set_device(int(local))
        dist.init_distributed()
    if comm.size_of(None) == 1:
        raise LayerWiseError(
            "links are measured between processes, and the launcher has started only one; start "
            f"several, such as one a device, with: {START}"
        )
    return joins


def write_links(out: Path, *, like: str | None, overwrite: bool) -> str:
    """Measure the links between all ranks that :func:`join` has joined, and write them to ``out``
    on rank 0.

    It takes about a minute. ``layerwise.links`` and ``plan --links`` read the file.

    Args:
        like: a name or a file, for values that cannot be measured on these nodes; see
            :func:`.plan.network.link_fit.missing_keys`.
        overwrite: True to replace ``out``.

    Returns:
        Lines about the measurements and the place of the file.

    Raises:
        LayerWiseError: on every rank, if on any ``like`` is needed or wrong, ``out`` cannot be
            written, nodes differ, or the times are not usable.
    """
    device = torch.device(get_accelerator().current_device_name())
    on_host = device.type == "cpu"
    where = nodes.node_of_each_rank()
    with comm.errors_on_all_ranks():
        shape = link_timing.shape_of(where)
        missing = missing_keys(shape.ranks_per_node, shape.num_nodes)
        if missing and like is None:
            raise LayerWiseError(require_like(shape.ranks_per_node, shape.num_nodes))
        if like is not None and not missing:
            raise LayerWiseError(
                f"--like {like} is for what cannot be measured, and {shape.num_nodes} nodes of "
                f"{shape.ranks_per_node} ranks have all of it; leave it out"
            )
        assumed = None
        if like is not None:
            assumed = links_of_run(
                like, on_host=on_host, where="--like", ranks_per_node=shape.ranks_per_node
            )
        if comm.rank_of(None) == 0:
            _check_out(out, overwrite=overwrite)
    times = link_timing.measure(where, device)
    with comm.errors_on_all_ranks():
        found = measured_links(
            times.timings,
            ranks_per_node=shape.ranks_per_node,
            num_nodes=shape.num_nodes,
            memory_gb_s=times.memory_gb_s,
            tflops=times.tflops,
            on_host=on_host,
            like=assumed,
            like_name=like or "",
        )
        if comm.rank_of(None) == 0:
            try:
                point(out, json.dumps(found.links.model_dump(), indent=2) + "\n")
            except OSError as e:
                raise LayerWiseError(f"{out} cannot be written: {e}") from e
    return "\n".join(
        [
            f"{shape.num_nodes} x {shape.ranks_per_node} ranks, {device.type}, Newton-Schulz in "
            f"{times.products_in}",
            found.text,
            f"written to {out}",
        ]
    )


def _check_out(out: Path, *, overwrite: bool) -> None:
    """Refuse an ``out`` that cannot be written, before the measurement of a minute."""
    if out.is_dir():
        raise LayerWiseError(f"{out} is a folder; name a file")
    if out.exists() and not overwrite:
        raise LayerWiseError(f"{out} exists; name another place, or replace it with --overwrite")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        trial = out.with_name(out.name + INCOMPLETE)
        trial.touch()
        trial.unlink()
    except OSError as e:
        raise LayerWiseError(f"{out} cannot be written: {e}") from e
