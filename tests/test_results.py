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
    found = re.findall(r"^\| (\S.*) \| (\d*) \| (\d+) \| (\d+), `(.*)` \|$", README, re.M)
    *measured, _, _ = [(*times, call) for _, *times, call in found]
    (run,) = json.loads((ROOT / LINK / "link_methods.json").read_text())["runs"]
    cells = {(cell["mode"], cell["rate"]): cell for cell in run["cells"] if cell["ranks"] == 4}
    hook, averager = "DCTState(ddp, density=0.005)", "DCTAverager(model, period=10)"
    for rate, mode, call in (
        (1e9, "dct", hook),
        (1e10, "dct", hook),
        (1e8, "local-ternary", averager),
    ):
        times = (f"{cells[(name, rate)]['step_ms'][1]:.0f}" for name in ("dense", "bf16", mode))
        assert measured.pop(0) == (*times, call)
    (run,) = json.loads((ROOT / LINK / "fsdp2_link.json").read_text())["runs"]
    cells = {(cell["mode"], cell["rate"]): cell for cell in run["cells"]}
    times = (f"{cells[(f'fsdp-{f}', 1e9)]['step_ms'][1]:.0f}" for f in ("bfloat16", "int8"))
    assert measured == [("", *times, "compress_fully_shard(model)")]


LINK = "bench/results/2026-11-28-cpu"
SOURCES = [
    ("text_python.md", "FSDP2 between shards, and PowerSGD, 3,000 steps", "-0.0006 ± 0.0012"),
    ("text_python.md", "Longer warm-ups", "+0.0014 ± 0.0003"),
    ("thresholds.md", "DLRM, one pass over a million generated rows", "-0.0007 ± 0.0001"),
    ("thresholds.md", "DLRM, one pass over a million generated rows", "+0.0004 ± 0.0005"),
    ("text_python.md", "FSDP2 between shards, and PowerSGD, 3,000 steps", "-0.0015 ± 0.0023"),
    ("rows.md", "TorchRec's row-wise tables", "+0.0001 ± 0.0003 | +0.0011"),
    ("text_python.md", "Longer warm-ups", "+0.0146 ± 0.0036"),
    ("text_python.md", "3,000 steps with 2 and 4 ranks, 600 steps with 8", "+0.0568 ± 0.0006"),
]


@pytest.mark.parametrize(("page", "heading", "loss"), SOURCES)
def test_factors_and_losses_of_the_first_table_are_in_one_row(page, heading, loss):
    """The README's factor is half of float32's bytes, divided by the bytes of the loss's row."""
    section = PAGES[page].partition(f"## {heading}")[2] if heading else PAGES[page]
    rows = re.findall(r"\| ([\d,]+) \| ([\d.]+)x \|(.*)$", section, re.M)
    rows = [(int(sent.replace(",", "")), fewer, rest) for sent, fewer, rest in rows]
    place = next(n for n, row in enumerate(rows) if loss in row[2])
    float32 = [sent for sent, fewer, _ in rows[:place] if fewer == "1.0"][-1]
    factor = f"{float32 / 2 / rows[place][0]:.1f}x"
    shown = loss.partition(" | ")[0]
    assert re.search(rf"^\| .*\b{factor}\b.*{re.escape(shown)}", README, re.M)


def test_results_contain_no_path_of_a_machine():
    for path in KEPT:
        assert not re.search(r"/(home|root|work|tmp|mnt|opt|Users)/", path.read_text()), path
