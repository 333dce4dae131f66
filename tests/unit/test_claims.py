"""Each sentence of README.md and of the users' pages that says all, every, never or only, against what shows it."""

import ast
import json
import re

import pytest

from ds_layerwise.errors import LayerWiseError
from tests.support.documents import DOCS, ROOT, sentences_of, tables_of
from tests.support.rooms import rooms

pytestmark = rooms("outside")

#: By page, and sentence or its first 90 characters: tests as path::name, rows as "docs/evidence.md: what stands there",
#: or "about: " and why there is none.
CLAIMS = json.loads((ROOT / "tests" / "support" / "claims.json").read_text())
USERS_PAGES = """index choosing stages stage3 training checkpoints hugging_face cli table optimizers overrides moving
    parallelism troubleshooting long_sequences mixture_of_experts weights words""".split()
LENGTH = 90


def claims_of(path):
    """The sentences of a page with one of the four words, but in code, in addresses, and in longer words."""
    found = {}
    for sentence in sentences_of(path):
        plain = re.sub(r"`[^`]*`|\]\([^)]*\)", "", sentence)
        if re.search(r"(?<![\w-])(all|every|never|only)(?![\w-])", plain, re.IGNORECASE):
            assert found.setdefault(sentence[:LENGTH], sentence) == sentence, f"two sentences begin alike: {sentence}"
    return found


def evidence_of(claim):
    return [claim] if isinstance(claim, str) else claim


def shows(evidence):
    """Tell whether a test, or what is quoted, is there."""
    if evidence.startswith("docs/evidence.md: "):
        page = " ".join((DOCS / "evidence.md").read_text().split())
        return len(evidence) > 40 and evidence.partition(": ")[2] in page
    if evidence.startswith("about: "):
        return len(evidence.split()) > 3
    file, *names = evidence.split("::")
    if not re.fullmatch(r"tests/[\w/]+/test_\w+\.py", file) or not (ROOT / file).is_file():
        return False
    node = ast.parse((ROOT / file).read_text())
    for name in names:
        node = next((each for each in getattr(node, "body", []) if getattr(each, "name", "") == name), None)
    return node is not None and bool(names) and names[-1].startswith(("test_", "Test"))


def test_the_pages_are_the_users():
    assert [*CLAIMS] == ["README.md", *(f"docs/{name}.md" for name in USERS_PAGES)]


@pytest.mark.parametrize("name", CLAIMS)
def test_every_sentence_that_says_all_every_never_or_only_has_its_evidence(name):
    found = claims_of(ROOT / name)
    lacking = [sentence for key, sentence in found.items() if key not in CLAIMS[name]]
    assert not lacking, f"give these of {name} a test in tests/support/claims.json, or correct them: {lacking}"
    gone = CLAIMS[name].keys() - found.keys()
    assert not gone, f"{name} does not say this any more; take it out of tests/support/claims.json: {gone}"
    for key, claim in CLAIMS[name].items():
        assert claim, f"{name}: {key} has no evidence"
        for evidence in evidence_of(claim):
            assert shows(evidence), f"{name}: what is to show {key!r} is not there: {evidence}"


def test_few_sentences_have_no_test():
    claims = [evidence for page in CLAIMS.values() for evidence in page.values()]
    told = [claim for claim in claims if any(each.startswith("about: ") for each in evidence_of(claim))]
    assert len(told) * 5 <= len(claims)


def test_a_sentence_ends_where_a_reader_sees_its_end(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# All here\nEvery `x.y` is\nthere. (Only `all` of it.) It is all-to-all.\n\n"
                    "* never [one](only.md)\n"
                    "2. that\n   all see\n\n| only | b |\n|---|---|\n| c | see every d. E |\n\n"
                    "1. A\n\n    ```sh\n    all\n    ```\nno <!-- every -->\n")
    assert [*claims_of(page).values()] == [
        "All here", "Every `x.y` is there.", "(Only `all` of it.)", "never [one](only.md)", "that all see", "only",
        "see every d."]


def test_all_errors_of_the_package_have_the_classes_of_the_page():
    (_, *rows), = (table for table in tables_of(DOCS / "troubleshooting.md") if table[0][0] == "class")
    assert {row[0].strip("`") for row in rows} == {each.__name__ for each in LayerWiseError.__subclasses__()
                                                   if each.__module__ == "ds_layerwise.errors"}
    known = {"LayerWiseError"}
    for path in sorted((ROOT / "ds_layerwise").rglob("*.py"), key=lambda path: path.name != "errors.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            bases = {base.id for base in getattr(node, "bases", []) if isinstance(base, ast.Name)}
            if any(base.endswith(("Error", "Exception")) for base in bases) and node.name != "LayerWiseError":
                assert bases & known, f"{path.name}: {node.name} is no LayerWiseError"
                known.add(node.name)
