"""The start-up table: who trains what and why, and what it costs each rank."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from ds_layerwise.cost import DTYPE_BYTES, LayoutReport, RankMemory, max_over_mean, memory_bytes, wire_elements
from ds_layerwise.layout import Layout, ParamSpec
from ds_layerwise.routing import Route

_WIDTH = 110


def start_up_table(routes: Mapping[str, Route], specs: Sequence[ParamSpec], layout: Layout, *,
                   rules: Mapping[str, str], stored_as: Mapping[str, str], wire_as: Mapping[str, str],
                   state_bytes: tuple[int, int], stage: int, host_ratio: float = 0.0) -> str:
    """Plain text for a log, without colours.

    Args:
        rules: the name of the ``matrix`` and of the ``scalar`` optimizer.
        stored_as: by dtype of the layout, what gradients are accumulated in.
        wire_as: by dtype of the layout, what gradients travel in.
        state_bytes: bytes of state of one element under the matrix and under the scalar optimizer.
        stage: of ZeRO.
        host_ratio: how much of masters and states lives in host memory.
    """
    report = LayoutReport.of(layout, specs)
    console = Console(file=io.StringIO(), width=_WIDTH, no_color=True)
    console.print(_parameters(routes, specs, rules))
    memory = memory_bytes(layout, stage=stage, grads_stored_as=stored_as, whole_state_bytes=state_bytes[0],
                          split_state_bytes=state_bytes[1], host_ratio=host_ratio)
    console.print(_costs(report, layout, stored_as, wire_as, memory, stage))
    idle = sum(1 for numel in report.whole_numel if not numel)
    if idle:
        console.print(f"{idle} of {layout.world_size} ranks own no matrix: there are fewer matrices than ranks, or one "
                      "is larger than a rank's share. Splitting fused projections into their parts "
                      "(layerwise.overrides, num_heads) makes more of them.")
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())


def _parameters(routes: Mapping[str, Route], specs: Sequence[ParamSpec], rules: Mapping[str, str]) -> Table:
    rows: dict[tuple[str, str], list[ParamSpec]] = {}
    for spec in specs:
        route = routes[spec.name]
        rows.setdefault((route.optimizer, route.reason), []).append(spec)
    table = Table(title="parameters", title_justify="left")
    for header in ("optimizer", "because", "tensors", "elements", "for example"):
        table.add_column(header, justify="right" if header in ("tensors", "elements") else "left", overflow="fold")
    for (optimizer, reason), members in sorted(rows.items()):
        table.add_row(f"{rules[optimizer]} ({'whole' if optimizer == 'matrix' else 'split'})", reason,
                      str(len(members)), f"{sum(spec.numel for spec in members):,}", members[0].name)
    return table


def _costs(report: LayoutReport, layout: Layout, stored_as: Mapping[str, str], wire_as: Mapping[str, str],
           memory: Sequence[RankMemory], stage: int) -> Table:
    total = [rank.total for rank in memory]
    table = Table(title=f"layout {layout.policy}, {layout.digest()}", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("ranks, buckets", f"{layout.world_size}, {report.num_buckets}")
    table.add_row("Newton-Schulz a step", f"{max(report.work) / 1e9:,.3g} GFLOP on the busiest rank, "
                  f"{report.work_max_over_mean:.3f} x the mean")
    table.add_row("owned matrices", f"{max(report.whole_numel):,} elements on the fullest rank, "
                  f"{report.whole_max_over_mean:.3f} x the mean")
    table.add_row("memory of the fullest rank", f"{max(total) / 2**20:,.1f} MiB for parameters, gradients, masters "
                  f"and states, {max_over_mean(total):.3f} x the mean")
    if any(rank.host for rank in memory):
        table.add_row("on the host", f"{max(rank.host for rank in memory) / 2**20:,.1f} MiB more of masters and states "
                      f"on the fullest rank; a step takes {max(rank.staging for rank in memory) / 2**20:,.1f} MiB of "
                      "its device to work on them (less with a smaller reduce_bucket_size)")
    table.add_row("padding", f"{report.padding:,} elements, {100 * report.padding_fraction:.3f} %")
    for dtype in layout.dtypes:
        wire = wire_elements(layout, dtype)
        reduced = sum(wire.reduce) * DTYPE_BYTES[wire_as[dtype]] / layout.world_size / 2**20
        gathered = sum(wire.gather) * DTYPE_BYTES[dtype] / layout.world_size / 2**20
        sent = f"{reduced + gathered:,.1f} MiB a step" if stage == 1 else \
            f"{reduced:,.1f} MiB a backward pass and {gathered:,.1f} MiB a step"
        table.add_row(f"{dtype} parameters", f"gradients accumulate in {stored_as[dtype]}, travel in {wire_as[dtype]}; "
                      f"a rank sends {sent}")
    return table
