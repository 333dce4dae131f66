"""Check that what is committed here can be released: ``python -m tests.release``.

It prints a line for each check, and ends with 1 if one failed. The sdist is built from the commit, the wheel from the
sdist. The wheel is installed into an environment of its own, which has the packages that the wheel requires and no
others: links to those of the running environment, so that nothing is downloaded. There, away from the checkout, it
trains the quickstart's job, plans, and verifies the checkpoint. This takes some minutes on two cores, and a C++
compiler for DeepSpeed's operator for CPUs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Callable, Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement

from ds_layerwise import __version__
from tests.support.harness import free_port

ROOT = Path(__file__).parents[1]


class Failed(Exception):
    """A check failed, for the reason that is its text."""


def call(*command: object, cwd: Path, **env: str) -> str:
    """Run a command; return its stdout.

    Raises:
        Failed: the exit code is not 0.
    """
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=3000,
                          env={**os.environ, **env})
    if done.returncode:
        raise Failed(f"{' '.join(map(str, command))} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def tracked(under: str = ".") -> set[str]:
    """Return the committed files below a folder, by their paths in the checkout."""
    return set(call("git", "ls-tree", "-r", "--name-only", "HEAD", "--", under, cwd=ROOT).splitlines())


def newest_section(changelog: str) -> str:
    """Return the heading of the first section about a version. The section before it tells what a version promises."""
    return [line.removeprefix("## ") for line in changelog.splitlines() if line.startswith("## ")][1]


def section_of(version: str) -> str:
    """Return the heading that a version has in CHANGELOG.md."""
    return "Next" if ".dev" in version else version


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def compare(found: set[str], wanted: set[str], what: str) -> None:
    """Raise ``Failed`` where ``what`` lacks a file, or has one that it should not."""
    lines = [f"{what} lacks {name}" for name in sorted(wanted - found)]
    lines += [f"{what} has {name}, which is not committed" for name in sorted(found - wanted)]
    if lines:
        raise Failed("\n".join(lines[:5] + [f"and {len(lines) - 5} more"] * (len(lines) > 5)))


def needed(requirements: Iterable[str], find: Callable[[str], Distribution] = distribution) -> dict[str, Distribution]:
    """Return the installed packages of ``requirements``, and those that these require, by name.

    Raises:
        Failed: a package is not installed, or in another version.
    """
    packages: dict[str, Distribution] = {}
    todo = [(Requirement(text), "") for text in requirements]
    seen = set()
    while todo:
        requirement, extra = todo.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        try:
            installed = find(requirement.name)
        except PackageNotFoundError as e:
            raise Failed(f"{requirement} is not installed here") from e
        if not requirement.specifier.contains(installed.version, prereleases=True):
            raise Failed(f"{requirement} is {installed.version} here")
        packages[requirement.name] = installed
        for wanted in {"", *requirement.extras}:
            if (requirement.name, wanted) not in seen:
                seen.add((requirement.name, wanted))
                todo += [(Requirement(text), wanted) for text in installed.requires or ()]
    return packages


def for_python(script: bytes, python: Path) -> bytes:
    """Return a script that pip has installed, changed for another interpreter."""
    if not script.startswith(b"#!"):
        return script
    return b"#!%s\n%s" % (os.fsencode(python), script.partition(b"\n")[2])


def link(installed: Distribution, bare: Path) -> None:
    """Make an installed package importable in the environment ``bare``, with its commands."""
    site, = bare.glob("lib/python*/site-packages")
    for file in installed.files or ():
        path = Path(str(file.locate())).resolve()
        if path.parent == Path(sys.prefix, "bin").resolve():
            (bare / "bin" / path.name).write_bytes(for_python(path.read_bytes(), bare / "bin" / "python"))
            (bare / "bin" / path.name).chmod(0o755)
        elif file.parts[0] not in ("..", "__pycache__") and not (site / file.parts[0]).exists():
            (site / file.parts[0]).symlink_to(str(installed.locate_file(file.parts[0])))


def only(paths: Iterable[Path], what: str) -> Path:
    all_paths = [*paths]
    if len(all_paths) != 1:
        raise Failed(f"there is no {what}, or more than one")
    return all_paths[0]


def wheel_in(work: Path) -> Path:
    return only(work.glob("dist/*.whl"), "wheel")


def sdist_in(work: Path) -> Path:
    return only(work.glob("dist/*.tar.gz"), "sdist")


def source_in(work: Path) -> Path:
    return only(work.glob("sdist/*"), "unpacked sdist")


def run(work: Path, *command: object) -> str:
    """Run a command of the new environment, in an empty folder."""
    bare = work / "bare" / "bin"
    # Operators are built for one environment. Sharing the folder would build those of the running one again.
    return call(bare / str(command[0]), *command[1:], cwd=work / "empty", PYTHONPATH="", VIRTUAL_ENV=str(bare.parent),
                PATH=f"{bare}{os.pathsep}{os.environ['PATH']}", TORCH_EXTENSIONS_DIR=str(work / "operators"))


# --- the checks, in their order ---------------------------------------------------------------------------------------


def clean(work: Path) -> None:
    """Everything in the checkout is committed."""
    if lines := call("git", "status", "--porcelain", cwd=ROOT):
        raise Failed(lines)


def changelog(work: Path) -> None:
    """CHANGELOG.md names the version first, or Next before a release."""
    newest = newest_section((ROOT / "CHANGELOG.md").read_text())
    if newest != section_of(__version__):
        raise Failed(f"its newest section is {newest!r}, and __version__ is {__version__}")


def fixtures(work: Path) -> None:
    """tests/fixtures has checkpoints of the version."""
    if not (ROOT / "tests" / "fixtures" / minor(__version__)).is_dir():
        raise Failed(f"write tests/fixtures/{minor(__version__)} with tests/old_checkpoints.py")


def built(work: Path) -> None:
    """sdist and wheel are built."""
    (work / "commit").mkdir()
    call("git", "archive", "--output", work / "commit.tar", "HEAD", cwd=ROOT)
    unpack(work / "commit.tar", work / "commit")
    build = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
    call(sys.executable, "-c", build, "build_sdist", work / "dist", cwd=work / "commit", PYTHONPATH="")
    unpack(sdist_in(work), work / "sdist")
    call(sys.executable, "-c", build, "build_wheel", work / "dist", cwd=source_in(work), PYTHONPATH="")
    for path in (sdist_in(work), wheel_in(work)):
        if not path.name.startswith((f"ds_layerwise-{__version__}-", f"ds_layerwise-{__version__}.tar")):
            raise Failed(f"{path.name} is not of version {__version__}")


def unpack(archive: Path, into: Path) -> None:
    with tarfile.open(archive) as file:
        file.extractall(into, filter="data")


def sdist_is_whole(work: Path) -> None:
    """The sdist has every committed file but hidden ones."""
    with tarfile.open(sdist_in(work)) as sdist:
        found = {member.name.partition("/")[2] for member in sdist if member.isfile()}
    made = {name for name in found if name == "PKG-INFO" or name.startswith("ds_layerwise.egg-info/")}
    compare(found - made, {name for name in tracked() if not name.startswith(".")}, "the sdist")


def wheel_is_whole(work: Path) -> None:
    """The wheel has every module, py.typed and every data file, and nothing else."""
    with ZipFile(wheel_in(work)) as wheel:
        found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    compare(found, tracked("ds_layerwise"), "the wheel")


def installed(work: Path) -> None:
    """The wheel is installed in a bare environment, with its requirements alone."""
    bare = work / "bare"
    venv.create(bare, with_pip=True)
    (work / "empty").mkdir()
    with ZipFile(wheel_in(work)) as wheel:
        metadata = wheel.read(next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))).decode()
    head = metadata.partition("\n\n")[0].splitlines()
    for package in needed(line.partition(": ")[2] for line in head if line.startswith("Requires-Dist: ")).values():
        link(package, bare)
    run(work, "python", "-m", "pip", "install", "--no-index", "--disable-pip-version-check", wheel_in(work))
    printed = run(work, "python", "-c", "import ds_layerwise; print(ds_layerwise.__version__, ds_layerwise.__file__)")
    version, _, path = printed.strip().partition(" ")
    if version != __version__ or not Path(path).is_relative_to(bare):
        raise Failed(f"version {version} is imported from {path}")


def quickstart(work: Path) -> None:
    """The quickstart's job trains there."""
    source = source_in(work)
    run(work, "deepspeed", "--num_accelerators", 2, "--master_port", free_port(), source / "examples/train_gpt.py",
        "--deepspeed_config", source / "ds_configs/quickstart.json", "--out", "out", "--steps", 20, "--layers", 2)


def plans(work: Path) -> None:
    """ds-layerwise plan takes a model of one's own there, without transformers."""
    config = source_in(work) / "ds_configs/quickstart.json"
    model = "from torch import nn\n\n\ndef build():\n    return nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8))\n"
    (work / "empty" / "own_model.py").write_text(model)
    out = run(work, "ds-layerwise", "plan", "--model", "own_model:build", "--config", config, "--ranks", 2, "--json")
    if '"elements": 2344' not in out:
        raise Failed(out)


def verifies(work: Path) -> None:
    """ds-layerwise verify finds the quickstart's checkpoint whole."""
    out = run(work, "ds-layerwise", "verify", "out/checkpoint")
    if not out.endswith("\nok\n"):
        raise Failed(out)


CHECKS = (clean, changelog, fixtures, built, sdist_is_whole, wheel_is_whole, installed, quickstart, plans, verifies)


def main() -> int:
    """Make all checks; returns the exit code."""
    code = 0
    with tempfile.TemporaryDirectory() as name:
        for check in CHECKS:
            try:
                check(Path(name))
            except (Failed, OSError, subprocess.SubprocessError) as e:
                print(f"FAILED  {check.__doc__}\n        " + str(e).strip().replace("\n", "\n        "), flush=True)
                code = 1
            else:
                print(f"ok      {check.__doc__}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
