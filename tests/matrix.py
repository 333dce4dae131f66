"""Run the tests with other versions of Python, torch and DeepSpeed: ``python -m tests.matrix [--whole] [NAME ...]``.

Each NAME is an environment of ``ENVIRONMENTS``; the default is all of them. An environment is made in a folder, with
examples/venv.sh, and deleted when its run is over. The files of ``SELECTION`` run in it, or with ``--whole`` all files:
unit tests in one process, each other file in its own, killed after ``--timeout`` seconds. The results are added to
docs/versions.json after each environment, and docs/versions.md is made of that; ``--write`` makes it without a run.
Interpreters are those on PATH, or pyenv's. The exit code is 1 if a test failed for which ``REASONS`` has no reason.

A selection takes about ten minutes on two cores, beside the download of torch, which may be 3 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "versions.json"
PAGE = ROOT / "docs" / "versions.md"
QUICKSTART = "examples/quickstart.sh"

#: The words of tests/support/versions.py for a test that is skipped because of a version.
NEEDED = re.compile(r"needs (\S+), and .* is installed: (.*)")

#: The date of an environment's last run, and the results of its files.
Results = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Environment:
    """Versions that are installed together."""

    python: str
    torch: str
    deepspeed: str
    transformers: str = ""
    """Empty for the one that setup.cfg asks for."""

    @property
    def name(self) -> str:
        """The name on the command line and in docs/versions.json."""
        return f"py{self.python}-torch{self.torch}-ds{self.deepspeed}" + f"-tf{self.transformers}" * bool(
            self.transformers)

    def variables(self, folder: Path) -> dict[str, str]:
        """Return the environment variables for examples/venv.sh."""
        return {**os.environ, "VENV": str(folder), "PYTHON": interpreter(self.python), "DS_ACCELERATOR": "cpu",
                "TORCH_SPEC": f"torch=={self.torch}", "DEEPSPEED_SPEC": f"deepspeed=={self.deepspeed}",
                "TORCHDYNAMO_DISABLE": "1", "LOCAL_SIZE": "8", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


#: Environments beside the one that runs all tests before a change is taken. The oldest and newest are combined.
ENVIRONMENTS = (
    Environment("3.10", "2.11.0", "0.19.4"),
    Environment("3.11", "2.11.0", "0.19.4", "5.22.2"),
    Environment("3.12", "2.13.0", "0.19.6"),
    Environment("3.11", "2.14.1", "0.19.8"),
    Environment("3.13", "2.15.0", "0.19.8"),
)

#: Files that touch torch or DeepSpeed most, as patterns, and the job of the quickstart.
SELECTION = (
    "tests/unit/checkpoint/test_*.py",
    "tests/unit/config/test_*.py",
    "tests/unit/engine/test_*.py",
    "tests/unit/optimizers/test_*.py",
    "tests/unit/ranks/test_*.py",
    "tests/unit/zero/test_*.py",
    "tests/distributed/checkpoint/test_checkpoint.py",
    "tests/distributed/checkpoint/test_schedules_moved.py",
    "tests/distributed/checkpoint/test_stage3_interop.py",
    "tests/distributed/checkpoint/test_universal.py",
    "tests/distributed/ecosystem/test_contract.py",
    "tests/distributed/parallel/test_pipeline.py",
    "tests/distributed/step/test_host.py",
    "tests/distributed/step/test_offload.py",
    "tests/distributed/step/test_precision.py",
    "tests/distributed/step/test_state_access.py",
    "tests/distributed/step/test_training.py",
)

#: Reasons for failures: a pattern of the versions, a pattern of the test and its error, and the reason.
REASONS: tuple[tuple[str, str, str], ...] = (
    (r"ds0\.19\.[4-6]$", "test_zero_to_fp32_gives_the_masters|test_all_that_is_no_optimizer_state",
     "`zero_to_fp32.py` and `ds_to_universal.py` of this DeepSpeed leave out empty parameters; a load says so."),
    (r"ds0\.19\.[4-6]$", "test_into_its_muon",
     "Stock's Muon of this DeepSpeed gathers matrices of one size alone at stage 3."),
    (r"ds0\.19\.4$", "test_before_the_reduction_it_is_this_ranks_own_sum_as_with_stock",
     "`safe_get_full_grad` of this DeepSpeed stops with its own optimizer, which the test compares with."),
    (r"ds0\.19\.[4-6]$", "test_it_need_not_be_computed", "`compute_grad_norm` came with DeepSpeed 0.19.7."),
    (r"ds0\.19\.4", "test_hf_trainer.*(TestStage3|from_pretrained_cuts)|writes_into_persistent_parameters",
     "At stage 3 of this DeepSpeed parameters may have values that nobody gave them, now and then, with its own Adam, "
     "too: losses of 0.0 in a Trainer that saves."),
    (r"ds0\.19\.[45]$", "test_sums_instead_of_means", "`gradient_allreduce_op` came with DeepSpeed 0.19.6."),
)


def files_of(patterns: tuple[str, ...]) -> list[str]:
    """Return the test files that the patterns name, and the quickstart."""
    return [str(path.relative_to(ROOT)) for pattern in patterns for path in sorted(ROOT.glob(pattern))] + [QUICKSTART]


def interpreter(python: str) -> str:
    """Return the path of a Python of this release.

    Raises:
        SystemExit: there is no such Python.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    paths = [*sorted(map(str, pyenv.glob(f"{python}.*/bin/python"))), shutil.which(f"python{python}")]
    if not paths[0]:
        raise SystemExit(f"no Python {python}: neither python{python} on PATH nor {python}.* under {pyenv}")
    return paths[0]


# --- in the process that runs a file: this module is a plugin of pytest there ----------------------------------------


def _tell(**what: object) -> None:
    if (path := os.environ.get("MATRIX_REPORT")):
        with open(path, "a") as file:
            file.write(json.dumps(what) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    _tell(started=nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or not report.passed:
        error = error_of(report.longreprtext) if report.failed else ""
        lacks = report.longrepr[2].removeprefix("Skipped: ") if report.skipped and report.when == "setup" else ""
        _tell(test=report.nodeid, outcome=report.outcome, error=error or lacks)


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        _tell(test=report.nodeid, outcome="failed", error=error_of(report.longreprtext))


def error_of(text: str) -> str:
    """Return the line of a traceback that names the error, without folders of tests."""
    lines = text.splitlines()
    errors = [line for line in lines
              if re.match(r"E  +\S|[\w.]*(Error|Exception|Warning|Failed|Exit)\b|ranks .* still ran", line)]
    error = (errors or lines or [""])[0].removeprefix("E ").strip()
    return re.sub(rf"{re.escape(tempfile.gettempdir())}/\S*/", "", error)[:300]


# --- the runs ---------------------------------------------------------------------------------------------------------


def batches(files: list[str]) -> list[list[str]]:
    """Return files by process: those of unit tests together, which saves importing torch for each."""
    unit = [file for file in files if file.startswith("tests/unit/")]
    return [batch for batch in (unit, *([file] for file in files if file not in unit)) if batch]


def run_batch(files: list[str], folder: Path, variables: dict[str, str], timeout: float) -> dict[str, dict[str, Any]]:
    """Run files in the environment in ``folder``; return for each the number of tests by outcome, and the failed ones.
    """
    with tempfile.TemporaryDirectory() as scratch:
        log, report = Path(scratch, "log"), Path(scratch, "report")
        report.touch()
        command = [str(folder / "bin" / "python"), "-m", "pytest", "-q", "-p", "tests.matrix", "-p", "no:cacheprovider",
                   "--continue-on-collection-errors"]
        if files == [QUICKSTART]:
            command, files = ["bash", QUICKSTART, "--steps", "20", "--out", f"{scratch}/out"], []
        with open(log, "w") as out:
            job = subprocess.Popen([*command, *files], cwd=ROOT, stdout=out, stderr=out, start_new_session=True,
                                   env={**variables, "MATRIX_REPORT": str(report)})
            try:
                code: int | None = job.wait(timeout)
            except subprocess.TimeoutExpired:
                code = None
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
        lines = [json.loads(line) for line in report.read_text().splitlines()]
        ending = (log.read_text().strip().splitlines() or ["without a word"])[-1][:300]
    if code is None:
        at = ([line["started"] for line in lines if "started" in line] or files or [QUICKSTART])[-1]
        lines.append({"test": at, "outcome": "failed", "error": f"still ran {timeout:g} s after the first test"})
    elif not files or code not in (0, 1):
        error = f"ended with {code}: {ending}"
        lines.append({"test": (files or [QUICKSTART])[-1], "outcome": "failed" if code else "passed", "error": error})
    return outcomes(lines)


def outcomes(lines: list[dict[str, str]]) -> dict[str, dict[str, Any]]:
    """Return the results of each file from the lines that a run has reported."""
    results: dict[str, dict[str, Any]] = {}
    last = {line["test"]: line for line in lines if "test" in line}  # passed, and then failed where it ended
    for test, line in last.items():
        of_file = results.setdefault(test.partition("::")[0], {"passed": 0, "skipped": 0, "failed": {}})
        if line["outcome"] == "failed":
            of_file["failed"][test] = line["error"]
        else:
            of_file[line["outcome"]] += 1
        if line["outcome"] == "skipped" and (lack := NEEDED.fullmatch(line["error"])):
            of_file.setdefault("lacking", {})[test] = lack.expand(r"`\1`: \2")
    return results


def run(environment: Environment, folder: Path, files: list[str], timeout: float) -> None:
    """Make an environment in ``folder``, unless it is there, and add the results of its files to docs/versions.json."""
    variables = {**environment.variables(folder), "TORCH_EXTENSIONS_DIR": str(folder / "torch_extensions"),
                 "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    make = ". examples/venv.sh; make_venv test,plots,hf"
    if environment.transformers:
        make += f"; pip install --quiet transformers=={environment.transformers}"
    subprocess.run(["bash", "-euc", make], cwd=ROOT, env=variables, check=True)
    for batch in batches(files):
        began = time.monotonic()
        ended = run_batch(batch, folder, variables, timeout)
        results = read()
        there = results.get(environment.name, {"files": {}})["files"]
        there = {file: result for file, result in {**there, **ended}.items() if (ROOT / file).exists()}
        results[environment.name] = {"date": time.strftime("%Y-%m-%d"), "files": there}
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        PAGE.write_text(page(results))
        for file, result in ended.items():
            print(f"{environment.name} {file}: {result['passed']} passed, {len(result['failed'])} failed",
                  *(f"  {name}: {error}" for name, error in result["failed"].items()), sep="\n")
        print(f"{time.monotonic() - began:.0f} s", flush=True)


def read() -> Results:
    """Return the content of docs/versions.json."""
    results: Results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return results


# --- the page ---------------------------------------------------------------------------------------------------------

INTRODUCTION = """\
# Versions

`python -m tests.matrix` makes an environment for each line of this table, runs tests there, and writes this page. What
README says of versions are its ends:

**{sentence}**

A line that is not run yet is a claim that nothing has shown so far. Releases in between were not tried; none is
refused. Every test runs with Python 3.11, torch 2.13.0 and DeepSpeed 0.19.8 before a change is taken.

{environments}

The files are those that touch torch and DeepSpeed most, and the job of the quickstart, on processes of a CPU, without
`THOROUGH=1`; `--whole` runs all there are. A number in brackets refers to the reason below. A test that is skipped
counts neither as passed nor as failed; those that need another version are listed below.

AutoEP (`expert_parallel`) of DeepSpeed 0.19.8 runs with transformers up to 5.22, and fails inside DeepSpeed from 5.23
on, where `get` of transformers' registry of outputs takes one argument. Here that is an error that says so.
"""


def reason_of(environment: Environment, test: str, error: str) -> str | None:
    """Return the reason in ``REASONS`` for a failure of a test there; None if there is none."""
    return next((reason for versions, failure, reason in REASONS
                 if re.search(versions, environment.name) and re.search(failure, f"{test}: {error}")), None)


def unknown(results: Results) -> dict[str, str]:
    """Return failures without a reason: the error by environment and test."""
    return {f"{environment.name} {test}": error for environment in ENVIRONMENTS if environment.name in results
            for file in results[environment.name]["files"].values() for test, error in file["failed"].items()
            if reason_of(environment, test, error) is None}


def ends(what: str) -> tuple[str, str]:
    """Return the oldest and the newest version of ``python``, ``torch`` or ``deepspeed``."""
    versions = {getattr(environment, what) for environment in ENVIRONMENTS}
    in_order = sorted(versions, key=lambda text: [*map(int, text.split("."))])
    return in_order[0], in_order[-1]


def sentence() -> str:
    """Return the sentence about versions in README.md and docs/index.md."""
    names = {"python": "Python", "torch": "torch", "deepspeed": "DeepSpeed"}
    return ", ".join(f"{name} {' to '.join(ends(what))}" for what, name in names.items())


def page(results: Results) -> str:
    """Return docs/versions.md."""
    files = sorted({*files_of(SELECTION), *(file for each in results.values() for file in each["files"])})
    reasons: dict[str, list[str]] = {}
    environments = ["| | Python | torch | DeepSpeed | transformers | tests pass | fail | files not run | last run |",
                    "|---|---|---|---|---|---:|---:|---:|---|"]
    columns = []
    for letter, each in zip("abcdefghijklm", ENVIRONMENTS):
        there = results.get(each.name, {"date": "", "files": {}})
        passed, failed = (sum(counts) for counts in zip(
            (0, 0), *((file["passed"], len(file["failed"])) for file in there["files"].values())))
        versions = (each.python, each.torch, each.deepspeed, each.transformers or "newest")
        environments.append(f"| {letter} | {' | '.join(versions)} | {passed:,} | {failed} | "
                            f"{len(files) - len(there['files'])} | {there['date'] or 'not yet'} |")
        if there["files"]:
            columns.append([letter, "---", *(cell(each, there["files"].get(file), reasons) for file in files)])
    rows = zip(["file", "---", *files], *columns)
    lines = [INTRODUCTION.format(sentence=sentence(), environments="\n".join(environments)),
             *("| " + " | ".join(row) + " |" for row in rows)]
    lines += ["", "## Why tests fail"] if reasons else []
    for number, (reason, tests) in enumerate(reasons.items(), 1):
        lines += ["", f"**{number}.** {reason}", "", *(f"* `{test}`" for test in dict.fromkeys(tests))]
    needs = lacking(results)
    lines += ["", "## What tests need"] if needs else []
    for need, tests in needs.items():
        lines += ["", need, "", *(f"* `{test}`" for test in dict.fromkeys(tests))]
    return "\n".join(lines) + "\n"


def lacking(results: Results) -> dict[str, list[str]]:
    """Return the tests that were skipped because of a version, by what they need and with which environments lack it.
    """
    found: dict[str, list[str]] = {}
    lacks: dict[str, list[str]] = {}
    for letter, each in zip("abcdefghijklm", ENVIRONMENTS):
        for file in results.get(each.name, {"files": {}})["files"].values():
            for test, need in file.get("lacking", {}).items():
                found.setdefault(need, []).append(name_of(test))
                lacks.setdefault(need, []).append(letter)
    return {f"{need} (not in {', '.join(dict.fromkeys(lacks[need]))})": tests for need, tests in sorted(found.items())}


def name_of(test: str) -> str:
    """Return a test without its folder and its parameters."""
    return test.partition("[")[0].removeprefix("tests/")


def cell(environment: Environment, result: dict[str, Any] | None, reasons: dict[str, list[str]]) -> str:
    """Return the result of a file as a cell. Add the reasons that it refers to, with their tests, to ``reasons``."""
    if result is None:
        return "not run"
    if not result["failed"]:
        return "pass"
    used = set()
    for test, error in result["failed"].items():
        reason = reason_of(environment, test, error) or f"Not understood yet: `{error}`"
        reasons.setdefault(reason, []).append(name_of(test))
        used.add(list(reasons).index(reason) + 1)
    return f"{len(result['failed'])} fail ({', '.join(map(str, sorted(used)))})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(each.name for each in ENVIRONMENTS))
    parser.add_argument("--whole", action="store_true", help="all files, not the selection")
    parser.add_argument("--files", nargs="+", metavar="FILE", help="these alone, to run again what was mended")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "ds_layerwise_matrix",
                        help="where environments are made; default: %(default)s")
    parser.add_argument("--keep", action="store_true", help="leave them there, for the next run")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds a process; default: %(default)g")
    parser.add_argument("--write", action="store_true", help="make docs/versions.md of what there is, and run nothing")
    args = parser.parse_args()
    known = {each.name: each for each in ENVIRONMENTS}
    if not set(args.names) <= known.keys():
        parser.error(f"{min(set(args.names) - known.keys())} is no environment; there are {', '.join(known)}")
    files = args.files or files_of(("tests/**/test_*.py",) if args.whole else SELECTION)
    names = [] if args.write else args.names or known
    for name in names:
        folder = args.folder.resolve() / name
        run(known[name], folder, files, args.timeout)
        if not args.keep:
            shutil.rmtree(folder)
    PAGE.write_text(page(read()))
    failed = {test: error for test, error in unknown(read()).items() if test.split()[0] in names}
    print(*(f"{test}: {error}" for test, error in failed.items()), sep="\n")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
