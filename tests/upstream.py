"""DeepSpeed's own tests on this backend, file by file beside stock.

    DEEPSPEED_CHECKOUT=<clone> python tests/upstream.py --out FOLDER [--modes stock scalar muon] [FILE ...]
    python tests/upstream.py --out FOLDER --report

Every config of ZeRO with Adam or AdamW is replaced on its way into DeepSpeed: ``muon`` gives matrices to Muon;
``scalar`` gives everything to the scalar optimizer, which has stock's arithmetic; ``stock`` replaces nothing. The tests
belong to the release that the clone's version.txt names: install that one. Files that have run do not run again. The
last line of a run, and ``--report``, is a table in Markdown, and below it every test that stock passes and a
replacement does not.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODES = ("stock", "scalar", "muon")
DEFAULT_FILES = ("v1/zero/*.py", "runtime/zero/test_zero_tensor_fragment.py", "runtime/test_no_sync_ctxt.py",
                 "checkpoint/*.py", "runtime/half_precision/*.py")
#: The result of a test by its name: passed, skipped, or the first line of its failure.
Results = dict[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", default=DEFAULT_FILES, help="globs under the clone's tests/unit")
    parser.add_argument("--out", type=Path, required=True, help="folder of results")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="of tests, as pytest's")
    parser.add_argument("--test_timeout", type=int, default=300, help="seconds until a test counts as one that hangs")
    args = parser.parse_args()
    args.out = args.out.resolve()
    if not args.report:
        checkout = Path(os.environ.get("DEEPSPEED_CHECKOUT") or parser.error("DEEPSPEED_CHECKOUT is not set"))
        check_release(checkout)
        with tempfile.TemporaryDirectory() as copy:
            # The tests are copied alone: beside its package, they would take that one instead of the installed release.
            tests = Path(shutil.copytree(checkout / "tests", Path(copy) / "tests"))
            files = sorted({path for glob in args.files for path in (tests / "unit").glob(glob)
                            if path.name.startswith("test_")})
            if not files:
                parser.error(f"{checkout / 'tests' / 'unit'} has none of {', '.join(args.files)}")
            for mode in args.modes:
                for path in files:
                    run(path, tests, mode, args.out, args.test_timeout, args.k)
    print(report(args.out))


def check_release(checkout: Path) -> None:
    """Raise SystemExit unless the tests of ``checkout`` can run here and belong to the installed DeepSpeed."""
    import deepspeed
    import pytest
    if pytest.version_tuple >= (8, 4):
        raise SystemExit(f"upstream.py: pytest {pytest.__version__} does not find DeepSpeed's fixtures; run "
                         "this in an environment with pytest<8.4")
    wanted, installed = (checkout / "version.txt").read_text().strip(), deepspeed.__version__.split("+")[0]
    if wanted != installed:
        raise SystemExit(f"upstream.py: {checkout} has the tests of DeepSpeed {wanted}, installed is {installed}: run "
                         f"them in an environment with deepspeed=={wanted}")


def run(path: Path, tests: Path, mode: str, out: Path, test_timeout: int, expression: str) -> None:
    """Run one file and leave its results in ``out``."""
    name = str(path.relative_to(tests / "unit"))
    result = out / mode / name.replace("/", "+").replace(".py", ".xml")
    if result.exists():
        return
    result.parent.mkdir(parents=True, exist_ok=True)
    unfinished = result.with_suffix(".part")
    places = [str(ROOT / "tests" / "upstream_site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", **os.environ,
                   "LOCAL_SIZE": "8", "UPSTREAM_MODE": mode, "PYTHONPATH": os.pathsep.join(filter(None, places)),
                   "UPSTREAM_REPLACED": str(result.with_suffix(".replaced")),
                   "DS_UNITTEST_TIMEOUT": str(test_timeout), "DS_DISABLE_REUSE_DIST_ENV": "1"}
    result.with_suffix(".replaced").write_text("")
    with open(result.with_suffix(".log"), "w") as log:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={unfinished}", "-k",
                   expression, str(path)]
        subprocess.run(command, cwd=tests, env=environment, stdout=log, stderr=subprocess.STDOUT)
    if not unfinished.exists():
        raise SystemExit(f"upstream.py: {name} in mode {mode} gave no results, see {result.with_suffix('.log')}")
    unfinished.rename(result)
    print(f"{mode}: {name}: {counted(result)}", flush=True)


def read(path: Path) -> Results:
    """Return the results of one file."""
    results: Results = {}
    for case in ElementTree.parse(path).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        failed = [element for kind in ("failure", "error") for element in case.findall(kind)]
        if failed:
            results[name] = (failed[0].get("message") or "no message").strip().splitlines()[0][:200]
        else:
            results[name] = "skipped" if case.findall("skipped") else "passed"
    return results


def counted(path: Path) -> str:
    """Return a file's numbers of passed, failed and skipped tests, and of the engines in which this backend took part.
    """
    if not path.exists():
        return "not run"
    kinds = Counter(result if result in ("passed", "skipped") else "failed" for result in read(path).values())
    text = ", ".join(f"{kinds[kind]} {kind}" for kind in ("passed", "failed", "skipped") if kinds[kind]) or "no tests"
    engines = len(path.with_suffix(".replaced").read_text())
    return f"{text}; {engines} engines of ours" if engines else text


def report(out: Path) -> str:
    """Return a table with a line for each file, then the tests that stock passes and a replacement does not."""
    modes = {mode: {path.stem: read(path) for path in (out / mode).glob("*.xml")} for mode in MODES}
    names = sorted({name for files in modes.values() for name in files})
    lines = ["| file | stock | scalar | muon |", "|---|---|---|---|"]
    for name in names:
        cells = [counted(out / mode / f"{name}.xml") for mode in MODES]
        lines.append(f"| {name.replace('+', '/')}.py | {' | '.join(cells)} |")
    for mode in MODES[1:]:
        lines += ["", f"Passed by stock, not by {mode}:", ""]
        for name in names:
            stock, ours = modes["stock"].get(name, {}), modes[mode].get(name)
            worse = {} if ours is None else {test: ours.get(test, "not run") for test, result in stock.items()
                                             if result == "passed" and ours.get(test) != "passed"}
            lines += [f"* {name.replace('+', '/')}.py {test}: {result}" for test, result in sorted(worse.items())]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
