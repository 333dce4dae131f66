"""What does a batch buy, what does ``gram`` buy, and what does bf16 buy? Newton-Schulz on this CPU, five simple steps.

    OMP_NUM_THREADS=1 python examples/benchmarks/newton_schulz.py

All ways to compute one shape take turns, so that a disturbance of the machine hits all of them. CPU time of this
thread, not wall-clock; medians. A CPU without bf16 matrix units emulates bf16, so there only the smallest shape is
measured in it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ds_layerwise.orthogonalize.newton_schulz import coefficients, compute_dtype, newton_schulz
from ds_layerwise.recipes.newton_schulz import newton_schulz_flops

STEPS = 5
SHAPES = [(8, 128, 128), (8, 256, 256), (8, 256, 1024), (4, 512, 512), (4, 512, 2048)]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
METHODS = ("standard", "gram")


def together(matrices: Tensor, method: str, dtype: torch.dtype) -> None:
    """One call for the whole batch."""
    newton_schulz(matrices, coefficients("simple", STEPS), method=method, dtype=dtype)


def one_by_one(matrices: Tensor, method: str, dtype: torch.dtype) -> None:
    """One call a matrix."""
    for matrix in matrices:
        newton_schulz(matrix, coefficients("simple", STEPS), method=method, dtype=dtype)


def thread_ms(work: Callable[[], None]) -> float:
    """Milliseconds of CPU time of this thread."""
    start = time.thread_time()
    work()
    return 1000 * (time.thread_time() - start)


def gflop(shape: tuple[int, int, int], method: str, dtype: str) -> float:
    """Work of the batch; ``gram`` restarts twice in bf16, where the cost model counts one restart."""
    batch, m, n = shape
    if method == "gram" and dtype == "bf16" and m != n:
        return batch * (12 * m * m * n + 22 * m**3) / 1e9
    return newton_schulz_flops(m, n, steps=STEPS, method=method, batch=batch) / 1e9


def rows_of(shape: tuple[int, int, int], repetitions: int) -> list[str]:
    """The table's rows for one shape."""
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    native = compute_dtype("auto", "standard", matrices.device) == torch.bfloat16
    dtypes = list(DTYPES) if native or shape == SHAPES[0] else ["fp32"]
    work = {(method, dtype, batched): partial(together if batched else one_by_one, matrices, method, DTYPES[dtype])
            for method in METHODS for dtype in dtypes for batched in (False, True)}
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
            work_done = gflop(shape, method, dtype)
            rows.append(f"| {'x'.join(map(str, shape)):>10} | {method:8} | {dtype} | {work_done:7.2f} | "
                        f"{single:8.1f} | {batch:8.1f} | {single / batch:12.2f} | {work_done / batch * 1000:8.0f} | "
                        f"{ms['standard', dtype, True] / batch:13.2f} | {ms[method, 'fp32', True] / batch:9.2f} |")
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    repetitions = parser.parse_args().repetitions
    torch.set_num_threads(1)  # the clock sees one thread
    print("| batch x m x n | method | dtype | GFLOP | single ms | batched ms | single/batched | GFLOP/s | "
          "standard/this | fp32/this |")
    print("|---:|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for shape in SHAPES:
        print("\n".join(rows_of(shape, repetitions)), flush=True)


if __name__ == "__main__":
    main()
