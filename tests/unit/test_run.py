"""The runner hands a script what it would have got without it."""

import atexit
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ds_layerwise.run import main_and_leave
from tests.support.rooms import rooms

pytestmark = rooms("run", "process_exit")

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
import neighbour
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
print(__name__, sys.argv, "layerwisemuon" in DEEPSPEED_OPTIMIZERS, neighbour.__name__)
"""


def run(*args, cwd=ROOT):
    return subprocess.run([sys.executable, "-m", "ds_layerwise.run", *args], cwd=cwd, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300)


@pytest.mark.parametrize("as_module", [False, True])
def test_a_script_sees_its_own_arguments_and_neighbours(as_module, tmp_path):
    (tmp_path / "neighbour.py").write_text("")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    target = ["-m", "script"] if as_module else [str(script)]
    # The launcher of DeepSpeed puts its own argument before everything else.
    done = run("--local_rank=3", *target, "--steps", "2", cwd=tmp_path)
    last = done.stdout.strip().splitlines()[-1]
    assert last == f"__main__ {[str(script), '--local_rank=3', '--steps', '2']} True neighbour", done.stderr


@pytest.mark.parametrize("args", [[], ["--local_rank=0"], ["-m"], ["--unknown", "x.py"]])
def test_nothing_to_run_is_a_usage_error(args):
    done = run(*args)
    assert done.returncode != 0 and "usage: python -m ds_layerwise.run" in done.stderr


GROUP = """
import sys, torch
from torch import distributed
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
"""
#: How a script ends: its last lines, the exit code, and whether its group was there when all was done.
ENDINGS = {
    "": (0, False), "sys.exit()": (0, False), "sys.exit(0)": (0, False), "sys.exit(3)": (3, True),
    "sys.exit('a message')": (1, True), "1 / 0": (1, True), "distributed.destroy_process_group()": (0, False),
    "import atexit\natexit.register(lambda: (distributed.barrier(), distributed.destroy_process_group()))": (0, False),
    "import atexit\natexit.register(distributed.barrier)": (0, False),
}


def ends(script, left, said):
    """A process of its own from here on: run the script, then what an interpreter does at its end."""
    atexit._clear()
    sys.stderr = open(said, "w")
    leave_for_good = os._exit

    def leaving(code):
        left.write_text(str(torch.distributed.is_initialized()))
        leave_for_good(code)

    os._exit = leaving
    code = 0
    try:
        main_and_leave([str(script)])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except ZeroDivisionError:
        code = 1
    sys.stderr.flush()
    leaving(code)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_finished_script_leaves_no_process_group(ending, tmp_path):
    script, left, said = (tmp_path / name for name in ("script.py", "left", "said"))
    script.write_text(GROUP + ending)
    process = multiprocessing.get_context("fork").Process(target=ends, args=(script, left, said))
    process.start()
    process.join(120)
    code, open_at_the_end = ENDINGS[ending]
    assert (process.exitcode, left.read_text()) == (code, str(open_at_the_end))
    assert "Exception" not in said.read_text() and "Error" not in said.read_text()


LAST_THINGS = """
import atexit, pathlib, sys, threading, time
folder = pathlib.Path(sys.argv[1])

class TakenApart:
    def __del__(self, write=sys.stderr.write):
        write("taken apart")

sys.kept_to_the_end = TakenApart()

def later():
    time.sleep(0.3)
    atexit.register((folder / "registered").touch)
    (folder / "thread").touch()

threading.Thread(target=later).start()
sys.stdout.write("no line yet")
"""


def test_all_that_a_script_left_to_do_is_done_but_nothing_is_taken_apart(tmp_path):
    (tmp_path / "script.py").write_text(LAST_THINGS)
    done = run(str(tmp_path / "script.py"), str(tmp_path))
    assert done.returncode == 0 and done.stdout.endswith("no line yet"), done.stderr
    assert "taken apart" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["registered", "script.py", "thread"]


WRITES = """
import csv, ctypes, gc, os, sys, tempfile
c = ctypes.CDLL(None)
c.fopen.restype = ctypes.c_void_p
frozen = open("frozen", "w")
gc.freeze()
text, data, update, rows = open("text", "w"), open("data", "wb"), open("update", "w+b"), csv.writer(open("rows", "w"))
temporary = tempfile.NamedTemporaryFile("w", dir=".", delete=False)
os.rename(temporary.file.name, "temporary")
of_c = ctypes.c_void_p(c.fopen(b"of_c", b"w"))
def main():
    for i in "01234":
        for file in (frozen, text, temporary):
            file.write(i)
        for file in (data, update):
            file.write(i.encode())
        rows.writerow(i)
        c.fputs(i.encode(), of_c)
main()
"""


@pytest.mark.parametrize("ending", ["", "import atexit; gc.unfreeze(); atexit.register(gc.collect)",
                                    "from ds_layerwise.run import leave; leave()"])
def test_text_in_files_that_a_script_left_open_is_written(ending, tmp_path):
    (tmp_path / "script.py").write_text(WRITES + ending)
    done = run(str(tmp_path / "script.py"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "rows").read_text().split() == list("01234")
    names = ("text", "data", "update", "temporary", "frozen", "of_c")
    assert [(tmp_path / name).read_text() for name in names] == ["01234"] * len(names)


def test_memory_that_somebody_looks_into_and_files_without_a_name_do_not_fail_a_finished_run(tmp_path):
    (tmp_path / "script.py").write_text("""
import io, sys
class Remote(io.RawIOBase):
    def writable(self): return True
    def write(self, data): raise OSError("no connection")
    def flush(self): raise RuntimeError("no connection")
looked_into, log = io.BytesIO(b"x"), open(sys.argv[1] + "/log", "w")
view, remote = looked_into.getbuffer(), io.TextIOWrapper(io.BufferedWriter(Remote()))
remote.write("x")
log.write("x")
""")
    done = run(str(tmp_path / "script.py"), str(tmp_path))
    assert (done.returncode, (tmp_path / "log").read_text()) == (0, "x"), done.stderr
    assert "could not be written at the end: no connection" in done.stderr
    assert "BufferError" not in done.stderr


def test_a_file_that_cannot_be_written_at_the_end_is_told_and_takes_no_other_along(tmp_path):
    (tmp_path / "script.py").write_text("""
import io, subprocess, sys
full, there = open("/dev/full", "w"), open(sys.argv[1] + "/log", "w")
pipe = subprocess.Popen(["true"], stdin=subprocess.PIPE, text=True)
pipe.wait()
class Proxy:
    __class__ = property(lambda self: 1 / 0)
proxy, detached = Proxy(), io.TextIOWrapper(io.BytesIO())
detached.detach()
for file in (full, there, pipe.stdin):
    file.write("x")
""")
    done = run(str(tmp_path / "script.py"), str(tmp_path))
    assert (done.returncode, (tmp_path / "log").read_text()) == (0, "x"), done.stderr
    assert done.stderr.count("could not be written at the end") == 1, done.stderr
    assert "'/dev/full' could not be written at the end: [Errno 28]" in done.stderr


def test_output_that_nobody_can_read_is_the_interpreters_own_error(tmp_path):
    (tmp_path / "script.py").write_text("print('x')")
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "ds_layerwise.run", str(tmp_path / "script.py")], cwd=ROOT,
                              stdout=full, timeout=300,
                              env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""})
    assert done.returncode == 120
