"""The harness, tested with itself, and by what a whole pytest session prints about tests that go wrong."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from datetime import timedelta
from pathlib import Path

import deepspeed.comm as dist
import pytest
import torch

from tests.support import harness
from tests.support.harness import DistributedTest, OwnDistributedTest
from tests.support.rooms import rooms

pytestmark = rooms("outside")

ROOT = Path(__file__).parents[3]
own_harness = pytest.mark.skipif("DEEPSPEED_CHECKOUT" in os.environ, reason="about this project's own harness")


class TestRanks(DistributedTest):
    world_size = [1, 2, 3]
    thorough_on = ()

    @pytest.fixture(params=["a", "b"])
    def letter(self, request):
        return request.param

    @pytest.mark.parametrize("number", [3])
    def test_every_rank_gets_fixtures_and_its_own_place(self, letter, number, tmp_path, not_a_fixture=5):
        assert letter in "ab" and number == 3 and not_a_fixture == 5
        rank, size = dist.get_rank(), dist.get_world_size()
        environment = {name: int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE")}
        assert environment == {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_SIZE": size}
        (tmp_path / str(rank)).touch()
        dist.barrier()
        assert sorted(p.name for p in tmp_path.iterdir()) == [str(r) for r in range(size)]

    def test_ranks_talk(self):
        total = torch.tensor([2.0 ** dist.get_rank()], device=harness.device())
        dist.all_reduce(total)
        assert total.item() == 2 ** dist.get_world_size() - 1

    @pytest.mark.world_size(4)
    def test_the_mark_overrides_the_class(self):
        assert dist.get_world_size() == 4


class TestMadeOnce(DistributedTest):
    world_size = [1, 2]
    thorough_on = ()

    @pytest.fixture
    def made(self, class_tmpdir):
        return harness.made_once(class_tmpdir / "made", [1, 2], self.make)

    def make(self, folder):
        # The second of these tests would fail here, if it made the folder again.
        (folder / f"rank {dist.get_rank()} of {dist.get_world_size()}").touch(exist_ok=False)

    @pytest.mark.parametrize("reader", ["one", "another"])
    def test_whichever_runs_first_finds_it(self, reader, made):
        assert sorted(p.name for p in made.iterdir()) == ["rank 0 of 1", "rank 0 of 2", "rank 1 of 2"]


def test_a_failed_fixture_is_tried_once_and_fails_every_test_that_asks(tmp_path):
    def make(folder):
        (folder / "tried").touch(exist_ok=False)
        raise ValueError("no space")

    for _ in range(2):
        with pytest.raises(pytest.fail.Exception, match="(?s)rank 0 of 1 failed first.*ValueError: no space"):
            harness.made_once(tmp_path / "made", [1], make)


class TestWithoutGroup(DistributedTest):
    init_distributed = False

    def test_the_group_is_the_tests_own_business(self):
        assert not torch.distributed.is_initialized()
        assert os.environ["MASTER_PORT"].isdigit()


@own_harness
def test_ranks_leave_nothing_behind(monkeypatch):
    # DeepSpeed's own start-up does: 66 MiB of shared memory a rank, for every run, named after the port.
    port = harness.free_port()
    monkeypatch.setattr(harness, "free_port", lambda: port)

    class Nothing(harness.OwnDistributedTest):
        backend = "gloo"

    # A run that was not one of ours may have had the same port, and its files stay until the machine restarts.
    before = set(os.listdir("/dev/shm"))
    harness.run_ranks(Nothing(), 2, dist.barrier, {})
    assert not [name for name in {*os.listdir("/dev/shm")} - before
                if name.startswith("deepspeed") and f"_{port}_" in name]


@own_harness
def test_a_free_port_is_a_servers_that_asks_for_it_and_nobody_elses():
    port = harness.free_port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    for use_libuv in (True, False):
        store = torch.distributed.TCPStore("127.0.0.1", port, 1, True, timedelta(seconds=60), use_libuv=use_libuv)
        store.set("key", "value")
        assert store.get("key") == b"value"
        del store
    assert len({harness.free_port() for _ in range(40)}) > 30


#: How long the child of a hanging rank sleeps; that of no other session on this machine sleeps as long.
SECONDS = f"12345.{os.getpid()}"
CHILD = f"sleep\0{SECONDS}\0".encode()

SESSION = '''
import os, signal, time
import deepspeed.comm as dist
import pytest, torch
from tests.support.harness import DistributedTest
from tests.support.versions import needs


class TestBad(DistributedTest):
    def test_rank_fails(self):
        if dist.get_rank() == 1:
            apples, pears = 3, 4
            assert apples == pears
        dist.barrier()

    def test_rank_is_killed(self):
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    def test_rank_exits(self):
        if dist.get_rank() == 0:
            os._exit(7)
        dist.barrier()

    def test_rank_skips(self):
        pytest.skip("not on this machine")

    def test_rank_warns(self):
        import warnings
        warnings.warn("something is off")

    @needs("pytest>=1", "a need that is met allows nothing")
    @pytest.mark.skip(reason="decided outside ranks")
    def test_skipped_by_mark(self):
        pass

    @pytest.mark.may_skip("known")
    @pytest.mark.skip(reason="decided outside ranks")
    def test_skipped_by_mark_and_allowed(self):
        pass

    @pytest.mark.parametrize("_", [pytest.param(1, marks=needs("pytest>=9999", "it is not out"))])
    def test_that_needs_another_release_is_skipped_and_allowed(self, _):
        assert False


class TestUneven(DistributedTest):
    collective_timeout = 6

    def test_one_collective_too_many(self):
        dist.all_reduce(torch.ones(3))
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(3))


class TestHangs(DistributedTest):
    world_size = [1, 2]
    thorough_on = ()
    exec_timeout = 6

    def test_hangs(self):
        if dist.get_rank() == dist.get_world_size() - 1:
            a_place_to_wait()


def a_place_to_wait():
    import subprocess
    subprocess.run(["sleep", "SECONDS"])
'''.replace("SECONDS", SECONDS)


def commands() -> list[bytes]:
    """The command line of every process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended since
            found.append(path.read_bytes())
    return found


def run_pytest(path: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "setup.cfg"), "--rootdir", str(ROOT),
               "-p", "tests.conftest", "-p", "no:cacheprovider", str(path), *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    folder = tmp_path_factory.mktemp("session")
    (folder / "test_bad.py").write_text(SESSION)
    result = run_pytest(folder / "test_bad.py", f"--junitxml={folder}/result.xml")
    cases = {}
    for case in ElementTree.parse(folder / "result.xml").iter("testcase"):
        outcome = [e for e in case if e.tag in ("failure", "error", "skipped")]
        if outcome:
            cases[case.get("name")] = (outcome[0].tag, outcome[0].text or "", float(case.get("time", 0)))
    return result, cases


@own_harness
@pytest.mark.parametrize("name, expected", [
    ("test_rank_fails[2ranks]", ["rank 1 of 2 failed first", "assert apples == pears", "assert 3 == 4"]),
    ("test_rank_is_killed[2ranks]", ["rank 1 of 2 failed first", "was killed by SIGKILL", "rank 0 then: "]),
    ("test_rank_exits[2ranks]", ["rank 0 of 2 failed first", "exited with code 7", "rank 1 then: "]),
    ("test_rank_skips[2ranks]", ["skipped inside a rank, where nobody would notice: not on this machine"]),
    ("test_rank_warns[2ranks]", ["UserWarning: something is off"]),
    ("test_one_collective_too_many[2ranks]", ["failed first", "imed out"]),
    ("test_hangs[1rank]", ["ranks [0] of 1 still ran after 6 s", "rank 0 is here", "in a_place_to_wait"]),
    ("test_hangs[2ranks]", ["ranks [0, 1] of 2 still ran after 6 s", "rank 1 is here", "in a_place_to_wait"]),
])
def test_a_failure_names_its_rank_and_place(session, name, expected):
    _, cases = session
    tag, text, seconds = cases[name]
    assert tag == "failure"
    for part in expected:
        assert part in text
    assert "harness.py" not in text.split("Error")[0].split("is here")[0]
    # No failure waits until a collective, or the test, has taken too long.
    assert seconds < OwnDistributedTest.collective_timeout


@own_harness
def test_a_hanging_rank_takes_its_children_with_it(session):
    # A killed process is there for a moment.
    until = time.monotonic() + 60
    while CHILD in commands() and time.monotonic() < until:
        time.sleep(0.1)
    assert CHILD not in commands()


@own_harness
def test_a_skipped_distributed_test_fails_the_session(session, tmp_path):
    result, cases = session
    assert cases["test_skipped_by_mark[2ranks]"][0] == "skipped"
    assert f"needs pytest>=9999, and {pytest.__version__} is installed: it is not out" in result.stdout
    summary = result.stdout.split("so this session fails")[1]
    assert "test_skipped_by_mark[2ranks]: mark it may_skip(reason) if that is meant" in summary
    assert "allowed" not in summary.split("short test summary")[0]
    # also if nothing else is wrong
    (tmp_path / "test_bad.py").write_text(SESSION)
    assert run_pytest(tmp_path / "test_bad.py", "-k", "skipped_by_mark and not allowed").returncode == 1


#: Like DeepSpeed's, it uses what pytest calls deprecated, which our setup.cfg makes an error.
CHECKOUT = '''
import os
import pytest
from _pytest.fixtures import FixtureFunctionMarker
class DistributedFixture:
    _pytestfixturefunction = FixtureFunctionMarker(scope="function", params=None)
class DistributedTest:
    is_dist_test = True
    @pytest.fixture(autouse=True, scope="class")
    def class_tmpdir(self, tmpdir_factory):
        return tmpdir_factory.mktemp(self.__class__.__name__)
    def __call__(self, request):
        assert int(os.environ["LOCAL_SIZE"]) >= 16
        (request.getfixturevalue("class_tmpdir") / "file").write_text("in a pathlib.Path")
        print("launched", request.function.__name__)
'''

SESSION_UNDER_CHECKOUT = '''
from tests.support.harness import DistributedTest
class TestIt(DistributedTest):
    def test_it(self):
        assert False
'''


def test_a_deepspeed_checkout_brings_its_own_harness(tmp_path, monkeypatch):
    (tmp_path / "tests" / "unit").mkdir(parents=True)
    (tmp_path / "tests" / "unit" / "__init__.py").touch()
    (tmp_path / "tests" / "unit" / "common.py").write_text(CHECKOUT)
    (tmp_path / "test_it.py").write_text(SESSION_UNDER_CHECKOUT)
    monkeypatch.setenv("DEEPSPEED_CHECKOUT", str(tmp_path))
    result = run_pytest(tmp_path / "test_it.py", "-s")
    assert "launched test_it" in result.stdout and result.returncode == 0, result.stdout + result.stderr
    with pytest.raises(FileNotFoundError, match="holds no tests/unit/common.py"):
        harness._checkout_distributed_test(str(tmp_path / "nowhere"))
