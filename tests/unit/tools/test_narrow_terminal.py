"""``ds-layerwise plan`` on a narrow terminal: what folds, and what never does."""

import io
import json
import re
from contextlib import redirect_stdout

import pytest

from ds_layerwise import cli
from ds_layerwise.plan.forecast import text_tables
from ds_layerwise.plan.forecast.text_tables import GLUE, count_text, size_text, time_text, work_text
from tests.support.cli import run
from tests.support.rooms import rooms

pytestmark = rooms("text_tables")

@pytest.fixture
def command(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 2048}, "bf16": {"enabled": True},
        "optimizer": {"type": "LayerWiseMuon", "params": {}}}))
    model = ["--model", "tests.support.model_specs:small", "--config", tmp_path / "ds.json"]
    return lambda ranks, *more: ["plan", *model, "--ranks", ranks, *(more or ["--verbose"])]


def on_terminal(columns, arguments, monkeypatch):
    """The output on a terminal with so many columns."""
    shown = io.StringIO()
    shown.isatty = lambda: True
    monkeypatch.setenv("COLUMNS", str(columns))
    with redirect_stdout(shown):
        assert cli.main([str(argument) for argument in arguments]) == 0
    return shown.getvalue()


def rows_of(text):
    lines = [re.split("[│┃]", line)[1:-1] for line in text.splitlines() if line[:1] in "│┃" and line]
    return [[cell.strip() for cell in line] for line in lines]


NUMBER = re.compile(r"(?<![\w.])\d[\d,.]*\d(?: (?:M|MiB|GiB|us|ms|s|%|GFLOP|TFLOP)\b)?(?![\w.])")


@pytest.mark.parametrize("more", [
    ("8",), ("8", "--verbose"), ("8,64", "--memory", "8", "--verbose"), ("8", "--fit", "40")])
def test_80_columns_fold_and_break_no_number(more, tmp_path, monkeypatch):
    (tmp_path / "ds.json").write_text(json.dumps({
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}, "bf16": {"enabled": True},
        "optimizer": {"type": "LayerWiseMuon", "params": {"weight_decay": 0.1}}}))
    arguments = ["plan", "--model", "llama-3-8b", "--config", tmp_path / "ds.json", "--ranks", *more]
    wide = run(*arguments)[1]
    for columns in (60, 80):
        narrow = on_terminal(columns, arguments, monkeypatch)
        assert max(map(len, narrow.splitlines())) <= columns
        found = [number for line in narrow.splitlines() for number in NUMBER.findall(line)]
        numbers = {number for line in wide.splitlines() for number in NUMBER.findall(line)}
        assert numbers and not numbers - {*found}
    # Wide enough, or no terminal: as ever.
    assert on_terminal(500, arguments, monkeypatch) == wide and max(map(len, wide.splitlines())) <= 90


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_every_column_and_row_is_explained_once(columns, command, monkeypatch):
    shown = on_terminal(columns, command("2,4", "--memory", "8", "--verbose"), monkeypatch)
    monkeypatch.setattr(text_tables, "columns_of_terminal", lambda most: 500)
    wide = run(*command("2,4", "--memory", "8", "--verbose"))[1]
    of_recipes, of_ranks = wide.split("\nlayout ")
    headers = {header for line in of_recipes.splitlines() if line[:1] == "┃" for header in rows_of(line)[0]}
    names = {row[0].split(",")[0] for row in rows_of(of_ranks)} - {"parameters", "gradients", "masters", "states"}
    names = {"of a dtype" if name.startswith("of ") else name for name in names}
    assert (len(headers), len(names)) == (7, 13)
    prose = "\n".join(line for line in shown.splitlines() if line[:1] not in "┏┃┡│└").replace("\n  ", " ")
    each = headers | names
    explained = re.findall(rf"(?m)(?:^|[;.,] )({'|'.join(map(re.escape, each))})(?=(?:, [\w ]+)*: )", prose)
    assert {name: explained.count(name) for name in each} == dict.fromkeys(each, 1)


def test_every_piece_of_a_table_names_its_rows(command, monkeypatch):
    narrow = on_terminal(60, command("1,2,3,4,5,6"), monkeypatch)
    pieces = [rows_of(part) for part in narrow.partition("\nlayout ")[2].split("└")]
    ranks = [piece[0][1:] for piece in pieces if piece]
    assert len(ranks) > 1 and [cell for row in ranks for cell in row] == list("123456")
    assert all([row[0] for row in piece] == [row[0] for row in pieces[0]] for piece in pieces if piece)


def test_a_list_folds_too(command, monkeypatch):
    wide = run(*command("2", "--list"))[1]
    narrow = on_terminal(60, command("2", "--list"), monkeypatch)
    assert max(map(len, narrow.splitlines())) <= 60 < max(map(len, wide.splitlines()))
    assert narrow.split() == wide.split()


@pytest.mark.parametrize("text, expected", [
    (size_text(10 * 2**30), "10.0 GiB"), (size_text(10 * 2**30 - 2**20), "10,239.0 MiB"), (size_text(0), "0.0 MiB"),
    (size_text(2**40), "1,024.0 GiB"), (count_text(32_149_504), "32.1 M"), (count_text(99_999), "99,999"),
    (count_text(100_000), "0.1 M"), (count_text(1_000_000_000), "1,000.0 M"), (time_text(999_900), "999.9 us"),
    (time_text(2.5e6), "2.5 ms"), (time_text(1234e9), "1,234.00 s"), (work_text(163.4e9), "163 GFLOP"),
    (work_text(6.32e13), "63.2 TFLOP")])
def test_numbers_have_one_form(text, expected):
    assert text.replace(GLUE, " ") == expected
