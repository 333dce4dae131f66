"""The examples' data, model and configurations; the runs themselves are distributed tests."""

from __future__ import annotations

import csv
import fnmatch
import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

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


def test_the_source_of_packages_beside_torch_is_a_corpus(tmp_path, monkeypatch):
    for name in ("torch/__init__.py", "a/b.py", "a/tests/c.py", "a/d.txt", "e.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode() * 9)
    (tmp_path / "folder.py").mkdir()
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    corpus = data.load_corpus(data.INSTALLED, 4)
    text = bytes(torch.cat((corpus.train, corpus.validation)).tolist())
    assert text == b"a/b.py" * 9 + b"e.py" * 9 + b"torch/__init__.py" * 9
    assert corpus.source == "3 source files of installed packages"


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


def autos(section, prefix=""):
    return {found for key, value in section.items() for found in (
        autos(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"] * (value == "auto"))}


@pytest.mark.parametrize("name", ["hf_auto", "hf_stage3"])
def test_all_that_a_trainer_fills_in_is_auto(name):
    keys = set()

    class Asked(HfTrainerDeepSpeedConfig):
        def fill_match(self, key, *_, **__):
            keys.add(key)

        fill_only = fill_match

    given = json.loads((ROOT / "ds_configs" / f"{name}.json").read_text())
    arguments = MagicMock(**{"get_warmup_steps.return_value": 1})
    asked = Asked(given)
    asked.trainer_config_process(arguments)
    asked.trainer_config_finalize(arguments, SimpleNamespace(config=SimpleNamespace(hidden_size=8)), 10)
    assert "scheduler.params.warmup_max_lr" in keys
    assert autos(given) == {key for key in keys if key.split(".")[0] in given}


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


@pytest.fixture
def compare(monkeypatch):
    # The script asks train_gpt.py for its options, which it finds beside it.
    for name, module in (("data", data), ("model", model)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "train_gpt", load_example("train_gpt"))
    return load_example("compare_optimizers")


def comparing(compare, monkeypatch, *argv: object) -> int:
    monkeypatch.setattr(sys, "argv", ["compare", *map(str, argv)])
    return compare.main()


def ended(config: Path, factor: float, seed: int, **changes: object) -> dict[str, object]:
    return {"config": f"{config.stem} {factor} {seed}", "optimizer": "X", "clipping": None, "rate": 0.1 * factor,
            "seed": seed, "exit_code": 0, "tokens": 100, "seconds": 2.0, "train_loss": 1.0,
            "validation_bits_per_byte": abs(factor - 2) + seed, "tokens_per_s": 1000.0 + seed, "ms_per_step": 10.0,
            "memory_gib": 0.5 + seed, "checkpoint_bytes": 0, **changes}


def write_metrics(folder: Path, *rows: tuple[float, float, float]) -> None:
    """Steps of ten, with tokens, seconds and losses."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{10 * (1 + number)},{','.join(map(str, row))}" for number, row in enumerate(rows)]
    (folder / "metrics.csv").write_text("\n".join(["step,tokens,seconds,train_loss", *lines]))


def test_comparing_runs_the_best_rate_with_more_seeds(compare, monkeypatch, tmp_path, capsys):
    asked = []

    def run(config, factor, seed, args, rest):
        asked.append((config.stem, factor, seed))
        write_metrics(args.out / f"{config.stem} {factor} {seed}", (100, 2.0, 1.0))
        return ended(config, factor, seed)

    monkeypatch.setattr(compare, "run", run)
    monkeypatch.setattr(compare, "find_spec", lambda name: None)
    configs = [ROOT / "ds_configs" / f"{name}.json" for name in ("soap", "normuon")]
    assert comparing(compare, monkeypatch, *configs, "--rates", 1, 2, 4, "--seeds", 3, "--out", tmp_path) == 0
    assert asked == [(name, *way) for name in ("soap", "normuon")
                     for way in ((1.0, 0), (2.0, 0), (4.0, 0), (2.0, 1), (2.0, 2))]
    printed = capsys.readouterr().out
    assert "| soap      |  0.2 | 1.000 ± 1.000 |    1,001 |       2.50 |" in printed
    assert "no loss.png: it takes matplotlib" in printed and not (tmp_path / "loss.png").exists()
    assert "edge" not in printed


def test_comparing_marks_the_best_rate_draws_it_alone_and_says_what_differs(compare, monkeypatch, tmp_path, capsys):
    bits = {("first", 0.5): 3.0, ("first", 1.0): 2.0, ("first", 2.0): 2.5,
            ("own", 0.5): float("nan"), ("own", 1.0): 2.4, ("own", 2.0): 2.3}

    def run(config, factor, seed, args, rest):
        loss = 1.5 if config.stem == "first" else 1.0
        write_metrics(args.out / f"{config.stem} {factor} {seed}", (100, 2.0, loss + 1), (200, 4.0, loss))
        return ended(config, factor, seed, validation_bits_per_byte=bits[config.stem, factor])

    monkeypatch.setattr(compare, "run", run)
    monkeypatch.setattr(compare, "find_spec", lambda name: name)
    drawn = MagicMock()
    monkeypatch.setattr(compare, "draw", drawn)
    for name, settings in (("first", {}), ("own", {"train_micro_batch_size_per_gpu": 4})):
        (tmp_path / f"{name}.json").write_text(json.dumps(
            {"optimizer": {"type": "LayerWiseMuon", "params": {"muon_lr": 0.02}}, "zero_optimization": {"stage": 1},
             **settings}))
    out = tmp_path / "out"
    assert comparing(compare, monkeypatch, tmp_path / "first.json", tmp_path / "own.json", "--rates", 2, 0.5, 1,
                     "--out", out) == 0
    drawn.assert_called_once_with({"first 1.0 0": [out / "first 1.0 0"], "own 2.0 0": [out / "own 2.0 0"]})
    printed = capsys.readouterr().out
    starred = [line.split("|")[1].strip() for line in printed.splitlines() if line.startswith("|") and "*" in line]
    assert starred == ["first 1.0 0 *", "own 2.0 0 *"] and "\n*: the best of its rates by validation" in printed
    after = printed[printed.index("| optimizer"):]
    # Once, where it is read: below the table.
    told = "own: not the batch of first. Losses compare that, too: give all the same\n"
    assert printed.count(told) == after.count(told) == 1
    assert [line for line in after.splitlines() if "edge" in line] == [
        "own: the best rate is at the edge: try --rates 4 with another --out"]
    assert "| own 2.0 0     | 200 (100%) | 4.0 (100%) |" in after


@pytest.mark.parametrize("best, told", [(0.25, "try --rates 0.125"), (1.0, None), (4.0, "try --rates 16")])
def test_a_best_rate_at_the_edge_says_what_to_try(compare, best, told):
    line = compare.at_edge("own", best, (1.0, 0.25, 4.0, 0.5))
    assert line == (f"own: the best rate is at the edge: {told} with another --out" if told else "")


def test_the_table_says_when_each_run_reaches_the_loss_of_the_first(compare, tmp_path):
    runs = {"first": [(1000, 5.0, 4.0), (2000, 10.0, 3.15), (3000, 15.0, 3.2), (4000, 20.0, 3.1)],
            "better": [(1000, 8.0, 3.5), (2000, 16.0, 3.1), (3000, 24.0, 3.3), (4000, 32.0, 2.0)],
            "worse": [(1000, 8.0, 3.5), (2000, 16.0, 3.11)]}
    folders = {name: tmp_path / name for name in runs}
    expected = []
    for name, rows in runs.items():
        write_metrics(folders[name], *rows)
        reached = [row for row in rows if row[2] <= 3.1]
        tokens, seconds, _ = reached[0] if reached else (0, 0, 0)
        expected.append([name, f"{tokens:,} ({tokens / 4000:.0%})", f"{seconds} ({seconds / 20:.0%})"] if reached
                        else [name, "-", "-"])
    table = [[cell.strip() for cell in line.strip("|").split("|")]
             for line in compare.table_of_reaching(folders).splitlines()]
    assert table[0] == ["reaches 3.100", "tokens", "seconds"] and table[2:] == expected
    assert expected[0][1] == "4,000 (100%)" and expected[1][1:] == ["2,000 (50%)", "16.0 (80%)"]
    # A run of one step has no timed one.
    write_metrics(tmp_path / "one", (1000, 0.0, 3.0))
    assert "| 1,000 (100%) |     0.0 |" in compare.table_of_reaching({"one": tmp_path / "one"})


def test_a_run_of_one_row_is_seen_in_the_picture(compare, tmp_path):
    write_metrics(tmp_path / "own", (1000, 0.0, 3.0))
    for panel in compare.draw({"own": [tmp_path / "own"]}).axes:
        line, = panel.lines
        assert line.get_marker() == "." and list(line.get_ydata()) == [3.0]


def test_comparing_goes_on_after_a_run_that_fails_and_leaves_one_that_diverged_behind(compare, monkeypatch, tmp_path,
                                                                                      capsys):
    asked = []

    def run(config, factor, seed, args, rest):
        asked.append((config.stem, factor, seed))
        if config.stem == "soap" or (factor, seed) == (2.0, 0):
            return {**ended(config, factor, seed, exit_code=1), **dict.fromkeys(compare.MEASURED)}
        write_metrics(args.out / f"{config.stem} {factor} {seed}", (100, 2.0, 1.0))
        bits = float("nan") if factor == 1 else factor + seed
        # What ran before is on disk.
        if asked[1:]:
            assert len((tmp_path / "results.csv").read_text().splitlines()) == len(asked)
        return ended(config, factor, seed, validation_bits_per_byte=bits)

    monkeypatch.setattr(compare, "run", run)
    monkeypatch.setattr(compare, "find_spec", lambda name: None)
    configs = [ROOT / "ds_configs" / f"{name}.json" for name in ("soap", "normuon")]
    assert comparing(compare, monkeypatch, *configs, "--rates", 1, 2, 4, 8, "--seeds", 2, "--out", tmp_path) == 1
    assert asked[-1] == ("normuon", 4.0, 1) and len(asked) == 9
    printed = capsys.readouterr().out
    assert "| normuon   |  0.4 | 4.500 ± 0.707 |" in printed
    assert "| soap 1.0 0      |     failed |            |          |            |" in printed
    with open(tmp_path / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["exit_code"] for row in rows] == ["1"] * 4 + ["0", "1", "0", "0", "0"]
    assert rows[0]["train_loss"] == "" and rows[-1]["memory_gib"] == "1.5"


@pytest.mark.parametrize("argv, told", [
    (("--out", "{old}"), "has the results of another comparison: name another folder"),
    (("--ranks", "0"), "--ranks must be from 1, got 0"),
    (("--steps", "0"), "--seeds and --steps must be at least 1, got 1 and 0"),
    (("no.json",), "no.json: no such configuration"),
    (("{old}/text.json",), "text.json: not JSON"),
    (("{old}/rates.json", "--rates", "2"), "rates.json: no learning rate that --rates could multiply: give muon_lr"),
    (("{old}/warmup.json", "--rates", "0.5"), "scheduler.params.warmup_max_lr takes the place of the rate"),
    (("--size", "3m"), "invalid choice: '3m'"),
    (("--sed", "3"), "train_gpt.py: error: unrecognized arguments: --sed 3"),
    (("--width", "wide"), "train_gpt.py: error: argument --width: invalid int value: 'wide'"),
    (("--data", "{old}/none"), "none: no such file or folder"),
    (("--data", "{old}/short"), "short: 4 bytes left for training, one window takes 129"),
    (("ds_configs/soap.json", "{old}/wrong.json"), "wrong.json: optimizer.params.muon_rl"),
])
def test_comparing_refuses_before_anything_runs(compare, monkeypatch, tmp_path, capsys, argv, told):
    (tmp_path / "results.csv").write_text("")
    for name in ("text.json", "short"):
        (tmp_path / name).write_text("text")
    (tmp_path / "rates.json").write_text('{"optimizer": {"type": "LayerWiseMuon"}}')
    (tmp_path / "warmup.json").write_text(json.dumps({
        "optimizer": {"type": "AdamW", "params": {"lr": 1}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_max_lr": 1}}}))
    (tmp_path / "wrong.json").write_text('{"optimizer": {"type": "LayerWiseMuon", "params": {"muon_rl": 1}}}')
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit):
        compare.parse_arguments([word.format(old=tmp_path) for word in argv])
    assert told in capsys.readouterr().err


def test_help_names_options_of_the_run(compare, capsys):
    with pytest.raises(SystemExit):
        compare.parse_arguments(["--help"])
    helped = capsys.readouterr().out
    named = re.findall(r"--[\w-]+", helped.partition("Other options go to train_gpt.py")[2])
    known = sys.modules["train_gpt"].argument_parser().format_help()
    assert {"--data", "--seed"} <= {*named} <= {*re.findall(r"--[\w-]+", known), "--help"}
    assert {word for word in compare.OPTIONS if word.startswith("--")} == {
        *re.findall(r"^  (?:-h, )?(--\w+)", helped, re.MULTILINE)}


def test_comparing_takes_all_visible_devices_and_no_more(compare, monkeypatch, tmp_path, capsys):
    node = SimpleNamespace(device_name=lambda: "cuda", device_count=lambda: 4)
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: node)
    out = ["--out", str(tmp_path)]
    assert (compare.parse_arguments(out)[0].device, compare.parse_arguments(out)[0].ranks) == ("cuda", 4)
    assert compare.parse_arguments([*out, "--ranks", "1"])[0].ranks == 1
    with pytest.raises(SystemExit):
        compare.parse_arguments([*out, "--ranks", "5"])
    assert "--ranks must be from 1 to 4, the visible devices, got 5" in capsys.readouterr().err


def parameters(config) -> int:
    layer = config.width * (4 * config.width + 3 * config.mlp_width + 2)
    return config.layers * layer + config.width * (2 * model.VOCABULARY + 1)


def test_the_size_for_a_node_is_what_its_name_says(compare):
    size = compare.SIZES["127m"]
    options = dict(zip(size.options[:-1:2], size.options[1::2]))
    shape = {key: int(options[f"--{key}"]) for key in ("layers", "width", "heads", "context")}
    assert round(parameters(model.GPTConfig(**shape)) / 1e6) == 127
    small = small_gpt()
    assert parameters(small.config) == sum(p.numel() for p in small.parameters())
    for name in size.configs:
        settings = json.loads((ROOT / "ds_configs" / f"{name}.json").read_text())
        merged = compare.of_size({**settings, "train_batch_size": 64, "fp16": {"enabled": True}}, "127m")
        assert merged["optimizer"] == settings["optimizer"] and merged["zero_optimization"]["stage"] == 1
        assert merged["scheduler"]["params"] == {**settings["scheduler"]["params"], "warmup_num_steps": 100}
        # Without any wait of DeepSpeed's timer, and in the same batches.
        assert merged["timers"]["throughput"] == {"synchronized": False}
        assert merged["train_micro_batch_size_per_gpu"] == 16 and merged["bf16"] == {"enabled": True}
        assert merged["gradient_accumulation_steps"] == 1 and not {"train_batch_size", "fp16"} & merged.keys()
        settings.pop("scheduler")
        assert "scheduler" not in compare.of_size(settings, "127m")
    # The last of two equal options counts.
    assert compare.parse_arguments(["--size", "127m", "--width", "16"])[1] == [*size.options, "--width", "16"]


def test_minutes_of_the_page_are_its_arithmetic(compare):
    page = " ".join((ROOT / "docs" / "gpus.md").read_text().split())
    third = page[page.index("compare_optimizers.py --size 127m --steps 300"):].partition(" ```")[0].split()[1:]
    args, rest = compare.parse_arguments(third)
    shape = {key: int(rest[rest.index(f"--{key}") + 1]) for key in ("layers", "width", "context")}
    tokens = compare.SIZES["127m"].settings["train_micro_batch_size_per_gpu"] * shape["context"]
    # The embedding multiplies nothing. Attention's two products have 12 FLOPs for an element and position.
    weights = 6 * tokens * (parameters(model.GPTConfig(heads=8, **shape)) - model.VOCABULARY * shape["width"])
    attention = 12 * tokens * shape["layers"] * shape["width"] * shape["context"]
    flops = weights + attention
    assert round(flops / 1e12) == 15 and round(weights / attention) == 6
    step = flops / (990e12 / 7)
    assert f"{step:.1f}" == "0.1"

    def minutes(runs, steps, slower=1, start=1):
        return math.ceil(runs * (slower * steps * step / 60 + start))

    runs, names = len(args.configs) * len(args.rates), len(args.configs)
    assert 6 == 2 * names
    rows = [(int(least), int(most)) for least, most in re.findall(r"\| (\d+) to (\d+) minutes \|", page)]
    assert len(rows) == 3
    longer = compare.SIZES["127m"].steps
    for said in (f"| {minutes(runs, args.steps, start=0)} to {minutes(runs, args.steps)} minutes |",
                 "Nine runs of 300 steps train for 5 minutes, and each takes up to a minute to start",
                 f"With half that speed the third command ends within {minutes(runs, args.steps, 2)} minutes",
                 f"On A100s (312 TFLOP/s) it ends within {minutes(runs, args.steps, 990 / 312)} minutes",
                 f"have {longer:,} steps, and the third command ends within {minutes(runs, longer)} minutes",
                 f"with two more seeds, within {minutes(runs + 2 * names, longer)} minutes",
                 f"one run of each, within {minutes(names, longer)} minutes",
                 f"with `--rates 0.5 1` the third command has six runs, and takes {minutes(6, args.steps, start=0)} to "
                 f"{minutes(6, args.steps)} minutes",
                 f"with `--steps 300` within {minutes(runs + 2 * names, args.steps)} minutes, without `--steps` within "
                 f"{minutes(runs + 2 * names, longer)}",
                 "Together they take {} to {} minutes".format(*map(sum, zip(*rows))),
                 f"a run on eight GPUs reads {8 * tokens * args.steps / 1e6:.0f} M bytes",
                 f"A run on eight GPUs trains on {8 * tokens * args.steps / 1e6:.0f} M tokens",
                 "The three multiples are {:g}, {:g} and {:g}".format(*(1.5e-3 * each for each in args.rates)),
                 "the three are {:g}, {:g} and {:g} of `muon_lr`".format(*(0.02 * each for each in args.rates))):
        assert said in page, said


def test_comparing_says_what_a_size_replaces(compare, tmp_path):
    own = tmp_path / "own.json"
    own.write_text(json.dumps({
        "train_batch_size": 64, "gradient_accumulation_steps": 1, "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 7},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 30}}}))
    assert compare.replaced(own, "127m") == (
        "own, by --size 127m: train_batch_size null (was 64), zero_optimization.reduce_bucket_size 50000000 (was 7), "
        "scheduler.params.warmup_num_steps 100 (was 30), train_micro_batch_size_per_gpu 16, "
        "timers.throughput.synchronized false")
    assert compare.replaced(own, "2m") == ""


@pytest.mark.parametrize("changes, key, of", [
    ({"scheduler": None}, "scheduler", "stock_adamw"),
    ({"train_micro_batch_size_per_gpu": 4}, "batch", "stock_adamw"),
    ({"train_batch_size": 48}, "batch", "stock_adamw"),
    ({"train_batch_size": 16}, "", ""),
    ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"},
     "batch", "stock_adamw"),
    ({"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 4}, "", ""),
    ({"optimizer": {"params": {"betas": [0.9, 0.99]}}}, "betas", "stock_adamw"),
    ({"optimizer": {"params": {"weight_decay": 0.01}}}, "weight_decay", "stock_adamw"),
    ({"optimizer": {"params": {"weight_decay": 0.01, "scalar_weight_decay": 0.1}}}, "", ""),
    ({"optimizer": {"params": {"adam_lr": 1e-3}}}, "adam_lr", "stock_muon_noclip"),
    ({"optimizer": {"params": {"adam_lr": None, "lr": 3e-3}}}, "", ""),
    ({"optimizer": {"params": {"muon_lr": 0.01}}}, "", ""),
    ({"gradient_clipping": 0.5}, "gradient_clipping", "stock_adamw"),
    ({"bf16": {"enabled": True}}, "precision", "stock_adamw"),
    ({"fp16": {"enabled": True}}, "precision", "stock_adamw"),
    ({"bf16": {"enabled": False}}, "", ""),
    ({"zero_optimization": {"stage": 2}}, "ZeRO stage", "stock_adamw"),
])
def test_comparing_says_what_else_is_another(compare, tmp_path, changes, key, of):
    paths = [ROOT / "ds_configs" / f"{name}.json" for name in compare.SIZES["127m"].configs]
    advice = "Losses compare that, too: give all the same"
    clipping = "not the gradient_clipping of stock_adamw. " + advice + ", but for stock's Muon, which clips its update"
    unclipped = [f"stock_muon_noclip: {clipping}"]
    assert compare.differences(paths, "2m", 2) == unclipped
    own = tmp_path / "own.json"
    settings = compare.merged(json.loads(paths[-1].read_text()), changes)
    params = settings["optimizer"]["params"]
    settings["optimizer"]["params"] = {key: value for key, value in params.items() if value is not None}
    own.write_text(json.dumps(settings))
    expected = [f"own: not the {key} of {of}. {advice}"] if key else []
    if key == "ZeRO stage":
        expected = [expected[0].replace("Losses", "Speed and memory")]
    if key == "gradient_clipping":
        expected, unclipped = [f"stock_muon_noclip, own: {clipping}"], []
    assert sorted(compare.differences([*paths, own], "2m", 2)) == sorted(unclipped + expected)
    # A size for a node has a batch and a precision of its own, the same for all.
    expected = [] if key in ("batch", "precision") else expected
    assert sorted(compare.differences([*paths, own], "127m", 2)) == sorted(unclipped + expected)


def test_a_seed_for_the_runs_is_in_their_rows_and_a_config_is_as_it_ran(compare, monkeypatch, tmp_path):
    asked = []

    def train(command, environment, log):
        asked.append(command)
        out = log.parent
        write_metrics(out, (100, 2.0, 1.0))
        (out / "summary.json").write_text(json.dumps({**dict.fromkeys(compare.MEASURED, 1.0), "memory_gib": [1.0]}))
        return 0

    monkeypatch.setattr(compare, "_train", train)
    monkeypatch.setattr(compare, "find_spec", lambda name: None)
    configs = [ROOT / "ds_configs" / f"{name}.json" for name in ("stock_adamw", "quickstart")]
    assert comparing(compare, monkeypatch, *configs, "--seed=7", "--size", "127m", "--steps", 30, "--rates", 1, 2,
                     "--out", tmp_path) == 0
    train_gpt = sys.modules["train_gpt"]
    runs = [train_gpt.argument_parser().parse_args(command[1 + command.index(str(ROOT / "examples/train_gpt.py")):])
            for command in asked]
    with open(tmp_path / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["config"], int(row["seed"])) for row in rows] == [
        (name, 7) for config in configs for name in (f"{config.stem} seed 7", f"{config.stem} x 2 seed 7")]
    assert [each.seed for each in runs] == [7] * 4
    for each, row in zip(runs, rows, strict=True):
        saved = json.loads(Path(each.deepspeed_config).read_text())
        section = saved["optimizer"]["params"]
        assert section.get("muon_lr", section.get("lr")) == float(row["rate"])
        # Nothing is left for train_gpt.py to change.
        assert train_gpt.load_config(each) == (saved, 30)


SMALL = ("--layers", 1, "--width", 16, "--heads", 2, "--context", 16)


@pytest.mark.parametrize("configs", [
    ("quickstart",), pytest.param(("stock_adamw", "stock_muon_noclip", "quickstart"), marks=pytest.mark.thorough),
], ids=len)
def test_comparing_in_small_gives_a_table_and_two_curves(compare, monkeypatch, tmp_path, capsys, configs):
    text, wrong, out = tmp_path / "text", tmp_path / "wrong.json", tmp_path / "out"
    text.write_bytes(bytes(range(256)) * 40)
    # A mistake that takes the model to see.
    wrong.write_text(json.dumps({"optimizer": {"type": "LayerWiseMuon", "params": {"muon_lr": 0.02}},
                                 "zero_optimization": {"stage": 1},
                                 "layerwise": {"overrides": [{"name": "lacking", "optimizer": "scalar"}]}}))
    paths = [ROOT / "ds_configs" / f"{name}.json" for name in configs]
    code = comparing(compare, monkeypatch, wrong, *paths, "--size", "127m", *SMALL, "--ranks", 2, "--steps", 5,
                     "--eval_every", 2, "--data", text, "--out", out)
    printed = capsys.readouterr().out
    assert code == 1 and "lacking" in printed and "wrong: 5 steps on 2 ranks (cpu), log in " in printed
    with open(out / "results.csv", newline="") as file:
        failed, *rows = csv.DictReader(file)
    assert failed["exit_code"] == "1" and failed["train_loss"] == ""
    assert [row["config"] for row in rows] == list(configs)
    assert printed.count("wrong, by --size 127m: ") == 1
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    assert max(map(len, lines)) <= 90
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    reaching = table.index(next(row for row in table if row[1:] == ["tokens", "seconds"]))
    assert table[reaching][0] == f"reaches {float(rows[0]['train_loss']):.3f}"
    assert [row[0] for row in table[reaching + 2:]] == [*configs] and table[reaching + 2][1].endswith("%)")
    del table[reaching:]
    assert table[0] == ["optimizer", "train loss", "validation", "tokens/s", "GiB a rank"]
    assert table[2] == ["wrong", "failed", "", "", ""]
    figure = compare.draw({name: [out / name] for name in configs})
    assert (out / "loss.png").read_bytes()[:4] == b"\x89PNG"
    for number, (row, cells) in enumerate(zip(rows, table[3:], strict=True)):
        assert json.loads((out / row["config"] / "config.json").read_text())["bf16"] == {"enabled": True}
        summary = json.loads((out / row["config"] / "summary.json").read_text())
        with open(out / row["config"] / "metrics.csv", newline="") as file:
            metrics = list(csv.DictReader(file))
        # 16 windows of 16 bytes on each of two ranks; steps 2, 4 and the last.
        assert [int(line["tokens"]) for line in metrics] == [512 * step for step in (2, 4, 5)]
        assert int(row["tokens"]) == 2560 and float(row["train_loss"]) == float(metrics[-1]["train_loss"])
        assert float(row["seconds"]) == float(metrics[-1]["seconds"]) > float(metrics[0]["seconds"]) > 0
        assert float(row["tokens_per_s"]) == pytest.approx(4 * 512 / float(row["seconds"]))
        assert len(summary["memory_gib"]) == 2 and float(row["memory_gib"]) == max(summary["memory_gib"])
        # A process with torch in it, and nothing large.
        assert 0.1 < min(summary["memory_gib"]) <= float(row["memory_gib"]) < 4
        loss, bits, speed, memory = (float(cell.replace(",", "")) for cell in cells[1:])
        assert loss == pytest.approx(float(row["train_loss"]), abs=5e-4)
        assert bits == pytest.approx(float(row["validation_bits_per_byte"]), abs=5e-4)
        assert f"train loss {loss:.3f}, validation {bits:.3f}" in (out / row["config"] / "log.txt").read_text()
        assert speed == pytest.approx(float(row["tokens_per_s"]), abs=0.5)
        assert memory == pytest.approx(float(row["memory_gib"]), abs=5e-3)
        for panel, key in zip(figure.axes, ("tokens", "seconds"), strict=True):
            line = panel.lines[number]
            assert line.get_label() == row["config"]
            assert list(line.get_xdata()) == [float(each[key]) for each in metrics]
            assert list(line.get_ydata()) == [float(each["train_loss"]) for each in metrics]


@pytest.mark.parametrize("name, key, rate", [("stock_adamw", "lr", 1.5e-3), ("stock_muon", "muon_lr", 0.02),
                                             ("normuon", "muon_lr", 0.02), ("soap", "muon_lr", 3e-3)])
def test_comparing_multiplies_the_rate_of_matrices_alone(compare, name, key, rate):
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
    pytest.param("step_overhead.py --times 1", 5, marks=pytest.mark.thorough), ("dispatches.py", 4),
    pytest.param("optimizer_part.py --small --ranks 2 --rounds 1", 11, marks=[
        pytest.mark.thorough, needs("deepspeed>=0.19.8", "its Muon does not say its dtype")]),
], ids=lambda value: str(value).split(".")[0])
def test_other_benchmarks_run(command, rows):
    script, *args = command.split()
    done = subprocess.run([sys.executable, str(ROOT / "examples" / "benchmarks" / script), *args], capture_output=True,
                          text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert sum(line.startswith("| ") for line in done.stdout.splitlines()) >= rows


@pytest.mark.thorough
def test_the_benchmark_of_memory_runs_and_predictions_hold():
    script = ROOT / "examples" / "benchmarks" / "memory.py"
    done = subprocess.run([sys.executable, str(script), "--small"], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()
            if line.startswith("| stage")]
    assert [row[:2] for row in rows] == [[f"stage-{stage}-bf16", rank] for stage in "23" for rank in "01"]
    # Tensors are what is held, and buffers of transfers.
    assert all(float(row[2]) <= float(row[3]) <= float(row[2]) + float(row[5]) + 0.1 for row in rows)
