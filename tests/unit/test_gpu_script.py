"""What somebody with a GPU runs: every section on a CPU, and what is wrong is said and ends in an exit code."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import deepspeed.comm as dist
import pytest
import torch
import torch.distributed.distributed_c10d as c10d

from tests.support.harness import DistributedTest
from tests.support.rooms import rooms

pytestmark = rooms("outside")

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "benchmarks" / "gpu.py"


@pytest.fixture
def gpu(monkeypatch):
    """The script as a module."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("gpu")


@pytest.fixture
def place(gpu):
    return importlib.import_module("gpu_ranks").Place("cpu", 2, True)


def test_every_section_runs(tmp_path):
    out = tmp_path / "report.md"
    done = subprocess.run([sys.executable, str(SCRIPT), "--device", "cpu", "--tiny", "--out", str(out)],
                          capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = out.read_text()
    head, *sections = report.split("\n## ")
    assert f"`python examples/benchmarks/gpu.py --device cpu --tiny --out {out}`" in head and "commit" in head
    assert [section.split("\n")[0] for section in sections] == [
        "Tests", "Newton-Schulz", "Step", "Batches", "Offload", "Streams", "Memory"]
    assert "1 passed, 0 failed, 0 skipped." in sections[0]
    rows = [{row.strip("|").split("|")[column].strip() for row in section.splitlines() if row.startswith("| ")}
            for section, column in zip(sections[1:], (2, 0, 0, 0, 0, 0), strict=True)]
    assert rows[0] >= {"ours gram", "stock gram", "ours standard", "stock standard", "torch"}
    assert rows[1] >= {"LayerWiseMuon", "stock Muon", "torch AdamW, fused"}
    assert rows[2] >= {"one by one", "batches over buckets", "one bucket"}
    assert rows[3] >= {"on the device", "on the host, copies beside updates", "on the host, one after another"}
    assert rows[4] >= {"overlapped", "no overlap", "streams late at random"} and "other bits" not in sections[5]
    assert "stage-1-bf16" in rows[5]


def test_without_a_gpu_it_says_so_in_a_line(tmp_path):
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, str(SCRIPT), "--out", str(tmp_path / "x")], capture_output=True, text=True,
                          timeout=120, env=env)
    assert done.returncode == 2 and not (tmp_path / "x").exists()
    assert done.stderr.count("\n") == 1 and "no GPU here; --device cpu --tiny" in done.stderr


def test_a_section_that_fails_is_in_the_report_and_the_others_run(gpu, tmp_path, monkeypatch, capsys):
    def breaks(place, limit_s):
        raise ZeroDivisionError("of course")

    monkeypatch.setattr(gpu, "SECTIONS", {
        "First": (breaks, 1), "Second": (lambda place, limit_s: gpu.Found(["| a table |"], ["too slow"]), 1),
        "Third": (lambda place, limit_s: gpu.Found(["all is well"]), 1)})
    monkeypatch.setattr(gpu, "on_ranks", lambda *args, **kwargs: [
        {"name": "CPU", "memory": 0, "cuda": "none", "nccl": "gloo"}])
    for name in ("TORCHDYNAMO_DISABLE", "PYTORCH_NVML_BASED_CUDA_CHECK", "DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES",
                 "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    out = tmp_path / "report.md"
    for sections, code in ((["First", "Second", "Third"], 1), (["Third"], 0)):
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--tiny", "--out", str(out), "--sections",
                                          *sections])
        with pytest.raises(SystemExit) as end:
            gpu.main()
        assert end.value.code == code
        report, said = out.read_text(), capsys.readouterr().out
        assert "all is well" in report
        for problem in ("First: ZeroDivisionError: of course", "Second: too slow"):
            assert (problem in said) == bool(code) and (problem.split(": ", 1)[1] in report) == bool(code)


def test_what_is_skipped_fails(gpu):
    found = gpu.read_report('<testsuites><testsuite><testcase name="a"/><testcase name="b"><failure message="x is 1">'
                            '</failure></testcase><testcase name="c"><error message="y"/></testcase><testcase name="d">'
                            '<skipped message="no device"/></testcase></testsuite></testsuites>')
    assert found.lines == ["1 passed, 2 failed, 1 skipped."]
    assert found.problems == ["b failed: x is 1", "c failed: y", "d skipped: no device"]
    assert gpu.read_report("<testsuites/>").problems == ["there was no test"]


def test_other_bits_on_any_rank_are_named(gpu):
    first = [{"stage 1": "a", "stage 2": "b"}, {"stage 1": "a", "stage 2": "b"}]
    found = gpu.compare({"overlapped": first, "again": first, "late": [first[0], {"stage 1": "a", "stage 2": "c"}]})
    assert found.problems == ["late: other bits at stage 2"]
    assert found.lines[-2:] == ["| again | same bits | same bits |", "| late | same bits | other bits |"]


def what_is_late(place):
    ranks = importlib.import_module("gpu_ranks")
    counts = Counter()
    ranks.time.sleep = lambda seconds: counts.update([sys._getframe(1).f_locals["function"].__qualname__])
    ranks.race(place, overlap=True, seed=1)
    return counts


def test_all_that_overlaps_is_late(gpu, place):
    wanted = {"Wire.reduce", "Wire.gather", "Exchange.to_owners", "Exchange.to_cuts", "Owned.update", "transfer",
              "LayerNorm.forward"}
    for counts in gpu.on_ranks(place, what_is_late, limit_s=120):
        assert counts.keys() == wanted, counts


class TestOneRankOverNccl(DistributedTest):
    world_size = 1

    @pytest.mark.parametrize("said", [
        None, "No device id is provided via `init_process_group` or `barrier `. Using the current device set by the "
        "user. "])
    def test_a_barrier_may_name_no_device(self, said):
        # What torch sees where a group that was given no device is on a GPU; gloo's barrier stays on the CPU.
        torch._C._get_accelerator = lambda *args: torch.device("cuda")
        c10d._get_object_coll_device = lambda group=None: "cuda"
        c10d.BarrierOptions = type("OnTheCpu", (c10d.BarrierOptions,), {"device": None})
        if said is None:
            with pytest.warns(UserWarning, match="using the device under current context"):
                dist.barrier()
            dist.barrier()
        else:
            warnings.warn(said)
        with pytest.raises(UserWarning, match="of something else"):
            warnings.warn("barrier(): of something else")


def fails_on_one_rank(place):
    if os.environ["RANK"] == "1":
        raise ZeroDivisionError("only here")


def sleeps(place):
    time.sleep(60)


def says_its_environment(place):
    return [os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["OF_THE_VARIANT"]]


def test_ranks_return_what_they_found_or_why_not(gpu, place):
    assert gpu.on_ranks(place, says_its_environment, limit_s=60, env={"OF_THE_VARIANT": "1"}) == [
        ["0", "2", "1"], ["1", "2", "1"]]
    with pytest.raises(RuntimeError, match="(?s)a process ended with code.*only here"):
        gpu.on_ranks(place, fails_on_one_rank, limit_s=60)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="not done after 3 seconds"):
        gpu.on_ranks(place, sleeps, limit_s=3)
    assert time.monotonic() - start < 40


def test_tests_that_take_too_long_are_given_up_with_all_that_they_started(gpu, place, tmp_path, monkeypatch):
    started, ours = tmp_path / "started", tmp_path / "test_slow.py"
    ours.write_text("import os, pathlib, time\nimport pytest\n@pytest.mark.gpu\n"
                    "@pytest.mark.parametrize('_', ['2ranks-2-native'])\ndef test_exact(_):\n"
                    "    if not os.fork():\n        os.setpgid(0, 0)\n"
                    f"        pathlib.Path({str(started)!r}).write_text(str(os.getpid()))\n    time.sleep(300)\n")

    class Impatient(subprocess.Popen):
        def wait(self, timeout=None):
            until = time.monotonic() + 120
            while timeout is not None and time.monotonic() < until:
                if started.exists() and started.read_text():
                    raise subprocess.TimeoutExpired(self.args, timeout)
                time.sleep(0.1)
            return super().wait()

    monkeypatch.setattr(gpu, "TESTS", str(ours))
    monkeypatch.setattr(subprocess, "Popen", Impatient)
    assert gpu.tests(place, 6).problems == ["not done after 6 seconds"]
    until = time.monotonic() + 20
    while runs(int(started.read_text())) and time.monotonic() < until:
        time.sleep(0.1)
    assert not runs(int(started.read_text()))


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
