"""Measurements that need GPUs: tests over NCCL, speed, races of streams, and memory, on those of
one node.

    python examples/benchmarks/gpu.py --out report.md

This is one command, on one GPU or on all of a node. docs/gpu_report.md says what each section
shows, how to run it on two nodes, and how to bring it to a machine without network. A section that
is not done in time is given up, so that everything ends within the minutes of its sections, or
``--minutes``. ``--quick first``, then ``--quick second``, ask what one GPU can say in ten minutes;
``--quick node`` asks what only several can. The report is written after every section, and
names those that have not run. All sides of a table
take turns in the same processes; the numbers are medians of the slowest rank. A section that fails
says so in the report, the others run all the same, and the exit code is 1. On a CPU, ``--device cpu
--tiny`` goes through everything once, and measures nothing. torch compiles nothing, on no side,
except a race that is named so, unless ``--compile`` says so, which takes longer.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_report import ROOT, Found, header, not_yet, run

if TYPE_CHECKING:
    from gpu_ranks import Place

TESTS = "tests/distributed/step/test_on_device.py"
#: Numbers of ranks that the tests use.
TEST_RANKS = (1, 2, 4)
#: A counter for meetings of ranks of several nodes.
MEETINGS = itertools.count()
#: The largest difference of a rank's memory from the prediction, and of a step's peak from the
#: forecast.
MEMORY_BAR_PERCENT = 2.0
#: Seconds that the start of this script takes, beside its sections.
START_S = 40.0
#: Seconds that pytest has to write its results down, when its time is over.
ENDING_S = 10.0


def on_ranks(
    place: Place,
    work: Callable[[Place], Any],
    *,
    limit_s: float,
    ranks: int | None = None,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Return the result of ``work`` on each rank. Each is a process of its own.

    Raises:
        RuntimeError: a rank failed, with its traceback; or some were not done in time.
    """
    from measuring import Meeting, run_ranks

    meeting = None
    if place.nodes > 1 and ranks is None:
        host, _, port = place.master.rpartition(":")
        # The port is new each time: all nodes do the same in the same order.
        where = f"tcp://{host}:{int(port) + next(MEETINGS)}"
        meeting = Meeting(where, place.node, place.nodes)
    ranks = ranks or place.ranks
    world = ranks * (place.nodes if meeting else 1)
    with tempfile.TemporaryDirectory() as folder:
        try:
            run_ranks(
                folder,
                ranks,
                functools.partial(_write, Path(folder), place, work),
                device=place.device,
                env=env,
                limit_s=limit_s,
                spawns=place.spawns,
                meeting=meeting,
            )
        except RuntimeError as error:
            errors = [path.read_text() for path in sorted(Path(folder).glob("*.error"))]
            raise RuntimeError(f"{error}\n{errors[0] if errors else ''}".strip()) from error
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world)]


def _write(folder: Path, place: Place, work: Callable[[Place], Any], _watched: object) -> None:
    from torch import distributed

    rank, world = os.environ["RANK"], int(os.environ["WORLD_SIZE"])
    try:
        found = {rank: work(place)}
        if place.nodes > 1 and distributed.get_world_size() == world > 1:
            # The results are those of the ranks of other nodes, too.
            everyone: list[Any] = [None] * world
            distributed.all_gather_object(everyone, found[rank])
            found = {str(number): each for number, each in enumerate(everyone)}
        if os.environ["LOCAL_RANK"] == "0" or len(found) == 1:
            for number, each in found.items():
                (folder / f"{number}.json").write_text(json.dumps(each))
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
        raise


def slowest(everyone: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the time of the slowest rank by side."""
    return {name: max(of_rank["ms"][name] for of_rank in everyone) for name in everyone[0]["ms"]}


# --- sections


def tests(place: Place, limit_s: float) -> Found:
    """Run the tests that are there for any device, on the largest number of ranks that has one
    each."""
    ranks = max(number for number in TEST_RANKS if number <= place.ranks)
    chosen = f"{ranks}rank" + ("s" if ranks > 1 else "")
    if place.tiny:
        chosen = f"exact and 2-{chosen}-native"
    with tempfile.TemporaryDirectory() as folder:
        report, chosen_names = (
            Path(folder, "report.xml"),
            Path(folder, "cache", "v", "cache", "nodeids"),
        )
        # Packages may be found by this path alone, where they were installed beside a Python.
        places = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
        env = {**os.environ, "THOROUGH": "1", "PYTHONPATH": os.pathsep.join(places)}
        command = [
            sys.executable,
            "-m",
            "pytest",
            TESTS,
            "-m",
            "gpu",
            "-k",
            chosen,
            "-q",
            f"--junitxml={report}",
            "-o",
            f"cache_dir={chosen_names.parents[2]}",
        ]
        with open(Path(folder, "output"), "w+") as output:
            # A shell that has begun this in the background lets it ignore interrupts, and pytest
            # would inherit that.
            ours = signal.signal(signal.SIGINT, signal.default_int_handler)
            process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT
            )
            signal.signal(signal.SIGINT, ours)
            try:
                process.wait(limit_s)
                late = []
            except subprocess.TimeoutExpired:
                end(process)
                late = [f"not done after {limit_s:g} seconds"]
            output.seek(0)
            if not report.exists():
                return Found(
                    problems=[
                        *late,
                        f"pytest ended with code {process.returncode}: {output.read()[-2000:]}",
                    ]
                )
        names = json.loads(chosen_names.read_text()) if chosen_names.exists() else []
        found = read_report(report.read_text(), [name.rpartition("::")[2] for name in names])
    return Found(
        [*found.lines, f"\n`{' '.join(['pytest', *command[3:9]])}`"], [*late, *found.problems]
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """Let pytest write its results down, and end all processes that it has started, which would
    outlive it and keep devices."""
    from measuring import family

    # An interrupt can be lost, where it comes during a fork or a collection of garbage.
    for _ in range(2):
        _, *others = family(process.pid)
        # The interrupt comes first: the test that is given up has not failed.
        process.send_signal(signal.SIGINT)
        kill(others)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_S / 2)
            return
    kill(family(process.pid))
    process.wait()


def kill(processes: Sequence[int]) -> None:
    """Kill the processes, the last started first."""
    for number in reversed(processes):
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


def read_report(xml: str, chosen: Sequence[str] = ()) -> Found:
    """Return the counts of a report of pytest's. A test is a problem if it did not pass, also if it
    was skipped, or if it is ``chosen`` and not there."""
    counts, problems, missing = {"passed": 0, "failed": 0, "skipped": 0}, [], Counter(chosen)
    # An interrupted test has no name.
    for case in ElementTree.fromstring(xml).iterfind(".//testcase[@name]"):
        wrong = next(
            (child for child in case if child.tag in ("failure", "error", "skipped")), None
        )
        kind = "passed" if wrong is None else "skipped" if wrong.tag == "skipped" else "failed"
        counts[kind] += 1
        missing[case.attrib["name"]] -= 1
        if wrong is not None:
            # The end of a traceback names the error.
            message = (wrong.get("message") or wrong.text or "").strip()[-600:]
            problems.append(f"{case.get('name')} {kind}: {message}")
    if left := sorted((+missing).elements()):
        problems.append(f"{len(left)} not run to the end: {', '.join(left)}")
    elif not sum(counts.values()):
        problems.append("there was no test")
    return Found([", ".join(f"{number} {kind}" for kind, number in counts.items()) + "."], problems)


def first_steps(place: Place, limit_s: float) -> Found:
    """Train some steps at each stage, the first update verified."""
    from gpu_first import first_steps as trained

    everyone = on_ranks(place, trained, limit_s=limit_s)
    lines = [
        "The same model and the same sequence in each step. off: the largest difference of a loss "
        "from that of stage 1.",
        "",
        "| stage | first loss | last | off | ms |",
        "|--:|--:|--:|--:|--:|",
    ]
    problems = []
    for rank, rows in enumerate(everyone):
        for row in rows:
            losses = row["losses"]
            off = max(
                abs(one - other) for one, other in zip(losses, rows[0]["losses"], strict=True)
            )
            if rank == 0:
                lines.append(
                    f"| {row['stage']} | {losses[0]:.5f} | {losses[-1]:.5f} | {off:.1e} "
                    f"| {row['ms']:.2f} |"
                )
            where = f"stage {row['stage']}, rank {rank}"
            if not all(map(math.isfinite, losses)):
                problems.append(f"{where}: a loss is not finite: {losses}")
            elif losses[-1] >= losses[0]:
                problems.append(f"{where}: the loss does not fall: {losses}")
            elif off > LOSS_BAR:
                problems.append(f"{where}: a loss is {off:.1e} off that of stage 1")
    return Found(lines, problems)


def waits(place: Place, limit_s: float) -> Found:
    """Name the lines of `engine.step()` at which the host waits for the device."""
    from gpu_first import AGREEMENT
    from gpu_first import waits as counted

    lines = [
        "returns: when `step()` gives the host back; done: when the device has done it. One wait "
        "of ours belongs there, the decision of all ranks.",
        "",
        "| stage | rank | returns, ms | done, ms | waits |",
        "|--:|--:|--:|--:|---|",
    ]
    problems = []
    for rank, rows in enumerate(on_ranks(place, counted, limit_s=limit_s)):
        for row in rows:
            said = ", ".join(f"{where} x {number}" for where, number in row["waits"].items())
            lines.append(
                f"| {row['stage']} | {rank} | {row['returned']:.2f} | {row['done']:.2f} | {said} |"
            )
            for where, number in row["waits"].items():
                is_agreement = where.startswith(AGREEMENT) and number == 1
                if where.startswith("ds_layerwise") and not is_agreement:
                    problems.append(
                        f"stage {row['stage']}, rank {rank}: waits {number} times at {where}"
                    )
    return Found(lines, problems)


def timer(place: Place, limit_s: float) -> Found:
    """Measure what DeepSpeed's throughput timer takes of a step that hides its gathers."""
    from gpu_first import BLOCK, timer_times

    ms = slowest(on_ranks(place, timer_times, limit_s=limit_s))
    first = next(iter(ms.values()))
    return Found(
        [
            f"{BLOCK} whole steps with `overlap_param_gather`.",
            "",
            "| DeepSpeed's throughput timer | ms | over without |",
            "|---|---:|---:|",
            *(f"| {name} | {each:.2f} | {each / first:.2f} |" for name, each in ms.items()),
        ]
    )


def launches(place: Place, limit_s: float) -> Found:
    """Count what the host launches in a step, and leave a trace."""
    from gpu_first import launches as counted

    rows = on_ranks(place, counted, limit_s=limit_s)[0]
    lines = [
        "One optimizer step of rank 0 under torch's profiler, whose traces lie beside this report. "
        "busy: of the device, at least one kernel.",
        "",
        "| stage | launches | ms | busy, ms |",
        "|--:|--:|--:|--:|",
        *(
            f"| {row['stage']} | {row['launches']} | {row['ms']:.2f} | {row['busy_ms']:.2f} |"
            for row in rows
        ),
        "",
        "| stage | kernel | ms |",
        "|--:|---|--:|",
    ]
    for row in rows:
        for name, each in row["longest"].items():
            lines.append(f"| {row['stage']} | `{name}` | {each:.2f} |")
    return Found(lines)


def ways(place: Place, limit_s: float) -> Found:
    """Measure a step without overlap with buckets as equal shards and in cuts."""
    from gpu_first import ways_times

    if place.ranks * place.nodes == 1:
        return Found(problems=["one rank sends nothing; it takes two"])
    everyone = on_ranks(place, ways_times, limit_s=limit_s)
    ms, sent = slowest(everyone), everyone[0]["sent"]
    return Found(
        [
            "One optimizer step with its sums and gathers, stage 1, nothing overlaps.",
            "",
            "| buckets | ms | MB sent |",
            "|---|---:|---:|",
            *(f"| {name} | {each:.2f} | {sent[name] / 1e6:.1f} |" for name, each in ms.items()),
        ]
    )


def newton_schulz(place: Place, limit_s: float) -> Found:
    """Measure Newton-Schulz of matrices of real models."""
    from gpu_ranks import newton_schulz_times

    (found,) = on_ranks(place, newton_schulz_times, limit_s=limit_s, ranks=1)
    rows = found["rows"]
    lines = [
        "Five simple steps of a batch. share: FLOPs of the plain iteration, and its restarts, a "
        "second, over those of a product of two squares in that dtype. over: our time over that of "
        "stock DeepSpeed's same method, and of torch.optim.Muon's, which is standard, one matrix "
        "at a time. Ours returns float32, the others what they multiply in.",
        "",
        "| model | matrices | side | dtype | ms | share | over stock | over torch |",
        "|---|---|---|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        ms = row["ms"]
        for name, each in ms.items():
            side, _, method = name.partition(" ")
            over = f"{each / ms[f'stock {method}']:.2f}" if side == "ours" else ""
            over_torch = f"{each / ms['torch']:.2f}" if side == "ours" and "torch" in ms else ""
            lines.append(
                f"| {row['model']} | {row['shape']} | {name} | {row['dtypes'][name]} | {each:.2f} "
                f"| {row['share'][name]:.2f} | {over} | {over_torch} |"
            )
    lines += [
        "",
        "One product of each matrix with its own transpose in bf16: in full (1), and in strips of "
        "rows up to the diagonal, which are mirrored; by quack-kernels, if it is there. Where "
        "strips are faster, symmetric.py may use them here, too.",
        "",
        "| model | matrices | strips | ms | over in full |",
        "|---|---|---:|---:|---:|",
        *(
            f"| strips | {row['shape']} | {number} | {each:.3f} | {each / row['ms']['1']:.2f} |"
            for row in found["strips"]
            for number, each in row["ms"].items()
        ),
    ]
    return Found(lines, [] if "torch" in rows[0]["ms"] else ["this torch has no torch.optim.Muon"])


def step(place: Place, limit_s: float) -> Found:
    """Measure one optimizer step of a model of 1 B parameters, or of as many as fit."""
    from gpu_ranks import OURS, step_times

    everyone = on_ranks(place, step_times, limit_s=limit_s)
    ms = slowest(everyone)
    return Found(
        [
            f"{everyone[0]['numel'] / 1e9:.3f} B parameters in bf16, stage 1, with clipping and, "
            "but for torch's, float32 masters and the gather of what was updated. Gradients were "
            "there before.",
            "",
            "| side | ms | ours over it |",
            "|---|---:|---:|",
            *(
                f"| {name} | {time_ms:.2f} | {ms[OURS] / time_ms:.2f} |"
                for name, time_ms in ms.items()
            ),
        ]
    )


def batches(place: Place, limit_s: float) -> Found:
    """Measure one optimizer step with as few matrices a bucket as possible, which is about one a
    rank."""
    from gpu_ranks import batch_times

    everyone = on_ranks(place, batch_times, limit_s=limit_s)
    ms = slowest(everyone)
    first, few = next(iter(ms.values())), everyone[0]["in_a_bucket"]
    return Found(
        [
            f"{everyone[0]['numel'] / 1e9:.3f} B parameters in bf16, stage 1; but for the last, a "
            f"bucket has {' or '.join(map(str, few))} matri{'ces' if few[-1] > 1 else 'x'}.",
            "",
            "| matrices are updated | ms | over one by one |",
            "|---|---:|---:|",
            *(
                f"| {name} | {time_ms:.2f} | {time_ms / first:.2f} |"
                for name, time_ms in ms.items()
            ),
        ]
    )


def offload(place: Place, limit_s: float) -> Found:
    """Measure one optimizer step with masters and states on the host."""
    from gpu_ranks import offload_times

    everyone = on_ranks(place, offload_times, limit_s=limit_s)
    ms, moved = slowest(everyone), max(each["moved"] for each in everyone)
    first = next(iter(ms.values()))
    return Found(
        [
            f"{everyone[0]['numel'] / 1e9:.3f} B parameters in bf16, stage 1; {moved / 1e9:.2f} GB "
            "come and go on the fullest rank.",
            "",
            "| masters and states | ms | over on the device |",
            "|---|---:|---:|",
            *(f"| {name} | {each:.2f} | {each / first:.2f} |" for name, each in ms.items()),
        ]
    )


#: The largest difference of a loss between stages, whose sums have other orders.
LOSS_BAR = 1e-2
#: The setups that an environment makes impossible, by variable: a graph allocates no memory that no
#: allocator keeps.
IMPOSSIBLE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": ("captured",)}
#: Variants of a race: whether there is overlap, the seed of disturbances, and the environment.
VARIANTS: dict[str, tuple[bool, int | None, dict[str, str]]] = {
    "overlapped": (True, None, {}),
    "the same again": (True, None, {}),
    "no overlap": (False, None, {}),
    "streams late at random": (True, 1, {}),
    "late at other times": (True, 2, {}),
    "CUDA_LAUNCH_BLOCKING=1": (True, None, {"CUDA_LAUNCH_BLOCKING": "1"}),
    "PYTORCH_NO_CUDA_MEMORY_CACHING=1": (True, None, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
}


def streams(place: Place, limit_s: float) -> Found:
    """Check that the bits are the same whatever overlaps, and however late it is."""
    from gpu_ranks import race

    until, digests, missing = time.monotonic() + limit_s, {}, {}
    names = (
        [*list(VARIANTS)[:1], "no overlap", "streams late at random"]
        if place.tiny
        else list(VARIANTS)
    )
    for name in names:
        overlap, seed, env = VARIANTS[name]
        without = [setup for key in env for setup in IMPOSSIBLE.get(key, ())]
        if (left := until - time.monotonic()) < 1:
            missing[name] = f"not run for want of time, of which there were {limit_s:g} seconds"
            continue
        try:
            digests[name] = on_ranks(
                place,
                functools.partial(race, overlap=overlap, seed=seed, without=without),
                limit_s=round(left, 1),
                env={"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **env},
            )
        except RuntimeError as error:
            missing[name] = str(error)
    return compare(digests, missing)


def compare(
    digests: Mapping[str, Sequence[Mapping[str, str]]], missing: Mapping[str, str] | None = None
) -> Found:
    """Compare digests by setup, for each variant and rank, with those of the first variant that is
    there.

    Args:
        missing: the reason for each variant that is not there.
    """
    problems = [f"{name}: {why}" for name, why in (missing or {}).items()]
    if not digests:
        return Found(problems=problems)
    first = next(iter(digests.values()))
    lines = [
        "Losses and weights after some steps of two micro-batches.",
        "",
        f"| variant | {' | '.join(first[0])} |",
        f"|---|{'---|' * len(first[0])}",
    ]
    for name, everyone in digests.items():
        cells = dict.fromkeys(first[0], "same bits")
        for digests_here, wanted in zip(everyone, first, strict=True):
            for setup in wanted:
                if setup not in digests_here:
                    cells[setup] = "left out"
                elif ": " in digests_here[setup]:
                    cells[setup] = f"failed: {digests_here[setup]}"
                elif digests_here[setup] != wanted[setup] and cells[setup] == "same bits":
                    cells[setup] = "other bits"
        said = {setup: cell.partition(":")[0] for setup, cell in cells.items()}
        lines.append(f"| {name} | {' | '.join(said.values())} |")
        for setup, cell in sorted(cells.items()):
            if cell not in ("same bits", "left out"):
                problems.append(f"{name}: {cell.replace('failed: ', 'failed, ')} at {setup}")
    lines += [f"| {name} | {' | '.join(['no result'] * len(first[0]))} |" for name in missing or ()]
    return Found(lines, problems)


def memory(place: Place, limit_s: float) -> Found:
    """Compare a rank's memory with the forecast that ``plan`` and the start-up table print."""
    from gpu_ranks import memory_of

    lines = [
        "held: tensors alive between two steps. peak: the most of a step over that, beside what "
        "`plan` says an update works in; on several ranks it includes what travels between cuts "
        "and owners, and only on one it must not be more.",
        "",
        "| run | rank | predicted, MB | held | off by | works in, said | peak |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    problems = []
    for rank, jobs in enumerate(on_ranks(place, memory_of, limit_s=limit_s)):
        for job in jobs:
            off = 100 * (job["held"] / job["predicted"] - 1)
            peak = "" if job["peak"] is None else f"{job['peak'] / 1e6:.1f}"
            lines.append(
                f"| {job['job']} | {rank} | {job['predicted'] / 1e6:.1f} | {job['held'] / 1e6:.1f} "
                f"| {off:+.2f} % | {job['workspace'] / 1e6:.1f} | {peak} |"
            )
            # A tiny model is as small as the engine's own memory.
            if abs(off) > MEMORY_BAR_PERCENT and not place.tiny:
                problems.append(f"{job['job']}, rank {rank}: {off:+.2f} % off what is predicted")
            over = 0 if job["peak"] is None else 100 * (job["peak"] / job["workspace"] - 1)
            if over > MEMORY_BAR_PERCENT and place.ranks == 1 and not place.tiny:
                problems.append(
                    f"{job['job']}: a step takes {over:.2f} % more than what it is said to work in"
                )
    return Found(lines, problems)


def whole_steps(place: Place, limit_s: float) -> Found:
    """Measure forward, backward and optimizer, beside stock's, with and without overlap."""
    from gpu_steps import TORCH, whole_step_times

    # Engines of many sizes, one after the other: segments that can grow leave no holes.
    env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    everyone = on_ranks(place, whole_step_times, limit_s=limit_s, env=env)
    ms = slowest(everyone)
    ours = ms["ours, ZeRO-1"]
    return Found(
        [
            f"{everyone[0]['numel'] / 1e9:.3f} B parameters in bf16, one sequence a rank, with "
            "clipping.",
            "",
            "| side | ms | ours, ZeRO-1 over it |",
            "|---|---:|---:|",
            *(f"| {name} | {time_ms:.2f} | {ours / time_ms:.2f} |" for name, time_ms in ms.items()),
        ],
        [] if TORCH in ms else ["this torch has no torch.optim.Muon"],
    )


def rank_of_many(place: Place, limit_s: float) -> Found:
    """Measure whole steps as rank 0 of many, on one device, whose network is made of sleeps."""
    from gpu_steps import rank_times

    (rows,) = on_ranks(place, rank_times, limit_s=limit_s, ranks=1)
    lines = [
        "Collectives take what plans say of NVLink and 400 Gbit/s a GPU, on streams of their own. "
        "computing: the same with a network that takes no time. hidden: of the network's time, how "
        "much the step does not show. peak: what a step takes at most, with the model.",
        "",
        "| ranks | side | ms | network | computing | hidden | collectives | MB held | peak |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        # The steps of a tiny run are longer than any time that a network could hide.
        shown = (row["ms"] - row["computing_ms"]) / row["network_ms"]
        hidden = "" if place.tiny else f"{100 * (1 - shown):.0f} %"
        peak = "" if row["peak"] is None else f"{row['peak'] / 1e6:.0f}"
        lines.append(
            f"| {row['ranks']} | {row['side']} | {row['ms']:.2f} | {row['network_ms']:.2f} "
            f"| {row['computing_ms']:.2f} | {hidden} | {row['collectives']} "
            f"| {row['held'] / 1e6:.1f} | {peak} |"
        )
    return Found(lines)


#: Sections by title: the function, and the seconds after which it is given up.
SECTIONS: dict[str, tuple[Callable[[Place, float], Found], float]] = {
    "First steps": (first_steps, 60),
    "Waits": (waits, 40),
    "Tests": (tests, 180),
    "Timer": (timer, 40),
    "Newton-Schulz": (newton_schulz, 60),
    "Launches": (launches, 40),
    "Ways": (ways, 60),
    "Step": (step, 90),
    "Batches": (batches, 30),
    "Offload": (offload, 70),
    "Streams": (streams, 200),
    "Memory": (memory, 60),
    "Whole steps": (whole_steps, 120),
    "Rank of many": (rank_of_many, 120),
}
#: The section that says nothing on one rank.
OF_SEVERAL = "Ways"
#: The sections of quick calls, with their seconds: two for one GPU, which take ten minutes
#: together, and one for a node. Those whose wrong numbers are worth more than any speed come first.
QUICK: dict[str, dict[str, float]] = {
    "first": {
        "First steps": 40,
        "Waits": 25,
        "Tests": 95,
        "Timer": 25,
        "Newton-Schulz": 40,
        "Launches": 25,
    },
    "second": {"Streams": 120, "Memory": 35, "Step": 45, "Whole steps": 70},
    "node": {
        "First steps": 60,
        "Waits": 40,
        "Tests": 150,
        "Streams": 150,
        "Ways": 50,
        "Whole steps": 90,
    },
}
#: Sections in which ranks of several nodes take part.
BETWEEN_NODES = ("Step", "Streams", "Whole steps")


def main() -> None:
    """Write the report, and end with code 1 if anything is wrong."""
    begun = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the file for the report")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="everything once, as small as it goes")
    parser.add_argument("--ranks", type=int, help="how many GPUs; all of them by default")
    chosen_by = parser.add_mutually_exclusive_group()
    chosen_by.add_argument("--sections", nargs="+", choices=list(SECTIONS))
    chosen_by.add_argument(
        "--quick",
        choices=list(QUICK),
        help="five minutes of one GPU, the next five, or ten minutes of a node",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help="when all must be over; by default what the sections add up to, and each has more "
        "time with more",
    )
    parser.add_argument("--commit", help="what the report is of, where there is no .git")
    parser.add_argument(
        "--nnodes",
        type=int,
        default=1,
        help="how many nodes; start one process on each, by torchrun --nproc_per_node 1, or with "
        "--node-rank and --master",
    )
    parser.add_argument("--node-rank", type=int, default=int(os.environ.get("RANK", "0")))
    parser.add_argument(
        "--master",
        default=f"{os.environ.get('MASTER_ADDR', '127.0.0.1')}:"
        f"{int(os.environ.get('MASTER_PORT', '29500')) + 1}",
        help="HOST:PORT of node 0, of which some dozens of ports from PORT on are free",
    )
    parser.add_argument(
        "--compile", action="store_true", help="let stock compile what it does by default"
    )
    args = parser.parse_args()
    takes_all = args.sections is None
    if args.quick:
        args.sections = list(QUICK[args.quick])
    elif takes_all:
        args.sections = list(SECTIONS if args.nnodes == 1 else BETWEEN_NODES)
    if args.nnodes > 1 and (alone := set(args.sections) - set(BETWEEN_NODES)):
        parser.error(
            f"--sections {', '.join(sorted(alone))} are of one node; with --nnodes name some of "
            f"{', '.join(BETWEEN_NODES)}"
        )
    if not 0 <= args.node_rank < args.nnodes:
        parser.error(f"--node-rank must be from 0 to --nnodes - 1, got {args.node_rank}")
    # Ranks meet by themselves, and not in the store of a launcher.
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    if args.device == "cpu" and not args.tiny:
        parser.error("--device cpu takes --tiny: the sizes are those of a GPU")
    if not args.compile:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    # Forks can use a GPU that this process has not touched. The CUDA runtime's own count would
    # touch it.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if args.device == "cpu":
        os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    # Imports from here on look at the environment.
    import torch

    available = torch.cuda.device_count() if args.device == "cuda" else os.cpu_count() or 1
    if not available:
        print(
            "there is no GPU here; --device cpu --tiny goes through everything on the CPU",
            file=sys.stderr,
        )
        sys.exit(2)
    ranks = args.ranks if args.ranks is not None else available if args.device == "cuda" else 1
    if not 1 <= ranks <= available:
        parser.error(
            f"--ranks must be from 1 to {available}, as many as this machine has devices, got "
            f"{ranks}"
        )
    if takes_all and ranks == args.nnodes == 1 and OF_SEVERAL in args.sections:
        args.sections.remove(OF_SEVERAL)
    from gpu_ranks import Place, describe

    # An import may have begun to use the GPU; so does counting without NVML. Then forks cannot use
    # it.
    spawns = torch.cuda.is_initialized() or (
        args.device == "cuda" and torch.cuda._device_count_nvml() < 0
    )
    if args.node_rank:
        args.out = args.out.with_name(f"{args.out.name}.node{args.node_rank}")
    try:
        args.out.open("a").close()
    except OSError as error:
        parser.error(
            f"--out {args.out} cannot be written: {error.strerror}; make its folder, or name "
            "another file"
        )
    place = Place(
        args.device,
        ranks,
        args.tiny,
        spawns=spawns,
        nodes=args.nnodes,
        node=args.node_rank,
        master=args.master,
        folder=str(args.out.resolve().parent),
    )
    found = on_ranks(place, describe, limit_s=60, ranks=1)[0]
    place = dataclasses.replace(place, memory_bytes=found["memory"])
    head = header(place, found, args.commit)

    def write(lines: Sequence[str]) -> None:
        args.out.write_text("\n".join([*head, *lines]))

    write(not_yet(args.sections))
    limits = {title: SECTIONS[title][1] for title in args.sections}
    if args.quick:
        limits = QUICK[args.quick]
    needed = sum(limits.values()) + START_S
    minutes = args.minutes or needed / 60
    # With more time for all, each section has more.
    more = max(1.0, 60 * minutes / needed)
    whole = run(
        place,
        {title: (SECTIONS[title][0], more * limit_s) for title, limit_s in limits.items()},
        until=begun + 60 * minutes,
        write=write,
    )
    print(
        f"{args.out}: "
        + ("nothing is wrong" if not whole.problems else f"{len(whole.problems)} problems:")
    )
    for problem in whole.problems:
        print(f"* {problem}")
    sys.exit(1 if whole.problems else 0)


if __name__ == "__main__":
    main()
