"""The examples' data, model and configurations; the runs themselves are distributed tests."""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ds_layerwise.config.sections import LayerWiseConfig, OptimizerConfig, is_ours
from tests.support.rooms import rooms
from tests.support.versions import needs

pytestmark = rooms("outside")

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "ds_configs").glob("*.json"))


def load_example(name: str) -> ModuleType:
    # by file: `data` and `model` are names of the examples folder, not of anything installed
    spec = importlib.util.spec_from_file_location(f"examples_{name}", ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


data, model = load_example("data"), load_example("model")

TOKENS = torch.arange(200, dtype=torch.uint8)


def windows(first: int, size: int = 2, seed: int = 0) -> torch.Tensor:
    return data.training_windows(TOKENS, seed=seed, first=first, size=size, context=8)


def test_the_default_corpus_is_python_source_and_always_the_same():
    first, second = data.load_corpus(None, 128), data.load_corpus(None, 128)
    assert torch.equal(first.train, second.train) and torch.equal(first.validation, second.validation)
    assert len(first.train) > 1_000_000
    assert b"def " in bytes(first.validation.tolist())


def test_a_folder_is_read_in_the_order_of_its_paths_and_every_twentieth_file_held_out(tmp_path):
    for i in reversed(range(20)):
        (tmp_path / f"{i % 2}").mkdir(exist_ok=True)
        (tmp_path / f"{i % 2}" / f"{i:02}.txt").write_bytes(bytes([i]) * 8)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "index").write_bytes(b"hidden")
    corpus = data.load_corpus(str(tmp_path), 4)
    assert corpus.train[::8].tolist() == [*range(0, 20, 2), *range(1, 19, 2)]
    assert corpus.validation.tolist() == [19] * 8


def test_two_ranks_see_what_one_rank_with_twice_the_batch_sees():
    assert torch.equal(torch.cat([windows(4, size=2), windows(6, size=2)]), windows(4, size=4))


def test_ranks_share_the_validation_windows_between_them():
    def starts(rank: int, world_size: int) -> list[int]:
        parts = data.validation_windows(TOKENS, rank=rank, world_size=world_size, size=4, context=8, total=9)
        return [start for part in parts for start in part[:, 0].tolist()]

    alone = starts(0, 1)
    assert len(alone) == 9 and (alone[0], alone[-1]) == (0, 191)  # the last window ends with the last byte
    assert sorted(starts(0, 2) + starts(1, 2)) == alone


@pytest.mark.parametrize("make, message", [
    (lambda path: None, "no such file or folder"),
    (lambda path: path.mkdir(), "holds no files"),
    (lambda path: path.write_bytes(b""), "0 bytes left for training, one window takes 17"),
    (lambda path: path.write_bytes(b"x" * 320), "16 bytes left for validation, one window takes 17"),
])
def test_a_path_without_enough_text_is_an_error_that_names_it(tmp_path, make, message):
    path = tmp_path / "corpus"
    make(path)
    with pytest.raises(ValueError, match=message) as error:
        data.load_corpus(str(path), 16)
    assert str(path) in str(error.value)


def small_gpt(**options: object) -> torch.nn.Module:
    return model.GPT(model.GPTConfig(layers=2, width=16, heads=2, context=8, **options))


def test_the_model_does_not_look_ahead():
    gpt, tokens = small_gpt(), torch.arange(8)[None]
    changed = tokens.clone()
    changed[0, 5] = 99
    before, after = gpt(tokens)[0], gpt(changed)[0]
    torch.testing.assert_close(before[:5], after[:5])
    assert not torch.allclose(before[5:], after[5:])


#: What Hugging Face puts in the place of "auto".
FILLED_IN = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_parses(path):
    config = json.loads(path.read_text())
    params = config["optimizer"]["params"]
    params.update({key: FILLED_IN[key] for key, value in params.items() if value == "auto"})
    assert config["optimizer"]["type"] in ("AdamW", "Muon") or is_ours(config["optimizer"]["type"])
    if is_ours(config["optimizer"]["type"]):
        OptimizerConfig.from_section(config["optimizer"])
        LayerWiseConfig.from_section(config.get("layerwise", {}))


def test_every_override_matches_a_parameter_of_the_model():
    names = [name for name, _ in small_gpt().named_parameters()]
    overrides = json.loads((ROOT / "ds_configs" / "overrides.json").read_text())["layerwise"]["overrides"]
    for override in overrides:
        assert fnmatch.filter(names, override["name"]), override


def test_comparing_runs_the_best_rate_with_more_seeds(monkeypatch, tmp_path, capsys):
    compare, asked = load_example("compare_optimizers"), []

    def run(config, factor, seed, args, rest):
        asked.append((config.stem, factor, seed))
        return {"config": f"{config.stem} {factor} {seed}", "optimizer": "X", "clipping": None, "rate": 0.1 * factor,
                "seed": seed, "train_loss": 1.0, "validation_bits_per_byte": abs(factor - 2) + seed,
                "ms_per_step": 10.0, "checkpoint_bytes": 2e6}

    monkeypatch.setattr(compare, "run", run)
    monkeypatch.setattr(compare, "write_plot", lambda curves, out: None)
    configs = [str(ROOT / "ds_configs" / f"{name}.json") for name in ("soap", "normuon")]
    monkeypatch.setattr(sys, "argv", ["compare", *configs, "--rates", "1", "2", "4", "--seeds", "3", "--out",
                                      str(tmp_path)])
    compare.main()
    assert asked == [(name, *way) for name in ("soap", "normuon")
                     for way in ((1.0, 0), (2.0, 0), (4.0, 0), (2.0, 1), (2.0, 2))]
    assert "| soap | 0.2 | 1.000 ± 1.000 | 10 | 2.0 |" in capsys.readouterr().out


@pytest.mark.parametrize("name, key, rate", [("stock_adamw", "lr", 3e-3), ("stock_muon", "muon_lr", 0.02),
                                             ("normuon", "muon_lr", 0.02), ("soap", "muon_lr", 3e-3)])
def test_comparing_multiplies_the_rate_of_matrices_alone(name, key, rate):
    compare = load_example("compare_optimizers")
    settings = json.loads((ROOT / "ds_configs" / f"{name}.json").read_text())
    params = settings["optimizer"]["params"]
    changed, found = compare.with_rate(settings, 3.0)
    assert found == pytest.approx(3 * rate)
    assert changed == {**settings, "optimizer": {**settings["optimizer"], "params": {**params, key: found}}}
    assert compare.with_rate(settings, 1.0) == (settings, rate)


def test_the_benchmark_of_checkpoints_runs_and_what_it_loads_comes_back():
    script = ROOT / "examples" / "benchmarks" / "checkpoints.py"
    done = subprocess.run([sys.executable, str(script), "--small"], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = done.stdout[done.stdout.index("0.1 M parameters, fp32"):].splitlines()
    assert any("ZeRORuntimeException" in line and "DP world size of 3" in line for line in report)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in report if line.startswith("| ")]
    assert [row[0] for row in cells[1:]] == ["to-universal", "save", "save and fsync", "load", "reshard",
                                             "load universal"]


@pytest.mark.parametrize("command, rows", [
    ("step_overhead.py --times 1", 5), ("dispatches.py", 4),
    pytest.param("optimizer_part.py --small --ranks 2 --rounds 1", 11,
                 marks=needs("deepspeed>=0.19.8", "its Muon does not say its dtype")),
], ids=lambda value: str(value).split(".")[0])
def test_other_benchmarks_run(command, rows):
    script, *args = command.split()
    done = subprocess.run([sys.executable, str(ROOT / "examples" / "benchmarks" / script), *args], capture_output=True,
                          text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert sum(line.startswith("| ") for line in done.stdout.splitlines()) >= rows


def test_the_benchmark_of_memory_runs_and_predictions_hold():
    script = ROOT / "examples" / "benchmarks" / "memory.py"
    done = subprocess.run([sys.executable, str(script), "--small"], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()
            if line.startswith("| stage")]
    assert [row[:2] for row in rows] == [[f"stage-{stage}-bf16", rank] for stage in "23" for rank in "01"]
    # Tensors are what is held, and buffers of transfers.
    assert all(float(row[2]) <= float(row[3]) <= float(row[2]) + float(row[5]) + 0.1 for row in rows)
