"""docs/results: the index lists every page, and the pages contain every figure of the guide."""

import json
import re

import pytest
from programs import ROOT

from bench import signatures

RESULTS = ROOT / "docs" / "results"
PAGES = {page.name: page.read_text() for page in RESULTS.glob("*.md")}
KEPT = sorted((ROOT / "bench" / "results").rglob("*.json"))


def test_signatures_in_the_reference_match_the_code():
    """`python -m bench.signatures` updates them."""
    assert [page.name for page in signatures.differing()] == []


def test_every_page_is_in_the_index_and_names_its_commit():
    linked = re.findall(r"^- \[.*?\]\((\w+\.md)\)", PAGES["README.md"], re.M)
    assert sorted([*linked, "README.md"]) == sorted(PAGES)
    for name in linked:
        assert re.search(r"\*\*Question\.\*\* .*\*\*Answer\.\*\* ", PAGES[name], re.S), name
        assert re.search(r"\bcommits? [0-9a-f]{7}|\| commits \|", PAGES[name], re.I), name


def test_every_experiment_is_linked_from_a_page():
    """Files without a commit are raw outputs, from which the experiment in their folder is made."""
    text = "".join(PAGES.values())
    for path in KEPT:
        content = json.loads(path.read_text())
        if "commit" in content:
            assert f"/{path.parent.name}/{path.name})" in text, path


FIGURE = re.compile(r"(?<=\| )[+-]?[\d.]+ ± [\d.]+")  # in a cell of a table
GUIDE = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]


@pytest.mark.parametrize("page", GUIDE, ids=lambda page: page.stem)
def test_figures_of_the_guide_are_in_the_results(page):
    measured = set(re.findall(r"[+-]?[\d.]+ ± [\d.]+", "".join(PAGES.values())))
    assert set(FIGURE.findall(page.read_text())) - measured == set()


def test_the_table_in_the_readme_has_the_figures_of_the_run():
    """Milliseconds at 1 Gbit/s; times fewer bytes, for a transformer in the run of its loss."""
    text = (ROOT / "README.md").read_text()
    (run,) = json.loads((ROOT / "bench/results/2026-11-25-cpu/link_few_bits.json").read_text())[
        "runs"
    ]
    cells = {cell["mode"]: cell for cell in run["cells"] if cell["rate"] == 1e9}
    page = PAGES["text_python.md"].partition("## 3,000 steps")[2].partition("\n## ")[0]
    two_ranks = re.findall(r"^\| 2 \| (.*?) \| [\d,]+ \| (.*?x) ", page, re.M)
    clicks = cells["dense"]["payload_bytes"] / cells["dct"]["payload_bytes"]
    fewer = dict(two_ranks) | {"hook, 0.5 %": f"{clicks:.1f}x"}
    for mode, row, method in (
        ("dct", "`DCTState(ddp, density=0.005)`", "hook, 0.5 %"),
        ("dct-int4", '`DCTState(ddp, format="int4")`', "`int4` hook"),
        ("local-ternary", "`DCTAverager(model, period=10)`", "averager, ternary, every 10 steps"),
    ):
        assert f"{row} | {fewer[method]} | {cells[mode]['step_ms'][1]:.1f} |" in text


def test_results_contain_no_path_of_a_machine():
    for path in KEPT:
        assert not re.search(r"/(home|root|work|tmp|mnt|opt|Users)/", path.read_text()), path


def test_every_picture_exists_and_is_used():
    named = set()
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        pattern = r"(?:src|srcset)=\"([^\"]+)\"|!\[[^]]*\]\(([^)]+)\)"
        for target in re.findall(pattern, page.read_text()):
            named.add((page.parent / "".join(target)).resolve())
    assert named == {path.resolve() for path in (ROOT / "docs" / "images").iterdir()}
