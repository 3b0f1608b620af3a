"""docs/results: the index lists every page, and the pages contain the guide's means ± errors."""

import json
import re

import pytest

from support.programs import ROOT

RESULTS = ROOT / "docs" / "results"
PAGES = {page.name: page.read_text() for page in RESULTS.glob("*.md")}
KEPT = sorted((ROOT / "bench" / "results").rglob("*.json"))


def test_every_page_is_in_the_index_and_names_its_commit():
    linked = re.findall(r"^- \[.*?\]\((\w+\.md)\)", PAGES["README.md"], re.M)
    assert sorted([*linked, "README.md"]) == sorted(PAGES)
    for name in linked:
        assert re.search(r"\*\*Question\.\*\* .*\*\*Answer\.\*\* ", PAGES[name], re.S), name
        assert re.search(r"\bcommits? [0-9a-f]{7}|\| commits \|", PAGES[name], re.I), name


FIGURE = re.compile(r"(?<=\| )[+-]?[\d.]+ ± [\d.]+")  # in a cell of a table
GUIDE = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]


@pytest.mark.parametrize("page", GUIDE, ids=lambda page: page.stem)
def test_figures_of_the_guide_are_in_the_results(page):
    measured = set(re.findall(r"[+-]?[\d.]+ ± [\d.]+", "".join(PAGES.values())))
    assert set(FIGURE.findall(page.read_text())) - measured == set()


README = (ROOT / "README.md").read_text()


def test_step_times_in_the_readme_are_those_of_the_runs():
    path = ROOT / "bench/results/2026-11-28-cpu/link_methods.json"
    (run,) = json.loads(path.read_text())["runs"]
    milliseconds = {
        (cell["mode"], cell["ranks"], cell["rate"]): f"{cell['step_ms'][1]:.0f}"
        for cell in run["cells"]
    }
    columns = [(ranks, rate) for ranks in (2, 4) for rate in (1e8, 1e9, 1e10)]
    for row, mode in {
        "DDP in float32": "dense",
        "DDP with `bf16_compress_hook`": "bf16",
        "DDP with PowerSGD, rank 1": "powersgd1",
        "`DCTState(ddp, density=0.005)`": "dct",
        '`DCTState(ddp, format="int4")`': "dct-int4",
        "`DCTAverager(model, period=10)`": "local-ternary",
    }.items():
        cells = [milliseconds[(mode, *column)] for column in columns]
        assert f"\n| {row} | {' | '.join(cells)} |\n" in README


def test_each_row_of_losses_in_the_readme_is_from_one_run():
    """The row's bytes, factors and loss are in one row of a page. Tables begin with float32."""
    tables = ""
    for page, heading in (
        ("text_python.md", "FSDP2 between shards, and PowerSGD, 3,000 steps"),
        ("thresholds.md", "DLRM on Criteo Kaggle rows, SGD, 270 steps, 2 ranks"),
    ):
        section = PAGES[page].partition(f"## {heading}\n")[2]
        tables += re.search(r"(?:^\|.*\n)+", section, re.M)[0]
    rows = re.findall(r"^\| .* \| ([\d,]+) \| (.*x) \| (.*x) \| (.*?) *\|$", README, re.M)
    assert len(rows) == 8
    for nbytes, fewer, than_bfloat16, loss in rows:
        cells = rf"\| {nbytes} \| {re.escape(fewer)} \|.* {re.escape(loss)} \|"
        assert re.search(cells, tables), nbytes
        sent = int(nbytes.replace(",", ""))
        if fewer == "1.0x":
            float32 = sent
        assert than_bfloat16 == f"{float32 / 2 / sent:.1f}x"


def test_results_contain_no_path_of_a_machine():
    for path in KEPT:
        assert not re.search(r"/(home|root|work|tmp|mnt|opt|Users)/", path.read_text()), path
