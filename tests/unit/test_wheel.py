"""The wheel that pip installs, built and put into a folder of its own, away from the checkout."""

import json
import sys
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

from ds_layerwise import __version__
from tests.release import call
from tests.support.rooms import rooms

pytestmark = rooms("outside")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    # Building writes beside the sources.
    copytree(ROOT / "ds_layerwise", folder / "source" / "ds_layerwise", ignore=ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md"):
        (folder / "source" / name).write_bytes((ROOT / name).read_bytes())
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
    call(*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder, folder / "source", cwd=folder)
    wheel, = folder.glob("*.whl")
    call(*pip, "install", "--no-deps", "--no-index", "--target", folder / "site", wheel, cwd=folder)
    return folder / "site"


def test_everything_that_is_no_code_is_in_it(installed):
    def others(package):
        return {str(path.relative_to(package)) for path in package.rglob("*")
                if path.is_file() and path.suffix not in (".py", ".pyc")}

    carried = others(installed / "ds_layerwise")
    assert carried == others(ROOT / "ds_layerwise") >= {"py.typed", "tools/models/gpt2-124m.json"}


def test_the_wheel_has_the_version_of_the_package(installed):
    assert [path.name for path in installed.glob("*.dist-info")] == [f"ds_layerwise-{__version__}.dist-info"]


def test_the_installed_command_finds_its_models(installed, tmp_path):
    (tmp_path / "ds.json").write_bytes((ROOT / "ds_configs" / "quickstart.json").read_bytes())
    out = call(installed / "bin" / "ds-layerwise", "plan", "--model", "gpt2-124m", "--config", "ds.json", "--ranks",
               "2", "--json", cwd=tmp_path, PYTHONPATH=str(installed))
    assert json.loads(out)[0]["elements"] == 124_439_808
    where = call(sys.executable, "-c", "import ds_layerwise; print(ds_layerwise.__file__)", cwd=tmp_path,
                 PYTHONPATH=str(installed))
    assert Path(where.strip()).is_relative_to(installed)
