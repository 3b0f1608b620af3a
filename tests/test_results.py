"""bench/results: what pages and their tables say is what was measured."""

import json
import re

import pytest
from programs import ROOT
from ptx import costs
from ptx import report as counts

import tables
from dlrm import files
from dlrm.errors import UsageError
from experiments import run_files
from microbench import report as kernels
from network import report as links
from pages import __main__ as report
from pages import blocks, experiments, figures, pictures, render, trained

ALL = experiments.load()
MADE = report.made()


def test_pages_and_figures_are_as_they_are_made():
    """After a change of results or of the report: in bench/, python -m pages"""
    assert [path.name for path in report.differing(MADE)] == []


def test_counts_are_those_of_the_baseline():
    """Otherwise: python -m ptx baseline, in tests/."""
    _, baseline = costs.load()
    kept = ALL["kernels_counted"].of_part(counts.PART)
    assert kept == counts.runs(baseline.values())


def test_a_wrong_figure_in_a_page_is_caught(tmp_path, monkeypatch):
    monkeypatch.setattr(render, "PAGES", tmp_path)
    texts = {tmp_path / path.name: text for path, text in MADE.items()}
    for path, text in texts.items():
        path.write_text(text)
    assert report.differing(texts) == []
    page = tmp_path / "text_3000.md"
    page.write_text(page.read_text().replace("-0.0029 ± 0.0021", "-0.0039 ± 0.0021"))
    assert report.differing(texts) == [page]
    page.unlink()
    assert report.differing(texts) == [page]


def test_a_page_that_no_experiment_has_is_caught(tmp_path, monkeypatch):
    monkeypatch.setattr(render, "PAGES", tmp_path)
    (tmp_path / "gone.md").write_text(f"{render.MADE}\n# Gone\n")
    (tmp_path / "by_hand.md").write_text("# Ours\n")
    assert report.differing({}) == [tmp_path / "gone.md"]


PAGE = ROOT / "docs" / "guide" / "page.md"  # which need not exist


def _block(name, inside="", end="<!-- end figure -->"):
    return f"# Title\n<!-- figure: {name} -->\n{inside}{end}\nafter\n"


def test_every_figure_stands_on_a_page():
    marked = re.compile(r"<!-- figure: (\S+) -->")
    named = {name for page in blocks.pages() for name in marked.findall(page.read_text())}
    assert named - {"NAME"} == figures.FIGURES.keys()


@pytest.mark.parametrize("name", sorted(figures.FIGURES))
def test_a_block_is_filled_and_a_wrong_figure_in_it_is_caught(name):
    filled = blocks.fill(PAGE, _block(name), ALL)
    assert filled.endswith("<!-- end figure -->\nafter\n")
    assert blocks.fill(PAGE, filled, ALL) == filled
    figure = re.search(r"(?<=\| )[+-]?\d", filled)  # in the table
    wrong = f"{filled[: figure.start()]}9{filled[figure.start() :]}"
    assert blocks.fill(PAGE, wrong, ALL) == filled != wrong


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (_block("no-such"), r"page.md: no figure 'no-such'; there are .*fsdp2"),
        (_block("buckets", end=""), "a figure must begin with <!-- figure: NAME --> and end with"),
        (_block("buckets", _block("buckets", end="")), "must begin with"),
        ("<!-- end figure -->\n" + _block("buckets"), "must begin with"),
        (_block("two words"), "must begin with"),
    ],
    ids=["unknown", "no end", "one in another", "no beginning", "not a name"],
)
def test_blocks_that_are_refused(text, rule):
    with pytest.raises(UsageError, match=rule):
        blocks.fill(PAGE, text, ALL)


def test_a_page_is_found_from_where_the_block_stands():
    assert "](docs/results/bucket_sizes.md)" in blocks.render("buckets", ROOT / "README.md", ALL)


def _runs(method, losses, rate=1.0, **more):
    return [
        {"method": method, "seed": seed, "rate": rate, "test": {"loss": loss}, "bytes_per_step": 8}
        | more
        for seed, loss in enumerate(losses)
    ]


def test_means_and_differences_by_seed():
    """By hand: 1.2 and 1.6 less 1.0 and 1.2 are 0.2 and 0.4: 0.3 ± 0.1, the error of the mean."""
    table = trained.scores(_runs("dense", [1.0, 1.2]) + _runs("dct:1%", [1.2, 1.6]))
    dense, dct = (line.split(" | ") for line in table.splitlines()[2:])
    assert dense[3] == "1.1000 ± 0.1414" and dense[4] == "1.2000"
    assert dct[:3] == ["| hook, 1 %", "8", "1.0x"]
    assert dct[3:7] == ["1.4000 ± 0.2828", "1.6000", "+0.3000 ± 0.1000", "+0.4000"]


def test_the_report_of_a_bench_chooses_rates_and_tells_what_diverged():
    """As two_dimensional and its like write their runs."""

    def record(name, rate, seed, loss, **sent):
        score = {"auc": 0.7, "log_loss": loss}
        found = {"exchange": name, "rate": rate, "seed": seed, "validation": score}
        found |= {"step_ms_median": 9.0 + seed} | ({"test": score} if seed else {})
        return found | {f"{key}{experiments.BYTES}": value for key, value in sent.items()}

    records = [record("mp", rate, 0, loss) for rate, loss in ((1, 0.5), (3, 0.4), (9, 0.45))]
    records += [record("scaled/10", rate, 0, loss) for rate, loss in ((1, 0.3), (3, 0.4))]
    records += [{"exchange": "scaled/10", "rate": 9, "seed": 0, "diverged": True}]
    rows = {"mp_forward": 60, "mp_backward": 40}
    for seed, loss in ((1, 0.42), (2, 0.44)):
        records.append(record("mp", 3, seed, loss, **rows))
        records.append(record("scaled/10", 1, seed, loss + seed / 100, sync=50))
    lines = trained.report(records).splitlines()
    dense, scaled = (
        next(line.split(" | ") for line in lines if line.startswith(f"| {name} |"))
        for name in ("one group of all ranks", "2 replicas, every 10, accumulators halved")
    )
    assert dense[4:6] == ["100", "1.0x"] and dense[-3:] == ["3", "10.5 (10.0-11.0)", "2 |"]
    assert scaled[3:6] == ["50", "50", "2.0x"] and scaled[-3] == "1"
    assert "+0.0150 ± 0.0050" in scaled
    assert "| 2 replicas, every 10, accumulators halved | 0.3000 | 0.4000 | diverged |" in lines


def test_differences_are_of_the_same_seeds():
    dense = _runs("dense", [1.0, 1.2, 9.0])
    assert trained.over(_runs("dct:1%", [1.5])[:1], dense) == [0.5]
    assert trained.over([run | {"seed": 7} for run in _runs("dct:1%", [1.5])], dense) == []


def test_a_rate_is_chosen_by_validation_after_600_steps_not_by_the_test_part():
    short = _runs("dct:1%", [5.0], 1.0, steps=600, validation_loss=2.0)
    short += _runs("dct:1%", [4.0], 3.0, steps=600, validation={"loss": 3.0})
    long = _runs("dct:1%", [2.0, 2.5], 1.0, steps=3000)
    long += _runs("dct:1%", [1.0], 3.0, steps=3000, validation_loss=1.0)
    assert trained.best(short) == {"dct:1%": short[:1]}
    assert trained.best(long, [*short, *long]) == {"dct:1%": long[:2]}
    lower = _runs("dct:1%", [9.0], 0.5, steps=600, validation_loss=1.0)  # not run for longer
    assert trained.best(long, [*short, *lower, *long]) == {"dct:1%": long[:2]}
    lost = [*_runs("dct:1%", [0.1], 9.0, steps=600), {"method": "topk:1%", "seed": 0}]
    lost = [run | {"diverged": 7} for run in lost]
    assert trained.best(short + lost) == {"dct:1%": short[:1]}


def test_tables_of_a_link():
    """README's table: bytes and time of DCT and of float32, as the run has them."""
    (run,) = ALL["link_few_bits"].runs
    cells = {cell["mode"]: cell for cell in run["cells"] if cell["rate"] == 1e9}
    assert cells["dense"]["payload_bytes"] == 5_523_396  # as tests/test_readme.py counts them
    assert cells["dct"]["payload_bytes"] == 34_944
    low, median, high = cells["dct"]["step_ms"]
    assert f"| {median:.1f} ({low:.1f}-{high:.1f}) |" in links.render([run])
    assert f"| 158.1x | {median:.1f} |" in figures.methods(ALL)


def test_of_copy_is_the_copy_over_the_op():
    times = {"copy": 2.0, "cpp": 4.0, "topk": 40.0, "eager": 80.0}
    ms = {name: {"median": t, "q20": t, "q80": t} for name, t in times.items()}
    run = {"op": "mask_pack", "case": "c", "numel": 8, "density": 0.01, "bytes": 9e6, "ms": ms}
    line = kernels.render([run]).splitlines()[2]
    assert line == "| `mask_pack` | c | 1 % | 8 | 9.0 | 4 (4-4) | 50 % | 20x | topk 10x |"


def test_runs_of_an_unknown_kind_are_shown_as_they_are():
    assert render.tables([{"a": 1, "b": 0.25, "c": [1]}]).splitlines()[2] == "| 1 | 0.25 |"


def test_a_finished_folder_becomes_an_experiment(tmp_path):
    """Of mp_formats and its like, whose records are read as dp_density's are."""
    folder = tmp_path / "runs"
    folder.mkdir()
    for exchange, seed, loss in (("float32", 1, 0.5), ("int4", 1, 0.75), ("int4", 2, 0.25)):
        run = run_files.Run(exchange, 2.0, seed)
        test = {"auc": 0.5, "log_loss": loss}
        sent = {"mp_forward_bytes_per_step_per_rank": 16 if exchange == "float32" else 2}
        files.write_json(run.path(folder), run._asdict() | {"settings": {}, "test": test} | sent)
    into = tmp_path / "results" / "today"
    into.mkdir(parents=True)
    arguments = ["--collect", "mine", str(folder), "--into", str(into), "--command", "this"]
    report.collect(report.parse(arguments))
    found = experiments.load(into.parent)["mine"]
    assert found.command == "this" and len(found.runs) == 3
    assert "| int4 | 2 | 2 | 8.0x | 0.5000 ± 0.0000 |" in render.tables(found.runs)
    with pytest.raises(UsageError, match=r"must have a new NAME, .*mine.json is there"):
        report.collect(report.parse(arguments))
    with pytest.raises(UsageError, match="must hold the files of finished runs"):
        report.collect(report.parse(["--collect", "none", str(into.parent), "--into", str(into)]))


def test_experiments_that_are_refused(tmp_path):
    def refused(content, rule, name="one"):
        path = tmp_path / "day" / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
        with pytest.raises(UsageError, match=rule):
            experiments.load(tmp_path)

    good = dict.fromkeys(experiments.REQUIRED, "-") | {"group": "Kernels", "runs": []}
    (tmp_path / "day").mkdir()
    (tmp_path / "day" / "one.json").write_text('{"title": ')
    with pytest.raises(UsageError, match=r"one\.json must be JSON: Expecting value"):
        experiments.load(tmp_path)
    refused([1], "must have title, group, command, commit, machine, date")
    refused(good | {"commit": ""}, "one.json must have commit")
    refused(good | {"group": "Others"}, "one.json must have a group of Gradients: quality, ")
    refused(good | {"colour": "red"}, "must have the keys of an experiment.*colour")
    (tmp_path / "day" / "one.json").write_text(json.dumps(good))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "one.json").write_text(json.dumps(good))
    with pytest.raises(UsageError, match="must have a name of its own"):
        experiments.load(tmp_path)


def test_no_path_of_a_machine_is_in_a_result():
    for path in (ROOT / "bench" / "results").rglob("*.json"):
        assert not re.search(r"/(home|root|work|tmp|mnt|opt|Users)/", path.read_text()), path


def test_every_page_is_in_the_index_and_its_links_lead_somewhere():
    index = MADE[render.PAGES / "README.md"]
    assert sorted(re.findall(r"\]\((\w+)\.md\)", index)) == sorted(ALL)
    for page, text in MADE.items():
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
            assert target.startswith("https://") or (page.parent / target).exists(), (page, target)


def test_every_bench_is_named():
    index = (ROOT / "bench" / "README.md").read_text()
    files = [*(ROOT / "bench").glob("*.py"), *(ROOT / "bench" / "experiments").glob("*.py")]
    programs = {path.stem for path in files if "__main__" in path.read_text()}
    assert programs <= set(re.findall(r"^\| `(?:.* bench/)?(\w+)(?:\.py)?`", index, re.MULTILINE))


def test_pictures_are_drawn_and_every_one_that_is_named_is_there(tmp_path):
    pictures.draw(ALL, tmp_path)
    named = set()
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(
            r"(?:src|srcset)=\"([^\"]+)\"|!\[[^]]*\]\(([^)]+)\)", page.read_text()
        ):
            named.add((page.parent / "".join(target)).resolve())
    assert named == set(pictures.IMAGES.iterdir())
    drawn = {pictures.IMAGES / path.name for path in tmp_path.iterdir()}
    assert drawn < named
    badges = "badges.svg"  # no numbers that a machine rounds in its own way
    assert (tmp_path / badges).read_text() == (pictures.IMAGES / badges).read_text()


def test_tables_are_aligned_for_a_terminal():
    table = tables.table(["", "ms"], [["dense", "541.2"], ["DCT", "9"]])
    assert tables.aligned(f"**2 ranks**\n\n{table}").splitlines() == [
        "**2 ranks**",
        "",
        "|       | ms    |",
        "| ----- | ----- |",
        "| dense | 541.2 |",
        "| DCT   | 9     |",
    ]
