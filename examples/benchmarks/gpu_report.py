"""The report of gpu.py: the results of its sections, one after the other, below a description of
the machine."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu_ranks import Place

ROOT = Path(__file__).resolve().parents[2]
#: Seconds without which no section begins.
LEAST_S = 10.0


@dataclass
class Found:
    """The lines and the problems of a section."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def run(
    place: Place,
    sections: Mapping[str, tuple[Callable[[Place, float], Found], float]],
    *,
    until: float = float("inf"),
    write: Callable[[Sequence[str]], object] | None = None,
) -> Found:
    """Run all sections, whichever of them fail.

    Args:
        until: the end on the monotonic clock; a section that no longer fits is a problem.
        write: gets all lines so far after every section, with the names of those to come.
    """
    whole, titles = Found(), list(sections)
    for number, (title, (section, limit_s)) in enumerate(sections.items(), 1):
        print(f"{title} ...", file=sys.stderr, flush=True)
        start = time.monotonic()
        try:
            if until - start < LEAST_S:
                raise TimeoutError(f"not run for want of time; --sections {title} runs it alone")
            found = section(place, round(min(limit_s, until - start), 1))
        except Exception as error:
            found = Found(problems=[f"{type(error).__name__}: {error}"])
        whole.lines += [f"## {title}", "", *found.lines, *([""] if found.lines else [])]
        for problem in found.problems:
            whole.lines += ["Failed:", "", "```", problem, "```", ""]
            whole.problems.append(f"{title}: {problem.strip().splitlines()[-1]}")
        whole.lines += [f"({time.monotonic() - start:.0f} s)", ""]
        if write is not None:
            write([*whole.lines, *not_yet(titles[number:])])
    return whole


def not_yet(titles: Sequence[str]) -> list[str]:
    """Return the lines of a report that is not whole."""
    return (
        [f"**Not all of it: {', '.join(titles)} had not run when this was written.**", ""]
        if titles
        else []
    )


def header(place: Place, device: Mapping[str, Any], commit: str | None = None) -> list[str]:
    """Return the lines with the command, the machine and the commit, which may be given."""
    import deepspeed
    import torch

    def git(*what: str) -> str:
        try:
            done = subprocess.run(
                ["git", "-C", str(ROOT), *what], capture_output=True, text=True, check=False
            )
        except OSError:
            return ""
        return done.stdout.strip()

    changed, number = (
        " with changes" if git("status", "--porcelain") else "",
        commit or git("rev-parse", "--short", "HEAD"),
    )
    command = shlex.join(["python", "examples/benchmarks/gpu.py", *sys.argv[1:]])
    compiles_nowhere = os.environ.get("TORCHDYNAMO_DISABLE") == "1"
    devices = f"{place.nodes} x " * (place.nodes > 1) + f"{place.ranks} x {device['name']}"
    return [
        f"# {devices}: tests, speed, streams and memory",
        "",
        f"`{command}`",
        "",
        f"{devices}{f', {place.memory_bytes / 1e9:.0f} GB each' if device['memory'] else ''}; "
        f"{os.cpu_count()} CPUs, {platform.machine()}; CUDA {device['cuda']}, {device['nccl']}, "
        f"torch {torch.__version__}, deepspeed {deepspeed.__version__}, Python "
        f"{platform.python_version()}; "
        f"{f'commit {number}{changed}' if number else 'unknown commit'}; torch.compile "
        f"{'off on all sides' if compiles_nowhere else 'where a side asks for it'}.",
        "Medians; all sides of a table take turns in the same processes; of several ranks, the "
        "slowest.",
        "",
        *(
            [
                "**One rank: no collective runs.** Nothing here shows sums, gathers and exchanges "
                "over NCCL, fetches of stage 3, or what a network takes.",
                "",
            ]
            if place.ranks * place.nodes == 1
            else []
        ),
        *(
            ["**A tiny run on a CPU: shows that all of it works, and measures nothing.**", ""]
            if place.tiny
            else []
        ),
    ]
