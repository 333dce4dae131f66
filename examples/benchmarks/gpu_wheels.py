"""Gather all that gpu.py needs on a machine with a GPU, torch and no network, in one folder.

    python examples/benchmarks/gpu_wheels.py --python 3.12 --out bundle
    # there:
    bash bundle/run.sh --minutes 20 --out report.md

The folder has wheels for that Python, the sources of the last commit, and run.sh. That script
unpacks them, installs the wheels beside the torch that is there, and hands its arguments to gpu.py
with the commit.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_suffix(".txt")
DEEPSPEED = "deepspeed==0.19.8"
#: Platforms of wheels with compiled parts; older ones first.
PLATFORMS = ("manylinux2014", "manylinux_2_17", "manylinux_2_28")

RUN = """#!/usr/bin/env bash
set -euo pipefail
here=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
mkdir -p "$here/source"
tar -xzf "$here/source.tar.gz" -C "$here/source"
python -m pip install --no-index --find-links "$here/wheels" {deepspeed} -r "$here/wheels.txt"
PYTHONPATH="$here/source" python "$here/source/examples/benchmarks/gpu.py" --commit {commit} "$@"
"""


def commands(out: Path, python: str, machine: str) -> list[list[str]]:
    """Return the commands that fill ``out``: the wheel of deepspeed without compiled operators,
    wheels for that Python, and the sources."""
    pip, wheels = [sys.executable, "-m", "pip"], str(out / "wheels")
    platforms = [f"--platform={platform}_{machine}" for platform in PLATFORMS]
    for_python = [f"--python-version={python}", "--only-binary=:all:", *platforms]
    return [
        [*pip, "wheel", "--no-deps", "--wheel-dir", wheels, DEEPSPEED],
        [*pip, "download", *for_python, "--dest", wheels, "--requirement", str(LIST)],
        ["git", "-C", str(ROOT), "archive", "--output", str(out / "source.tar.gz"), "HEAD"],
    ]


def run_script(commit: str) -> str:
    """Return the script that installs the wheels and runs gpu.py."""
    return RUN.format(deepspeed=DEEPSPEED, commit=commit)


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill the folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder")
    parser.add_argument(
        "--python",
        default=f"{sys.version_info.major}.{sys.version_info.minor}",
        help="the version there; this one's by default",
    )
    parser.add_argument("--machine", default="x86_64", help="the processor there, or aarch64")
    args = parser.parse_args(arguments)
    (args.out / "wheels").mkdir(parents=True, exist_ok=True)
    out = args.out.resolve()
    # Operators are built where they are used, if at all.
    env = {**os.environ, "DS_BUILD_OPS": "0"}
    for command in commands(out, args.python, args.machine):
        print(" ".join(command), flush=True)
        if code := subprocess.run(command, env=env).returncode:
            sys.exit(code)
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    (out / "wheels.txt").write_text(LIST.read_text())
    (out / "run.sh").write_text(run_script(commit))
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{out}: {size / 2**20:.0f} MiB; there: bash {out.name}/run.sh --out report.md")


if __name__ == "__main__":
    main()
