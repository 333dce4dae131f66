"""The conditions of a benchmark, which its results name beside its command."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
from pathlib import Path


def options(description: str, rounds: int) -> argparse.Namespace:
    """Return the options of a comparison in turns: the number of turns, and tiny sizes."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=rounds, help=f"of each comparison (default: {rounds})"
    )
    parser.add_argument(
        "--small",
        action="store_true",
        help="tiny sizes, to see that it runs; its times say nothing",
    )
    return parser.parse_args()


def commit() -> str:
    """Return the commit of this checkout, with a mark if something in it is not committed."""
    described = subprocess.run(
        [
            "git",
            "-C",
            str(Path(__file__).parent),
            "describe",
            "--always",
            "--dirty",
            "--exclude",
            "*",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() if described.returncode == 0 else "none"


def processor() -> str:
    """Return the name of the processor, and their number in the machine."""
    lines = (
        Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if os.path.exists("/proc/cpuinfo")
        else []
    )
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} vCPU {names[0] if names else platform.machine()}"


def conditions() -> str:
    """Return the machine, its load, the interpreter and the commit."""
    python = f"Python {platform.python_version()}"
    return f"{processor()}, load {os.getloadavg()[0]:.1f}, {python}; commit {commit()}"
