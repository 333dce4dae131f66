"""The parts of the release checklist that start nothing; ``python -m tests.release`` is the rest."""

import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import release
from tests.release import Failed
from tests.support.rooms import rooms

pytestmark = rooms("outside")


def test_the_changelog_is_about_this_version():
    release.changelog(Path())
    release.fixtures(Path())


def test_the_version_stands_once():
    for name in ("README.md", "docs/index.md", "pyproject.toml"):
        assert not re.search(r"^(version\b|.*\bVersion \d)", (release.ROOT / name).read_text(), re.MULTILINE), name
    assert "version = attr: ds_layerwise.__version__\n" in (release.ROOT / "setup.cfg").read_text()


@pytest.mark.parametrize("section, fails", [("Next", True), ("0.2.0", False)])
def test_a_changelog_without_the_version(section, fails, tmp_path, monkeypatch):
    text = f"# Changelog\n\n## What a version promises\n\n## {section}\n\n* new\n\n## 0.1.0\n"
    (tmp_path / "CHANGELOG.md").write_text(text)
    monkeypatch.setattr(release, "ROOT", tmp_path)
    monkeypatch.setattr(release, "__version__", "0.2.0")
    if fails:
        with pytest.raises(Failed, match="its newest section is 'Next', and __version__ is 0.2.0"):
            release.changelog(tmp_path)
    else:
        release.changelog(tmp_path)
    with pytest.raises(Failed, match="write tests/fixtures/0.2 with tests/old_checkpoints.py"):
        release.fixtures(tmp_path)


def test_files_are_compared_both_ways():
    release.compare({"a", "b"}, {"b", "a"}, "the wheel")
    with pytest.raises(Failed) as caught:
        release.compare({"a", "c"}, {"a", "b"}, "the wheel")
    assert str(caught.value) == "the wheel lacks b\nthe wheel has c, which is not committed"
    with pytest.raises(Failed, match="lacks a\n(.*\n){4}and 2 more$"):
        release.compare(set(), {*"abcdefg"}, "the wheel")


INSTALLED = {
    "torch": SimpleNamespace(version="2.13.0+cpu", requires=["sympy>=1", 'windows; sys_platform == "win32"']),
    "sympy": SimpleNamespace(version="1.14", requires=["torch", 'tests-of-sympy; extra == "test"']),
    "peft": SimpleNamespace(version="0.9", requires=['hub; extra == "net"']),
    "hub": SimpleNamespace(version="1.0rc1", requires=None),
}


def find(name):
    if name not in INSTALLED:
        raise PackageNotFoundError(name)
    return INSTALLED[name]


@pytest.mark.parametrize("requirements, names", [
    (["torch>=2.6"], {"torch", "sympy"}), (["peft"], {"peft"}), (["peft[net]"], {"peft", "hub"}),
    (["hub>=0.9", 'peft; extra == "hf"'], {"hub"})])
def test_requirements_need_these_distributions(requirements, names):
    assert release.needed(requirements, find) == {name: INSTALLED[name] for name in names}


@pytest.mark.parametrize("requirement, message", [
    ("numpy", "numpy is not installed here"), ("sympy[test]", 'tests-of-sympy; extra == "test" is not installed here'),
    ("torch<2.13", r"torch<2.13 is 2.13.0\+cpu here")])
def test_a_missing_requirement_is_named(requirement, message):
    with pytest.raises(Failed, match=message):
        release.needed([requirement], find)


def test_the_list_and_the_exit_code(monkeypatch, capsys):
    def good(work):
        """This is so."""
        assert work.is_dir()

    def bad(work):
        """The section is complete."""
        raise Failed("it\nis not")

    def missing(work):
        """The file is there."""
        (work / "file").read_text()

    monkeypatch.setattr(release, "CHECKS", (good, ))
    assert release.main() == 0 and capsys.readouterr().out == "ok      This is so.\n"
    monkeypatch.setattr(release, "CHECKS", (bad, missing, good))
    assert release.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["FAILED  The section is complete.", "        it", "        is not"]
    assert lines[3] == "FAILED  The file is there." and "No such file" in lines[4]
    assert lines[5:] == ["ok      This is so."]
