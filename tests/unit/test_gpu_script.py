"""The script for a machine with a GPU: every section runs on a CPU, and an error is said and ends in an exit code."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import deepspeed.comm as dist
import pytest
import torch
import torch.distributed.distributed_c10d as c10d

from tests.support.harness import DistributedTest
from tests.support.rooms import rooms
from tests.support.versions import needs

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


@pytest.fixture
def main(gpu, monkeypatch):
    """Runs the script with arguments, on no ranks, and says how it ended."""
    monkeypatch.setattr(gpu, "on_ranks", lambda *args, **kwargs: [
        {"name": "CPU", "memory": 0, "cuda": "none", "nccl": "gloo"}])
    for name in ("TORCHDYNAMO_DISABLE", "PYTORCH_NVML_BASED_CUDA_CHECK", "DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES",
                 "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, os.environ.get(name, ""))

    def ended(*args):
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--tiny", *map(str, args)])
        with pytest.raises(SystemExit) as end:
            gpu.main()
        return end.value.code

    return ended


@pytest.mark.thorough
@needs("deepspeed>=0.19.8", "its Muon does not say its dtype")
def test_every_section_runs(tmp_path, gpu):
    out = tmp_path / "report.md"
    done = subprocess.run([sys.executable, str(SCRIPT), "--device", "cpu", "--tiny", "--minutes", "30", "--commit",
                           "told", "--out", str(out)], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = out.read_text()
    head, *sections = report.split("\n## ")
    assert "`python examples/benchmarks/gpu.py --device cpu --tiny --minutes 30 --commit told --out" in head
    assert "; commit told" in head
    assert [section.split("\n")[0] for section in sections] == [
        "First steps", "Waits", "Tests", "Timer", "Newton-Schulz", "Launches", "Step", "Batches", "Offload", "Streams",
        "Memory", "Whole steps", "Rank of many"]
    assert head.count("One rank: no collective runs") == 1
    of_first = {section.split("\n")[0]: section for section in sections[:4]}
    del sections[5], sections[:4]
    assert "1 passed, 0 failed, 0 skipped." in of_first["Tests"]
    for section in ("First steps", "Waits"):
        assert [row.split("|")[1].strip() for row in of_first[section].splitlines() if row.startswith("| ")] == [
            "stage", "1", "2", "3"]
    assert "| without waits |" in of_first["Timer"] and "| by default |" in of_first["Timer"]
    for stage in (1, 3):
        assert (tmp_path / f"step_stage{stage}.json.gz").stat().st_size
    rows = [{row.strip("|").split("|")[column].strip() for row in section.splitlines() if row.startswith("| ")}
            for section, column in zip(sections, (2, 0, 0, 0, 0, 0, 0, 1), strict=True)]
    assert rows[0] >= {"ours gram", "stock gram", "ours standard", "stock standard", "torch"}
    assert rows[1] >= {"LayerWiseMuon", "stock Muon", "torch AdamW, fused"}
    assert rows[2] >= {"one by one", "batches over buckets", "one bucket"}
    assert "a bucket has 1 matrix." in sections[2]
    assert rows[3] >= {"on the device", "on the host, copies beside updates", "on the host, one after another"}
    assert rows[4] >= {"overlapped", "no overlap", "streams late at random"} and "other bits" not in sections[4]
    assert "| stage 3, nothing persistent | stage 3, cuts on the host | fp16 | experts | captured |" in sections[4]
    assert "failed" not in sections[4]
    assert "stage-1-bf16" in rows[5]
    steps = importlib.import_module("gpu_steps")
    assert rows[6] >= {*steps.SIDES, steps.TORCH} and rows[7] >= {*steps.AS_ONE_OF_MANY}


def test_without_a_gpu_it_says_so_in_a_line(tmp_path):
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, str(SCRIPT), "--out", str(tmp_path / "x")], capture_output=True, text=True,
                          timeout=120, env=env)
    assert done.returncode == 2 and not (tmp_path / "x").exists()
    assert done.stderr.count("\n") == 1 and "no GPU here; --device cpu --tiny" in done.stderr


def test_a_section_that_fails_is_in_the_report_and_the_others_run(gpu, main, tmp_path, monkeypatch, capsys):
    def breaks(place, limit_s):
        raise ZeroDivisionError("of course")

    monkeypatch.setattr(gpu, "SECTIONS", {
        "First": (breaks, 1), "Second": (lambda place, limit_s: gpu.Found(["| a table |"], ["too slow"]), 1),
        "Third": (lambda place, limit_s: gpu.Found(["all is well"]), 1)})
    out = tmp_path / "report.md"
    for sections, code in ((["First", "Second", "Third"], 1), (["Third"], 0)):
        assert main("--out", out, "--sections", *sections) == code
        report, said = out.read_text(), capsys.readouterr().out
        assert "all is well" in report
        for problem in ("First: ZeroDivisionError: of course", "Second: too slow"):
            assert (problem in said) == bool(code) and (problem.split(": ", 1)[1] in report) == bool(code)


def test_a_run_that_is_killed_leaves_what_it_has_and_says_what_is_missing(gpu, main, tmp_path, monkeypatch):
    out = tmp_path / "report.md"
    seen = []

    def looks(place, limit_s):
        seen.append(out.read_text())
        return gpu.Found([f"looked {len(seen)}"])

    def is_killed(place, limit_s):
        raise SystemExit(137)

    monkeypatch.setattr(gpu, "SECTIONS", {"First": (looks, 1), "Second": (looks, 1), "Third": (is_killed, 1),
                                          "Fourth": (looks, 1)})
    assert main("--out", out) == 137
    left = out.read_text()
    assert "looked 1" in left and "looked 2" in left and "tests, speed, streams and memory" in left
    for report, missing in zip([*seen, left], ["First, Second, Third, Fourth", "Second, Third, Fourth",
                                               "Third, Fourth"], strict=True):
        assert report.rstrip().endswith(f"**Not all of it: {missing} had not run when this was written.**")
    monkeypatch.setattr(gpu, "SECTIONS", {"First": (looks, 1)})
    assert main("--out", out) == 0
    assert "looked 3" in out.read_text() and "Not all of it" not in out.read_text()


@pytest.mark.parametrize("args, said", [
    (["--nnodes", "2", "--sections", "Memory"], "--sections Memory are of one node; with --nnodes name some of Step"),
    (["--nnodes", "2", "--node-rank", "2"], "--node-rank must be from 0 to --nnodes - 1, got 2")])
def test_sections_that_several_nodes_cannot_run_are_refused(args, said, main, tmp_path, capsys):
    assert main("--out", tmp_path / "report.md", *args) == 2
    assert said in capsys.readouterr().err


def test_all_sections_share_one_deadline(gpu, place, monkeypatch):
    clock, given = [1000.0], {}
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def takes(title, seconds):
        def section(place, limit_s):
            given[title] = limit_s
            clock[0] += min(seconds, limit_s)
            return gpu.Found([f"{title} was here"])
        return section

    whole = gpu.run(place, {"A": (takes("A", 50), 60), "B": (takes("B", 100), 60), "C": (takes("C", 1000), 90),
                            "D": (takes("D", 1), 90), "E": (takes("E", 1), 5)}, until=1150.0)
    assert given == {"A": 60, "B": 60, "C": 40} and clock == [1150.0]
    assert whole.problems == [f"{title}: TimeoutError: not run for want of time; --sections {title} runs it alone"
                              for title in "DE"]


def test_quick_calls_end_within_their_minutes(gpu):
    needed = {name: gpu.START_S + sum(limits.values()) for name, limits in gpu.QUICK.items()}
    assert needed["first"] + needed["second"] <= 600 and needed["node"] + gpu.ENDING_S < 600
    for limits in gpu.QUICK.values():
        assert limits.keys() <= gpu.SECTIONS.keys()
    # What is wrong comes before what is slow, and no speed before it.
    assert [*gpu.QUICK["first"]][:3] == ["First steps", "Waits", "Tests"] and [*gpu.QUICK["second"]][0] == "Streams"


@pytest.mark.parametrize("args, sections, seconds", [
    ([], None, None), (["--quick", "second"], ["Streams", "Memory", "Step", "Whole steps"], 310),
    (["--sections", "Waits", "Timer"], ["Waits", "Timer"], 120)])
def test_all_chosen_sections_have_their_time(args, sections, seconds, gpu, main, tmp_path, monkeypatch):
    given = {}

    def run(place, chosen, *, until, write):
        given.update({title: limit_s for title, (_, limit_s) in chosen.items()}, until=until)
        return gpu.Found()

    monkeypatch.setattr(gpu, "run", run)
    begun = time.monotonic()
    assert main("--out", tmp_path / "report.md", *args) == 0
    until = given.pop("until") - begun
    if sections is None:
        # One rank sends nothing.
        sections = [title for title in gpu.SECTIONS if title != "Ways"]
        seconds = gpu.START_S + sum(gpu.SECTIONS[title][1] for title in sections)
    assert [*given] == sections and sum(given.values()) == pytest.approx(seconds - gpu.START_S)
    assert seconds <= until < seconds + 30


@pytest.mark.parametrize("losses, problem", [
    ([3.0, 2.0], None), ([3.0, float("nan")], "a loss is not finite"), ([3.0, 3.0], "the loss does not fall"),
    ([3.0, 2.02], "a loss is 2.0e-02 off that of stage 1")])
def test_first_steps_are_finite_fall_and_are_alike_at_all_stages(losses, problem, gpu, place, monkeypatch):
    rows = [{"stage": 1, "losses": [3.0, 2.0], "ms": 1.0}, {"stage": 3, "losses": losses, "ms": 1.0}]
    monkeypatch.setattr(gpu, "on_ranks", lambda *_, **__: [rows[:1] * 2, rows])
    problems = gpu.first_steps(place, 1).problems
    assert len(problems) == (problem is not None)
    for said in problems:
        assert said.startswith(f"stage 3, rank 1: {problem}")


AGREES = "ds_layerwise/ranks/comm/step_agreement.py:71"


@pytest.mark.parametrize("where, number, is_wrong", [
    (AGREES, 1, False), (AGREES, 2, True),
    ("ds_layerwise/zero/step/clip.py:3", 1, True), ("deepspeed/runtime/zero/partition_parameters.py:84", 9, False)])
def test_a_second_wait_of_ours_is_a_problem(where, number, is_wrong, gpu, place, monkeypatch):
    row = {"stage": 2, "returned": 1.0, "done": 2.0, "waits": {where: number}}
    monkeypatch.setattr(gpu, "on_ranks", lambda *_, **__: [[row]])
    found = gpu.waits(place, 1)
    assert found.problems == [f"stage 2, rank 0: waits {number} times at {where}"] * is_wrong
    assert found.lines[-1] == f"| 2 | 0 | 1.00 | 2.00 | {where} x {number} |"


def test_waits_are_named_by_the_line_that_waits(place, monkeypatch):
    first = importlib.import_module("gpu_first")
    # What calls it is a file of the package.
    path = ROOT / "ds_layerwise" / "x.py"
    code = compile("def waits(accelerator):\n    accelerator.synchronize()", str(path), "exec")
    of_package = {}
    exec(code, of_package)
    accelerator = first.get_accelerator()
    with first.waits_counted(place) as found:
        of_package["waits"](accelerator)
        warnings.warn("called a synchronizing CUDA operation")
        warnings.warn("of something else")
    of_package["waits"](accelerator)
    assert found == {"ds_layerwise/x.py:2": 1, "torch": 1}


def test_a_device_is_busy_while_any_kernel_runs(gpu):
    first = importlib.import_module("gpu_first")
    assert first.busy_us(iter([(0.0, 2.0), (5.0, 6.0), (1.0, 3.0), (1.5, 2.5)])) == 4.0


def test_tests_find_packages_where_this_script_found_them(gpu, place, monkeypatch, tmp_path):
    given = {}

    class Started:
        returncode = 1

        def __init__(self, command, *, env, **_):
            given.update(env)

        def wait(self, timeout):
            return None

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", Started)
    gpu.tests(place, 1)
    assert given["PYTHONPATH"].split(os.pathsep) == [str(ROOT), str(tmp_path)]


def test_a_failed_or_skipped_test_is_a_problem(gpu):
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
    found = gpu.compare({"overlapped": first, "uncached": [{"stage 1": "a"}] * 2})
    assert not found.problems and found.lines[-1] == "| uncached | same bits | left out |"
    for key, setups in gpu.IMPOSSIBLE.items():
        assert any(key in env for _, _, env in gpu.VARIANTS.values())
        assert {*setups} <= importlib.import_module("gpu_ranks").SETUPS.keys()


@pytest.mark.parametrize("ranks, tiny, problems", [
    (1, False, ["big, rank 0: +3.00 % off what is predicted", "big: a step takes 2.10 % more than what it is said to "
                "work in"]),
    (2, False, [f"big, rank {rank}: +3.00 % off what is predicted" for rank in (0, 1)]), (1, True, [])])
def test_memory_is_what_is_held_and_on_one_rank_what_a_step_takes(gpu, place, monkeypatch, ranks, tiny, problems):
    job = {"job": "fits", "predicted": 10**9, "held": 10**9, "workspace": 10**8, "peak": 1.019 * 10**8}
    monkeypatch.setattr(gpu, "on_ranks", lambda place, work, limit_s: [[
        job, {**job, "job": "big", "held": 1.03 * 10**9, "peak": 1.021 * 10**8}, {**job, "job": "cpu", "peak": None},
    ]] * place.ranks)
    found = gpu.memory(type(place)("cuda", ranks, tiny), 60)
    assert found.problems == problems
    assert "| big | 0 | 1000.0 | 1030.0 | +3.00 % | 100.0 | 102.1 |" in found.lines


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


@pytest.mark.parametrize("spawns", [False, True])
def test_ranks_return_what_they_found(spawns, gpu, place, tmp_path):
    # A process that starts anew imports the work by its module's name.
    (tmp_path / "work_of_ranks.py").write_text("import os\n" + inspect.getsource(says_its_environment))
    sys.path.insert(0, str(tmp_path))
    try:
        work = importlib.import_module("work_of_ranks").says_its_environment
        assert gpu.on_ranks(dataclasses.replace(place, spawns=spawns), work, limit_s=300, env={
            "OF_THE_VARIANT": "1"}) == [["0", "2", "1"], ["1", "2", "1"]]
    finally:
        sys.path.remove(str(tmp_path))


def test_ranks_say_why_not(gpu, place):
    with pytest.raises(RuntimeError, match="(?s)a process ended with code.*only here"):
        gpu.on_ranks(place, fails_on_one_rank, limit_s=60)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="not done after 3 seconds"):
        gpu.on_ranks(place, sleeps, limit_s=3)
    assert time.monotonic() - start < 40


@pytest.mark.parametrize("hears, ending_s", [("the first", 60.0), ("none", 0.5)])
def test_tests_that_take_too_long_keep_what_they_have(gpu, place, tmp_path, monkeypatch, hears, ending_s):
    before_it_hangs = {"the first": "pass", "none": "signal.signal(signal.SIGINT, signal.SIG_IGN)"}
    started, ours = tmp_path / "started", tmp_path / "test_slow.py"
    ours.write_text("import pathlib, signal, time\nimport pytest\npytestmark = [pytest.mark.gpu, "
                    "pytest.mark.parametrize('_', ['2-2ranks-native'])]\n"
                    "def test_exact_passes(_):\n    pass\n"
                    "def test_exact_fails(_):\n    raise ZeroDivisionError('of course')\n"
                    "def test_exact_hangs(_):\n"
                    f"    {before_it_hangs[hears]}\n"
                    f"    pathlib.Path({str(started)!r}).write_text('x')\n    time.sleep(300)\n"
                    "def test_exact_waits(_):\n    pass\n")
    monkeypatch.setattr(gpu, "TESTS", str(ours))
    monkeypatch.setattr(gpu, "ENDING_S", ending_s)
    monkeypatch.setattr(subprocess, "Popen", impatient(started))
    # As a shell leaves it to what it has begun in the background.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        found = gpu.tests(place, 6)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    if hears == "none":
        assert found.problems[0] == "not done after 6 seconds" and "pytest ended with code -9" in found.problems[1]
        return
    assert found.lines[0] == "1 passed, 1 failed, 0 skipped."
    late, failed, missing = found.problems
    assert late == "not done after 6 seconds" and "ZeroDivisionError: of course" in failed
    assert missing == "2 not run to the end: test_exact_hangs[2-2ranks-native], test_exact_waits[2-2ranks-native]"


def impatient(started):
    """Popen whose first wait with a limit ends when ``started`` has been written."""

    class Impatient(subprocess.Popen):
        given_up = False

        def wait(self, timeout=None):
            until = time.monotonic() + 120
            while timeout is not None and not self.given_up and time.monotonic() < until:
                if started.exists() and started.read_text():
                    self.given_up = True
                    raise subprocess.TimeoutExpired(self.args, timeout)
                time.sleep(0.1)
            return super().wait(timeout)

    return Impatient
