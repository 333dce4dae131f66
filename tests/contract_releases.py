"""Walk the lists of engine/contract.py and tests/support/deepspeed_names.py against releases of DeepSpeed.

    pip install --no-deps --target FOLDER deepspeed==0.19.4
    python -m tests.contract_releases FOLDER [FOLDER ...]

It walks them in a process for each release, and prints names that are missing or differ, and where ``since`` and
``until`` are not true. Without a folder it walks the installed release.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MARK = "walked: "


def walk(folder: str | Path | None) -> tuple[str, list[str]]:
    """Return the release in ``folder``, or the installed one, and its problems."""
    paths = [str(ROOT)] if folder is None else [str(folder), str(ROOT)]
    code = "from tests.contract_releases import walk_here; walk_here()"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    result = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True)
    lines = [line for line in result.stdout.splitlines() if line.startswith(MARK)]
    if result.returncode or not lines:
        raise RuntimeError(f"{folder}: {result.stdout}{result.stderr}")
    file, release, wrong = json.loads(lines[-1].removeprefix(MARK))
    if folder is not None and Path(folder).resolve() not in Path(file).resolve().parents:
        raise RuntimeError(f"{folder} holds no DeepSpeed; {file} was imported")
    return release, wrong


def walk_here() -> None:
    """Print the problems of the release that this process imports."""
    import deepspeed

    from ds_layerwise.engine.contract.contract import missing
    from tests.support import deepspeed_names
    release = deepspeed.__version__
    untrue = [f"{name.path} is there, and is to be since {name.since}, until {name.until}"
              for name in deepspeed_names.USED if not name.is_in(release) and name.problem() is None]
    print(MARK + json.dumps([deepspeed.__file__, release, missing() + deepspeed_names.missing(release) + untrue]))


if __name__ == "__main__":
    failed = False
    for release_folder in sys.argv[1:] or [None]:
        walked, problems = walk(release_folder)
        failed = failed or bool(problems)
        print(f"deepspeed {walked}:", *problems or ["all there"], sep="\n  ")
    sys.exit(failed)
