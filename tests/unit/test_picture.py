"""``ds-layerwise plan --png``: what stands in the picture is what the plan says, and when there is none."""

import json
import sys

import pytest
from matplotlib.colors import to_hex

from ds_layerwise.checkpoint.files import atomic
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.tools import picture
from ds_layerwise.tools.dry_run import DryRun
from tests.support.cli import assert_refused, run
from tests.support.rooms import rooms

pytestmark = rooms("picture", "cli")

CONFIG = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1},
          "optimizer": {"type": "LayerWiseMuon", "params": {"lr": 1e-3, "muon_lr": 0.02}}}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    return path


def bars_of(axes):
    """By label, bottom and height of each bar; and what stands on the ticks below them."""
    axes.figure.canvas.draw()
    found = {container.get_label(): [(bar.get_y(), bar.get_height()) for bar in container]
             for container in axes.containers}
    return found, [tick.get_text() for tick in axes.get_xticklabels()]


def test_bars_are_the_numbers_of_the_plan(config):
    ranks = [1, 8, 64]
    plan = DryRun.of("gpt2-124m", config, ranks, links="pcie-ethernet")
    seconds, memory = picture.figure_of(plan.forecasts, plan.predictions).axes
    assert (seconds.get_ylabel(), memory.get_ylabel()) == ("ms", "GiB")
    assert "25 GB/s" in seconds.get_title() and "8 x" in seconds.get_title() and "fullest rank" in memory.get_title()
    bars, ticks = bars_of(seconds)
    assert ticks == ["1", "8", "64"] and list(bars) == ["reduce", "update", "gather"]
    for i, prediction in enumerate(plan.predictions):
        wire, low = prediction.wire, 0
        parts = [wire.reduce + wire.sums, prediction.update, wire.params + wire.gather]
        assert sum(parts) == prediction.total
        for label, part in zip(bars, parts, strict=True):
            assert bars[label][i] == pytest.approx((low, part / 1e6), abs=1e-9)
            low += part / 1e6
    bars, ticks = bars_of(memory)
    assert ticks == ["1", "8", "64"]
    assert list(bars) == ["parameters", "gradients", "masters", "states", "under way", "in an update"]
    for i, forecast in enumerate(plan.forecasts):
        held, low = max(forecast.memory, key=lambda rank: rank.total), 0
        parts = [held.params, held.grads, held.masters, held.states, max(t.total for t in forecast.traffic),
                 max(forecast.workspace)]
        for label, part in zip(bars, parts, strict=True):
            assert bars[label][i] == pytest.approx((low, part / 2**30), abs=1e-9)
            low += part / 2**30
        assert held.total == sum(parts[:4])
    for axes in (seconds, memory):
        totals = [f"{sum(bars[i][1] for bars in bars_of(axes)[0].values()):.3g}" for i in range(3)]
        assert [text.get_text() for text in axes.texts] == totals
        assert axes.get_xlabel() == "ranks" and len(axes.get_legend().get_texts()) == len(axes.containers)
        colours = [to_hex(container[0].get_facecolor()) for container in axes.containers]
        assert len(set(colours)) == len(colours)


@pytest.mark.parametrize("links, unit", [("tcp", "s"), ("pcie-ethernet", "ms")])
def test_units_suit_the_largest_bar(config, links, unit):
    plan = DryRun.of("gpt2-124m", config, [2], links=links)
    seconds, _ = picture.figure_of(plan.forecasts, plan.predictions).axes
    assert seconds.get_ylabel() == unit
    assert 1 <= float(seconds.texts[0].get_text()) < 1000


def arguments(config, *more):
    return ["plan", "--model", "gpt2-124m", "--config", config, "--ranks", "2,4", *more]


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_it_is_written_beside_what_is_said(config, tmp_path, form):
    out = tmp_path / "plan.png"
    code, said, err = run(*arguments(config, "--png", out, *form))
    assert (code, err) == (0, "") and (not form or len(json.loads(said)) == 2)
    assert out.read_bytes().startswith(b"\x89PNG\r\n") and sorted(p.name for p in tmp_path.iterdir()) == [
        "ds.json", "plan.png"]
    assert said == run(*arguments(config, *form))[1]
    before = out.read_bytes()
    assert_refused("plan.png exists; name another place, or replace it with --overwrite",
                   *arguments(config, "--png", out))
    out.write_text("another")
    assert run(*arguments(config, "--png", out, "--overwrite"))[0] == 0
    assert out.read_bytes() == before


def test_every_kind_of_nodes_is_in_the_title(config):
    plan = DryRun.of("gpt2-124m", config, [8, 12, 16])
    seconds, _ = picture.figure_of(plan.forecasts, plan.predictions).axes
    assert seconds.get_title().splitlines()[1:] == ["450 GB/s inside nodes of 8 ranks and 8 x 50 GB/s between them, or",
                                                    "1 x 50 GB/s between nodes with one of these ranks each"]


def test_what_cannot_be_drawn_is_refused_first(config, tmp_path, monkeypatch):
    monkeypatch.setattr(DryRun, "of", lambda *args, **kwargs: pytest.fail("planned for nothing"))
    assert_refused("is a folder; name a file", *arguments(config, "--png", tmp_path))
    for name in ("plan.txt", "plan", "plan.pdf"):
        assert_refused(f"--png writes PNG, and {tmp_path / name} is not called so; name it plan.png",
                       *arguments(config, "--png", tmp_path / name))
    assert_refused("nowhere is no folder; make it", *arguments(config, "--png", tmp_path / "nowhere" / "plan.png"))
    assert_refused("--overwrite is for what --png writes", *arguments(config, "--overwrite"))
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert_refused("--png takes matplotlib to draw", *arguments(config, "--png", tmp_path / "plan.png"))
    with pytest.raises(LayerWiseError, match=r"pip install matplotlib"):
        picture.check_picture(tmp_path / "plan.png", overwrite=False)


def test_a_disk_that_fails_leaves_nothing(config, tmp_path, monkeypatch):
    def fails(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic, "flush", fails)
    assert_refused("No space left", *arguments(config, "--png", tmp_path / "plan.png"))
    assert [path.name for path in tmp_path.iterdir()] == ["ds.json"]
