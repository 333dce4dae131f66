"""``ds-layerwise``: its arguments, its exit codes, its progress bars. What it does is tested in tests/distributed."""

import gc
import subprocess
import sys
from configparser import ConfigParser
from importlib import import_module
from pathlib import Path

import pytest

from ds_layerwise import __version__, cli
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.tools.dry_run import DryRun
from tests.support.cli import Terminal
from tests.support.rooms import rooms

pytestmark = rooms("cli")

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("argv, complaint", [
    ([], "COMMAND"),
    (["repair", "x"], "invalid choice: 'repair'"),
    (["to-universal", "in"], "OUT"),
    (["verify"], "PATH"),
    (["compare", "a", "b"], "invalid choice: 'compare'"),
    (["verify", "a", "--overwrite"], "unrecognized arguments: --overwrite"),
    (["verify", "a", "--workers", "0"], "--workers: must be a whole number from 1 on, got '0'"),
    (["verify", "a", "--workers", "two"], "--workers: must be a whole number from 1 on, got 'two'"),
    (["consolidate", "in", "out", "--dtype", "int8"], "invalid choice: 'int8'"),
    (["consolidate", "in", "out", "--max-shard-size", "5 parsecs"], "must be a size such as 500MB, 5GB or 2GiB"),
    (["consolidate", "in", "out", "--max-shard-size", "0"], "must be a size"),
])
def test_mistakes_are_named(argv, complaint, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(argv)
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("text, size", [("5GB", 5 * 10**9), ("2GiB", 2 * 2**30), ("500mb", 500 * 10**6), ("7", 7),
                                        ("1.5 KB", 1500), ("3T", 3 * 10**12), (None, 5 * 10**9)])
def test_sizes(text, size):
    argv = ["consolidate", "in", "out"] + (["--max-shard-size", text] if text else [])
    assert cli._parser().parse_args(argv).max_shard_size == size


@pytest.mark.parametrize("argv", [["to-universal", "in", "out"], ["verify", "in"],
                                  ["consolidate", "in", "out.safetensors"]])
def test_a_refusal_is_one_line_and_exit_code_2(argv, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "ds-layerwise: in is not a folder; give the folder of a checkpoint, or one with a file "
                              "named latest\n")
    assert not list(tmp_path.iterdir())


def test_a_plan_is_made_without_searches_for_garbage(monkeypatch):
    searched = []

    def refuse(*_, **__):
        searched.append(gc.isenabled())
        raise LayerWiseError("no plan")

    monkeypatch.setattr(DryRun, "of", refuse)
    assert cli.main(["plan", "--model", "gpt2-124m", "--config", "ds.json", "--ranks", "1"]) == 2
    assert searched == [False] and gc.isenabled()
    gc.disable()
    try:
        cli.main(["plan", "--model", "gpt2-124m", "--config", "ds.json", "--ranks", "1"])
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("pointer", ["latest", "latest_universal"])
@pytest.mark.parametrize("tag", ["", "gone", "\udcff\udcfe", "a\0b"])
def test_a_pointer_to_nothing_is_refused(pointer, tag, tmp_path, capsys):
    (tmp_path / pointer).write_text(tag, errors="surrogateescape")
    assert cli.main(["verify", str(tmp_path)]) == 2
    assert f"{tmp_path / pointer} names {tag!r}, and {tmp_path} has no such folder" in capsys.readouterr().err


def test_help_comes_without_torch():
    code = ("import sys; from ds_layerwise import cli; cli._parser(); "
            "print(sorted({'torch', 'deepspeed'} & {*sys.modules}))")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert (end.value.code, capsys.readouterr().out) == (0, f"{__version__}\n")


def test_the_script_that_pip_installs_is_this_one():
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    name, _, target = config["options.entry_points"]["console_scripts"].strip().partition(" = ")
    module, _, function = target.partition(":")
    assert name == "ds-layerwise" and getattr(import_module(module), function) is cli.main


@pytest.mark.parametrize("command", [["to-universal", "in", "out"], ["verify", "in"], ["consolidate", "in", "out"]])
def test_a_quiet_command_draws_no_bar(command, monkeypatch):
    for options, drawn in (([], True), (["--quiet"], False)):
        monkeypatch.setattr(sys, "stderr", Terminal())
        with cli._reading(cli._parser().parse_args([*command, *options])).bars("write", 2_000_000):
            assert bool(sys.stderr.getvalue()) is drawn
