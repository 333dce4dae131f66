"""The gain of a batch, of ``gram``, of bf16 and of symmetry, for Newton-Schulz of five simple steps
on this CPU.

    OMP_NUM_THREADS=1 python examples/benchmarks/newton_schulz.py
    OMP_NUM_THREADS=1 python examples/benchmarks/newton_schulz.py --symmetry

All ways to compute one shape take turns, so that a disturbance of the machine hits all of them. The
clock counts CPU time of this thread, not wall-clock time; numbers are medians, with ``--symmetry``
minima. A CPU that is slower in bf16 than in fp32 emulates it, so there only the smallest shape is
measured in it.

``--symmetry`` compares the rate of whole iterations, all passes around them included, with the
machine's own: FLOPs of the plain iteration a second, over those of a plain product of two squares
of the smaller side. Symmetric products that are computed by half make more than 1 possible.
``--device cuda`` is for a machine with a GPU; it counts wall-clock time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ds_layerwise.optimizers.devices import fast_dtypes
from ds_layerwise.orthogonalize import symmetric
from ds_layerwise.orthogonalize.newton_schulz import coefficients, gram_segments, newton_schulz

STEPS = 5
SHAPES = [(8, 128, 128), (8, 256, 256), (8, 256, 1024), (4, 512, 512), (4, 512, 2048)]
SYMMETRIC_SHAPES = [
    (128, 128),
    (256, 1024),
    (512, 512),
    (512, 2048),
    (2048, 512),
    (768, 768),
    (768, 3072),
    (1024, 1024),
    (2048, 2048),
]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
METHODS = ("standard", "gram")


def as_after_a_while() -> None:
    """Free a block of almost 32 MiB, as a process that trains has done long ago.

    From then on glibc keeps freed memory. Before, it gives pages back to the system, and an
    iteration pays for new ones at every product, up to a sixth of its time. The machine's own
    product of small matrices does not.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8).zero_()


def together(matrices: Tensor, method: str, dtype: torch.dtype) -> None:
    """Compute the whole batch in one call."""
    newton_schulz(matrices, coefficients("simple", STEPS), method=method, dtype=dtype)


def one_by_one(matrices: Tensor, method: str, dtype: torch.dtype) -> None:
    """Compute the batch in a call for each matrix."""
    for matrix in matrices:
        newton_schulz(matrix, coefficients("simple", STEPS), method=method, dtype=dtype)


def thread_ms(work: Callable[[], object]) -> float:
    """Return the milliseconds of CPU time of this thread."""
    start = time.thread_time()
    work()
    return 1000 * (time.thread_time() - start)


def gflop(shape: tuple[int, int, int], method: str, dtype: torch.dtype) -> float:
    """Return the work of the batch, as the iteration is written: symmetric products in full, and
    the restarts of its dtype."""
    batch, m, n = shape[0], min(shape[1:]), max(shape[1:])
    if method == "standard" or m == n:
        return batch * STEPS * (4 * m * m * n + 2 * m**3) / 1e9
    segments = len(gram_segments(STEPS, dtype))
    return batch * (segments * 4 * m * m * n + (4 * STEPS - 3 * segments) * 2 * m**3) / 1e9


def rows_of(shape: tuple[int, int, int], repetitions: int) -> list[str]:
    """Return the table's rows for one shape."""
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    native = torch.bfloat16 in fast_dtypes(matrices.device)
    dtypes = list(DTYPES) if native or shape == SHAPES[0] else ["fp32"]
    work = {
        (method, dtype, batched): partial(
            together if batched else one_by_one, matrices, method, DTYPES[dtype]
        )
        for method in METHODS
        for dtype in dtypes
        for batched in (False, True)
    }
    times: dict[tuple[str, str, bool], list[float]] = {way: [] for way in work}
    for run in work.values():
        run()
    for _ in range(repetitions):
        for way, run in work.items():
            times[way].append(thread_ms(run))
    ms = {way: statistics.median(values) for way, values in times.items()}
    rows = []
    for method in METHODS:
        for dtype in dtypes:
            single, batch = ms[method, dtype, False], ms[method, dtype, True]
            work_done = gflop(shape, method, DTYPES[dtype])
            rows.append(
                f"| {'x'.join(map(str, shape)):>10} | {method:8} | {dtype} | {work_done:7.2f} | "
                f"{single:8.1f} | {batch:8.1f} | {single / batch:12.2f} | "
                f"{work_done / batch * 1000:8.0f} | {ms['standard', dtype, True] / batch:13.2f} | "
                f"{ms[method, 'fp32', True] / batch:9.2f} |"
            )
    return rows


def in_turns(
    work: dict[str, Callable[[], object]], repetitions: int, device: torch.device
) -> dict[str, float]:
    """Return the least milliseconds of each: on a shared machine the others disturb the caches in
    the rest."""

    def once(run: Callable[[], object]) -> float:
        if device.type == "cpu":
            return thread_ms(run)
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        run()
        torch.cuda.synchronize(device)
        return 1000 * (time.perf_counter() - start)

    times: dict[str, list[float]] = {way: [] for way in work}
    for run in work.values():
        run()
    for _ in range(repetitions):
        for way, run in work.items():
            times[way].append(once(run))
    return {way: min(values) for way, values in times.items()}


def symmetry_row(shape: tuple[int, int], dtype: str, repetitions: int, device: torch.device) -> str:
    """Return the second table's row for one shape and dtype."""
    generator = torch.Generator().manual_seed(0)
    matrix, side, kind = (
        torch.randn(1, *shape, generator=generator).to(device),
        min(shape),
        DTYPES[dtype],
    )
    square = torch.randn(side, side, generator=generator).to(device, kind)
    strips = symmetric.num_strips(side, kind, device)

    def in_full(method: str) -> None:
        symmetric.num_strips, rule = lambda side, dtype, device: 1, symmetric.num_strips
        try:
            together(matrix, method, kind)
        finally:
            symmetric.num_strips = rule

    ms = in_turns(
        {
            "own": partial(torch.mm, square, square),
            **{method: partial(together, matrix, method, kind) for method in METHODS},
            **{f"{method} in full": partial(in_full, method) for method in METHODS},
        },
        repetitions,
        device,
    )
    own = 2 * side**3 / 1e6 / ms["own"]
    cells = []
    for method in METHODS:
        rate = gflop((1, *shape), method, DTYPES[dtype]) / ms[method] * 1000
        cells.append(
            f"{ms[method]:8.1f} | {ms[method] / ms[f'{method} in full']:7.2f} | {rate / own:8.2f} |"
        )
    return f"| {'x'.join(map(str, shape)):>9} | {dtype} | {strips} | {own:4.0f} | {' '.join(cells)}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument(
        "--symmetry", action="store_true", help="the rate over that of the machine's own product"
    )
    parser.add_argument("--device", default="cpu", help="of --symmetry")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the clock sees one thread
    as_after_a_while()
    if options.symmetry:
        device = torch.device(options.device)
        print(
            "| m x n | dtype | strips | own GFLOP/s | standard ms | over in full | rate/own | gram "
            "ms | over in full | rate/own |"
        )
        print("|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|")
        for dtype, kind in DTYPES.items():
            if kind == torch.float32 or kind in fast_dtypes(device):
                for shape in SYMMETRIC_SHAPES:
                    print(symmetry_row(shape, dtype, options.repetitions, device), flush=True)
        return
    print(
        "| batch x m x n | method | dtype | GFLOP | single ms | batched ms | single/batched | "
        "GFLOP/s | standard/this | fp32/this |"
    )
    print("|---:|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for shape in SHAPES:
        print("\n".join(rows_of(shape, options.repetitions)), flush=True)


if __name__ == "__main__":
    main()
