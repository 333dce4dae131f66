"""``ds-layerwise plan`` on a terminal of 80 columns, and as a page: ``--html``."""

import io
import json
import re
from contextlib import redirect_stdout
from html.parser import HTMLParser

import pytest

from ds_layerwise import cli
from ds_layerwise.plan.forecast.quantities import GLUE, count_text, size_text, time_text, work_text
from ds_layerwise.tools import plan_page
from tests.support.cli import assert_refused, run
from tests.support.rooms import rooms

pytestmark = rooms("plan_page", "text_tables", "quantities")

NAME = 'up<b>&amp;"\'.weight'
MODEL = f"""
model: small
numel: 5120
params:
  - {{name: embed, shape: [16, 64], optimizer: scalar}}
  - {{name: {json.dumps(NAME)}, shape: [16, 64], optimizer: matrix}}
  - block: {{layer: [0, 3]}}
    params:
      - {{name: "down.{{layer}}", shape: [64, 16], optimizer: matrix}}
"""
KINDS = ("params", "grads", "masters", "states", "under way, at most", "in a step, at most", "matrix updates",
         "gradients, at stage 3 also parameters of passes", "parameters")


@pytest.fixture
def command(tmp_path):
    (tmp_path / "a&b.yaml").write_text(MODEL)
    (tmp_path / "ds.json").write_text(json.dumps({
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 2048}, "bf16": {"enabled": True},
        "optimizer": {"type": "LayerWiseMuon", "params": {}}}))
    return lambda ranks, *more: ["plan", "--model", tmp_path / "a&b.yaml", "--config", tmp_path / "ds.json", "--ranks",
                                 ranks, *more]


class Page(HTMLParser):
    """A page: its rows of cells, paragraphs and captions, attributes of bars with their titles, and all tags."""

    VOID = ("meta", "rect")

    def __init__(self, text):
        super().__init__()
        self.rows, self.paragraphs, self.bars, self.tags, self.attributes, self.open = [], [], [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [key for key, _ in attrs]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag in ("p", "caption"):
            self.paragraphs.append("")
        elif tag == "rect":
            self.bars.append([{key: value for key, value in attrs}, ""])
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
        elif self.open and self.open[-1] in ("p", "caption"):
            self.paragraphs[-1] += data
        elif self.open[-2:] == ["rect", "title"]:
            self.bars[-1][1] += data


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


def test_a_page_has_the_tables_lines_and_numbers_of_the_text(command, tmp_path):
    for ranks in ("2", "1,2,4"):
        path = tmp_path / f"{ranks}.html"
        code, out, err = run(*command(ranks, "--memory", "80", "--html", path))
        assert (code, err) == (0, "") and out == run(*command(ranks, "--memory", "80"))[1]
        text = path.read_text()
        page = Page(text)
        assert not page.open and GLUE not in text
        # A table without a header has an empty one; no cell of this model is so wide that it is folded, but for prose.
        shown = [row for row in page.rows if any(row)]
        if ranks == "2":
            assert [row[0] for row in shown] == [row[0] for row in rows_of(out) if row[0]]
        else:
            assert shown == rows_of(out)
        told = " ".join(" ".join(map(" ".join, page.rows)).split()) + " ".join(page.paragraphs)
        numbers = re.findall(r"\d[\d,.]*(?: (?:M|MiB|GiB|us|ms|s|%|GFLOP|TFLOP/s|TFLOP)\b)?", " ".join(out.split()))
        assert len(numbers) > 50 and all(number in told for number in numbers)
        # Titles and lines are the same, in the same order; the page ends with a line of its own.
        lines = [line for line in out.splitlines() if line[:1] not in "┏┃┡│├└┌"]
        assert " ".join(" ".join(lines).split()) == " ".join(" ".join(page.paragraphs[:-1]).split())


def test_names_are_escaped_and_nothing_is_fetched(command, tmp_path):
    path = tmp_path / "plan.html"
    assert run(*command("2", "--html", path))[0] == 0
    text = path.read_text()
    page = Page(text)
    assert NAME in [cell for row in page.rows for cell in row] and NAME not in text
    assert "a&amp;b.yaml</h1>" in text
    assert not {"script", "link", "img", "iframe", "object"} & {*page.tags}
    assert not {"src", "href"} & {*page.attributes} and "url(" not in text and "http" not in text.replace("http-eq", "")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_pictures_have_the_numbers_of_every_rank(stage, command, tmp_path):
    config = json.loads((tmp_path / "ds.json").read_text())
    config["zero_optimization"]["stage"] = stage
    (tmp_path / "ds.json").write_text(json.dumps(config))
    path = tmp_path / "plan.html"
    plans = json.loads(run(*command("2,3", "--json", "--html", path))[1])
    page = Page(path.read_text())
    bars = iter(page.bars)
    for plan in plans:
        held = [[memory[kind] for kind in KINDS[:4]] + [traffic["total"], works + memory["staging"]]
                for memory, traffic, works in zip(plan["memory_bytes"], plan["under_way_bytes"], plan["step_bytes"],
                                                  strict=True)]
        load = [[work] for work in plan["newton_schulz_flops"]]
        pictures = [(KINDS[:6], held, size_text), (KINDS[6:7], load, work_text)]
        sent = []
        for kinds, values, text in [*pictures, (KINDS[7:], None, size_text)]:
            most = values and max(map(sum, values))
            for rank in range(plan["ranks"]):
                top = 200
                for i, kind in enumerate(kinds):
                    where, said = next(bars)
                    if values is None:
                        assert said.startswith(f"rank {rank}, {kind}: ")
                        sent.append(float(where["height"]))
                        continue
                    assert said == f"rank {rank}, {kind}: {text(values[rank][i])}".replace(GLUE, " ")
                    assert float(where["height"]) == pytest.approx(200 * values[rank][i] / most, abs=0.01)
                    top -= 200 * values[rank][i] / most
                    assert float(where["y"]) == pytest.approx(top, abs=0.01)
                    assert float(where["x"]) == pytest.approx(960 * rank / plan["ranks"], abs=0.01)
        # What ranks send is in the picture as in the sums over them.
        sums = [200 / plan["sent_by_busiest_bytes"] * sum(each["sent_bytes"][key] for each in plan["dtypes"].values())
                for key in ("gradients", "parameters")]
        assert [sum(sent[0::2]) / plan["ranks"], sum(sent[1::2]) / plan["ranks"]] == pytest.approx(sums, abs=0.02)
    assert next(bars, None) is None and page.tags.count("figure") == 6


def test_the_fullest_of_neighbours_is_drawn_if_ranks_are_many(command, tmp_path):
    path = tmp_path / "plan.html"
    plan, = json.loads(run(*command("300", "--json", "--html", path))[1])
    page = Page(path.read_text())
    assert len(page.bars) == 150 * len(KINDS)
    load = [said for _, said in page.bars if "matrix updates" in said]
    work = plan["newton_schulz_flops"]
    for i, said in enumerate(load):
        rank = int(re.match(r"rank (\d+),", said)[1])
        assert rank // 2 == i and work[rank] == max(work[2 * i:2 * i + 2])
    assert sum(map(bool, work)) == 4
    # Each third rank has most.
    drawn = plan_page._bars("load", ["work"], [[10**9 * (rank % 3)] for rank in range(600)], work_text)
    assert re.findall(r"<title>rank (\d+), work: (\d) GFLOP", drawn.replace(GLUE, " ")) == [
        (str(rank), "2") for rank in range(2, 600, 3)]


def test_a_page_is_replaced_only_if_asked(command, tmp_path):
    path = tmp_path / "plan.html"
    path.write_text("mine")
    assert_refused("plan.html, which exists; name another place, or replace it with --overwrite",
                   *command("2", "--html", path))
    assert path.read_text() == "mine"
    assert run(*command("2", "--html", path, "--overwrite"))[0] == 0
    assert path.read_text().startswith("<!DOCTYPE html>")
    assert_refused("No such file or directory", *command("2", "--html", tmp_path / "nowhere" / "plan.html"))


NUMBER = re.compile(r"(?<![\w.])\d[\d,.]*\d(?: (?:M|MiB|GiB|us|ms|s|%|GFLOP|TFLOP)\b)?(?![\w.])")


@pytest.mark.parametrize("more", [("8",), ("8,64", "--memory", "8"), ("8", "--fit", "40")])
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
    assert on_terminal(500, arguments, monkeypatch) == wide == run(*arguments)[1]


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_every_column_is_explained_once(columns, command, monkeypatch):
    shown = on_terminal(columns, command("2,4", "--memory", "8"), monkeypatch)
    wide = on_terminal(500, command("2,4", "--memory", "8"), monkeypatch)
    headers = {header for line in wide.splitlines() if line[:1] == "┃" for header in rows_of(line)[0]} - {""}
    prose = "\n".join(line for line in shown.splitlines() if line[:1] not in "┏┃┡│└").replace("\n  ", " ")
    explained = re.findall(rf"(?m)(?:^|[;.,] )({'|'.join(map(re.escape, headers))})(?=(?:, [\w ]+)*: )", prose)
    assert len(headers) == 35 and {header: explained.count(header) for header in headers} == dict.fromkeys(
        headers, 1)


def test_every_piece_of_a_table_names_its_rows(command, monkeypatch):
    narrow = on_terminal(60, command("2,4"), monkeypatch)
    pieces = [[row for row in rows_of(part) if row[0]] for part in narrow.split("└")]
    by_ranks = [piece for piece in pieces if piece and piece[0][0] == "ranks"]
    rows = {}
    for piece in by_ranks:
        for row in piece[1:]:
            rows.setdefault(tuple(row[:2]), []).append(row[2:])
    wide = {tuple(row[:2]): row[2:] for row in rows_of(run(*command("2,4"))[1]) if row[0].isdigit()}
    assert len(by_ranks) > 4 and rows.keys() == wide.keys()
    joined = {key: [cell for piece in values for cell in piece] for key, values in rows.items()}
    assert {key: cells for key, cells in joined.items()} == wide


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
