"""Printed text reaches any stream, and never stops anything."""

import io
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ds_layerwise.output import announce, columns_of_terminal, progress, say
from tests.support.cli import Terminal
from tests.support.rooms import rooms

pytestmark = rooms("output")

ROOT = Path(__file__).parents[2]

TABLE = "┏━┳━┓\n┃a┃b┃\n┡━╇━┩\n│1│2│\n└─┴─┘ 2 × 3… √é"


def stream(encoding, errors="strict"):
    return io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors=errors)


def written(to):
    return to.buffer.getvalue().decode(to.encoding)


@pytest.mark.parametrize("encoding, errors, expected", [
    ("utf-8", "strict", TABLE),
    ("ascii", "strict", "+-+-+\n|a|b|\n+-+-+\n|1|2|\n+-+-+ 2 x 3~ ??"),
    ("ascii", "surrogateescape", "+-+-+\n|a|b|\n+-+-+\n|1|2|\n+-+-+ 2 x 3~ ??"),
    ("latin-1", "strict", "+-+-+\n|a|b|\n+-+-+\n|1|2|\n+-+-+ 2 x 3~ ?é"),
])
def test_a_character_that_the_encoding_lacks_is_replaced(encoding, errors, expected):
    to = stream(encoding, errors)
    assert say(TABLE, to) and written(to) == expected + "\n"


def test_a_stream_need_not_know_what_the_one_behind_it_takes():
    class Tee:
        def __init__(self, behind):
            self.write, self.flush = behind.write, behind.flush

    to = stream("ascii")
    assert say("│é│", Tee(to)) and written(to) == "|?|\n"


class Gone(io.StringIO):
    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")


class Full(io.StringIO):
    def write(self, text):
        raise OSError(28, "No space left on device")


def test_a_stream_that_is_gone_gets_nothing(monkeypatch):
    closed = stream("utf-8")
    closed.close()
    assert not say("text", closed) and not say("text", Gone())
    with pytest.raises(OSError, match="No space left"):
        say("text", Full())
    monkeypatch.setattr(sys, "stdout", None)
    assert not say("text")


@pytest.mark.parametrize("stdout", [None, Gone(), Full()])
def test_text_that_stdout_does_not_take_goes_to_stderr(stdout, monkeypatch):
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "stderr", stderr)
    announce("the table")
    assert stderr.getvalue() == "the table\n"
    monkeypatch.setattr(sys, "stderr", None)
    announce("the table")


class WithoutMethods:
    """A stream that has what print needs."""

    def write(self, text):
        raise AssertionError(text)


def drawn_on(to, monkeypatch, **options):
    """The text that a bar of two steps has written, after each of them."""
    monkeypatch.setattr(sys, "stderr", to)
    found = []
    with progress("write", 3_000_000, **options) as done:
        for _ in range(2):
            time.sleep(0.12)  # a bar is drawn ten times a second
            done(1_500_000)
            found.append(to.getvalue() if isinstance(to, io.StringIO) else "")
    return found


def test_progress_is_drawn_on_a_terminal(monkeypatch):
    half, all_of_it = drawn_on(Terminal(), monkeypatch)
    assert "write:  50%" in half and "1.50M/3.00M" in half and "100%" not in half and "3.00M/3.00M" in all_of_it


def test_progress_that_waits_is_not_drawn_before(monkeypatch):
    half, all_of_it = drawn_on(Terminal(), monkeypatch, delay=0.2)
    assert half == "" and "3.00M/3.00M" in all_of_it
    to = Terminal()
    assert drawn_on(to, monkeypatch, delay=60.0) == ["", ""] and to.getvalue() == ""


@pytest.mark.parametrize("to, options", [(Terminal(), {"quiet": True}), (io.StringIO(), {}), (WithoutMethods(), {}),
                                         (None, {})])
def test_progress_is_drawn_nowhere_else(to, options, monkeypatch):
    assert drawn_on(to, monkeypatch, **options) == ["", ""]


def test_progress_does_without_a_stream_that_is_closed(monkeypatch):
    to = stream("utf-8")
    to.close()
    monkeypatch.setattr(sys, "stderr", to)
    with progress("write", 3) as done:
        done(3)


@pytest.mark.parametrize("columns, most, width", [(80, 110, 80), (110, 110, 110), (200, 110, 110), (30, 110, 60)])
def test_a_terminal_has_a_width_and_nothing_else_has(columns, most, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert columns_of_terminal(most) == width
    closed = Terminal()
    closed.close()
    for other in (io.StringIO(), closed, None, object()):
        monkeypatch.setattr(sys, "stdout", other)
        assert columns_of_terminal(most) == most


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}, "optimizer": {"type": "LayerWiseMuon", '
                                      '"params": {"lr": 1e-3, "muon_lr": 0.02}}}')
    command = [sys.executable, "-m", "ds_layerwise.cli", "plan", "--model", "tests.support.model_specs:small",
               "--config", tmp_path / "ds.json", "--ranks", "1", "--verbose"]

    def run(shell="exec \"$@\"", **env):
        return subprocess.run(["bash", "-c", shell, "-", *map(str, command)], cwd=ROOT, capture_output=True,
                              env={**os.environ, **env}, timeout=120)
    return run


def test_plan_prints_in_every_locale(plan):
    done = plan(LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"matrix updates" in done.stdout and done.stdout.isascii()


def test_plan_without_a_reader(plan):
    done = plan("set -o pipefail; (sleep 0.01; \"$@\") | true")
    assert (done.returncode, done.stderr) == (0, b"")
    done = plan("\"$@\" >/dev/full")
    assert (done.returncode, done.stdout) == (2, b"") and b"No space left on device" in done.stderr.splitlines()[0]
