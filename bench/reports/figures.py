"""Tables in README.md, docs/guide and bench/README.md, in blocks that are filled from results.

<!-- figure: NAME -->
... what the report writes ...
<!-- end figure -->
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dct_dlrm.errors import UsageError

from . import kernels, links, trained
from .experiments import Experiment
from .markdown import difference, mean, number, table, times
from .pages import ROOT, page_of

Experiments = Mapping[str, Experiment]
BEGIN, END = r"^<!-- figure: (\S+) -->\n", r"^<!-- end figure -->$"
BLOCK = re.compile(f"(?P<begin>{BEGIN})(?P<inside>.*?)(?P<end>{END})", re.DOTALL | re.MULTILINE)
MARK = re.compile(r"^<!-- (?:end )?figure\b", re.MULTILINE)
FIGURES: dict[str, tuple[Callable[[Experiments], str], tuple[str, ...]]] = {}


def figure(*sources: str) -> Callable:
    """Of a function of all experiments that makes a table: the pages that it is from."""

    def add(make: Callable[[Experiments], str]) -> Callable:
        FIGURES[make.__name__.replace("_", "-")] = make, sources
        return make

    return add


def pages() -> list[Path]:
    """Those that may have blocks."""
    guide = sorted((ROOT / "docs" / "guide").rglob("*.md"))
    return [ROOT / "README.md", ROOT / "bench" / "README.md", *guide]


def fill(page: Path, text: str, experiments: Experiments) -> str:
    """The page's text, its blocks made anew.

    Raises:
        UsageError: a block has no end, or no figure has its name.
    """
    blocks = list(BLOCK.finditer(text))
    if len(MARK.findall(text)) != 2 * len(blocks):  # one without the other, or inside of others
        rule = "a figure must begin with <!-- figure: NAME --> and end with <!-- end figure -->"
        raise UsageError(f"{page}: {rule}, a line each")

    def made(block: re.Match) -> str:
        return f"{block['begin']}{render(block[2], page, experiments)}\n{block['end']}"

    return BLOCK.sub(made, text)


def render(name: str, page: Path, experiments: Experiments) -> str:
    """A figure with links to its pages, as it stands in `page`.

    Raises:
        UsageError: there is none of this name.
    """
    if name not in FIGURES:
        raise UsageError(f"{page}: no figure {name!r}; there are {', '.join(sorted(FIGURES))}")
    make, sources = FIGURES[name]
    links_to = [
        f"[{experiments[source].title}]({_relative(page_of(experiments[source]), page.parent)})"
        for source in sources
        if source in experiments
    ]
    return make(experiments) + (f"\n\nFrom: {'; '.join(links_to)}." if links_to else "")


def _relative(path: Path, folder: Path) -> str:
    up = 0
    while not path.is_relative_to(folder):
        folder, up = folder.parent, up + 1
    return "../" * up + path.relative_to(folder).as_posix()


@figure()
def index(experiments: Experiments) -> str:
    """Of bench/README.md: what was kept."""
    rows = [
        [
            each.question or each.title,
            f"`{_program(each.command)}`",
            f"[{each.name}.json](results/{each.path.parent.name}/{each.path.name})",
            f"[page](../docs/results/{each.name}.md)",
        ]
        for each in experiments.values()
    ]
    return table(["question", "command", "result", "page"], sorted(rows, key=lambda row: row[1:]))


def _program(command: str) -> str:
    """What of a command says which program it is."""
    found = re.search(r"[\w/]+\.(?:py|sh)|dct-bench\)? \w+|dct-train", command)
    return found[0].replace(")", "").removeprefix("bench/") if found else command.split()[0]


@figure("link_one_threshold")
def link_100mbit(experiments: Experiments) -> str:
    (run,) = experiments["link_one_threshold"].runs
    dense = run["cells"][0]["payload_bytes"]
    rows = [
        [
            links.label(run, cell["mode"]),
            number(cell["payload_bytes"]),
            times(dense / cell["payload_bytes"]),
            f"{cell['step_ms'][1]:.1f}",
        ]
        for cell in run["cells"]
    ]
    return table(["exchange", "bytes per step", "fewer by", "ms per step at 100 Mbit/s"], rows)


HEADINGS = ("exchange", "bytes per step", "fewer by", "loss", "difference", "at most", "seeds")


def _rows(methods: dict[str, list[dict]], names: Sequence[str], digits: int = 4) -> list[list[str]]:
    """A row for each of the methods beside the dense run, if they were trained."""
    dense = trained.baseline(methods)
    rows = []
    for name in names:
        if own := methods.get(name):
            losses = trained.over(own, dense) if own is not dense else []
            row = [trained.label(name), number(trained.sent(own))]
            row += [trained.factor(own, dense) if own is not dense else ""]
            row += [mean([run["test"]["loss"] for run in own], digits), difference(losses, digits)]
            rows.append([*row, f"{max(losses):+.{digits}f}" if losses else "", str(len(own))])
    return rows


def _methods(runs: Sequence[dict], problem: str, steps: int) -> dict[str, list[dict]]:
    of_problem = [run for run in runs if trained.problem(run) == problem]
    return trained.best([run for run in of_problem if run["steps"] == steps], of_problem)


TEXT = ("value_formats", "text_3000")
CORE = ("dense", "int4", "dct:1%", "local:10%x10", "local-e3m0:10%x10", "local-ternary:100%x10")


@figure(*TEXT)
def transformers(experiments: Experiments) -> str:
    """A transformer under AdamW with cosine, after 600 steps, and 3,000 once they are there.

    After 600 the main methods, and those that were trained for longer.
    """
    runs = [run for name in TEXT if name in experiments for run in experiments[name].runs]
    runs = _each_once([run for run in runs if trained.problem(run) == "text-adamw-cosine"])
    longer = {run["method"] for run in runs if run["steps"] > trained.RATE_STEPS}
    found = []
    for steps in sorted({run["steps"] for run in runs}):
        methods = _methods(runs, "text-adamw-cosine", steps)
        names = [name for name in methods if name in (*CORE, *longer)]
        names.sort(key=lambda name: -trained.sent(methods[name]))
        rows = [[f"{steps:,}", *row] for row in _rows(methods, names)]
        found += [[row[0] if number == 0 else "", *row[1:]] for number, row in enumerate(rows)]
    return table(["steps", *HEADINGS], found)


def _each_once(runs: Sequence[dict]) -> list[dict]:
    """The dense runs stand beside others more than once."""
    found = {(r["method"], r["rate"], r["seed"], r["steps"]): r for r in reversed(runs)}
    return list(reversed(found.values()))


def _choices(experiments: Experiments) -> list[tuple[str, str, dict[str, list[dict]], str]]:
    """(what is trained with, on what, {method: runs}, the method) of `optimizers`."""
    constant = experiments["dp_density"].runs
    thresholds = experiments["thresholds"].of_part
    formats = _each_once(
        [run for run in experiments["value_formats"].runs if trained.problem(run) == "text-adamw-cosine"]
    )
    criteo = _methods(thresholds("criteo"), "clicks-sgd", 270)
    adam = _methods(thresholds("adam"), "clicks-adam", 600)
    cosine = _methods(formats, "text-adamw-cosine", 600)
    momentum = _methods(constant, "text-momentum", 600)
    local = "local:10%x10"
    found = [("SGD", "DLRM, Criteo, 270 steps", criteo, f"dct:{d}%") for d in ("0.5", "0.1")]
    found.append(("AdaGrad and Adam", "DLRM, generated rows, 600 steps", adam, "dct:0.5%"))
    for name in ("int4", local, "local-e3m0:10%x10", "local-ternary:100%x10", "dct:1%"):
        found.append(("AdamW, cosine", "transformer, 600 steps", cosine, name))
    for steps in (600, 3000):
        of_steps = _methods(constant, "text-adamw", steps)
        found.append(("AdamW, constant rate", f"transformer, {steps:,} steps", of_steps, local))
    hook = _methods(thresholds("text"), "text-momentum", 600)
    found.append(("SGD with momentum", "transformer, 600 steps", momentum, local))
    found.append(("SGD with momentum", "transformer, 600 steps", hook, "dct:1%"))
    return found


@figure("thresholds", "value_formats", "dp_density")
def optimizers(experiments: Experiments) -> str:
    """What to use with which optimizer."""
    rows = []
    for optimizer, task, methods, name in _choices(experiments):
        (row,) = _rows(methods, [name])
        rows.append([optimizer, row[0], row[2], row[4], row[5], f"{task}, {row[6]} seeds"])
    headings = [
        "you train with",
        "exchange",
        "fewer bytes over the run",
        "loss over float32's",
        "at most",
    ]
    return table([*headings, "measured on"], rows)


@figure("thresholds")
def dlrm_sgd(experiments: Experiments) -> str:
    """DLRM under SGD on Criteo's rows, every method."""
    methods = _methods(experiments["thresholds"].of_part("criteo"), "clicks-sgd", 270)
    names = [name for name in methods if not name.endswith("before")]
    names.sort(key=lambda name: -trained.sent(methods[name]))
    return table(HEADINGS, _rows(methods, names))


@figure("mp_formats")
def rows_in_few_bits(experiments: Experiments) -> str:
    """Rows of a hybrid DLRM, on Kaggle's rows and on generated ones."""
    parts = [trained.best(experiments["mp_formats"].of_part(p)) for p in ("kaggle", "generated")]
    names = ("int4,int4+dedup", "int4,ternary+dedup", "int4,sign+dedup", "7.5%+dedup")
    rows = []
    for name in names:
        row = [trained.label(name)]
        for methods in parts:
            if own := methods.get(name):
                fewer = trained.factor(own, methods["float32"])
                row.append(f"{fewer} ({trained.of_distinct(own)})")
                row.append(difference(trained.over(own, methods["float32"], "auc")))
            else:
                row += ["", ""]
        rows.append(row)
    headings = ["rows", "fewer bytes by, Kaggle rows", "AUC over float32's"]
    return table([*headings, "generated rows", "AUC over float32's "], rows)


@figure("kernels_h100")
def kernels_h100(experiments: Experiments) -> str:
    return _kernels(experiments["kernels_h100"].runs, ("bf16 cast",))


@figure("kernels_cpu")
def kernels_cpu(experiments: Experiments) -> str:
    return _kernels(experiments["kernels_cpu"].runs, ("bf16 cast",))


def _kernels(runs: Sequence[dict], left_out: Sequence[str]) -> str:
    """The first case of every op, at its largest size and 1 % kept, of rows 256 wide."""
    found: dict[str, dict] = {}
    for run in sorted(runs, key=lambda run: -run["numel"]):
        usual = run["density"] in (None, 0.01) or run["op"].startswith("row_")
        if usual and not run.get("graphs") and re.search(r"(^[^\[]|, 256\])", run["case"]):
            found.setdefault(run["op"], run)
    rows = [
        [
            f"`{op}`",
            kernels.shape(run),
            number(run["numel"]),
            kernels.milliseconds(run),
            kernels.of_copy(run, kernels.ours(run)),
            kernels.of_copy(run, "triton") if "triton" in run["ms"] else "",
            kernels.peers(run, left_out),
        ]
        for op, run in found.items()
    ]
    headings = ["op", "case", "elements", "ms", "of copy", "Triton, of copy", "peers take"]
    return table(headings, rows)


@figure("link_nodes", "dlrm_nodes")
def nodes(experiments: Experiments) -> str:
    """Two nodes of two ranks: bytes between nodes, times, quality."""
    (run,) = experiments["link_nodes"].runs
    methods = trained.best(experiments["dlrm_nodes"].runs)
    auc = difference(trained.over(methods["dct"], methods["dense"], "auc"))
    rates = list(dict.fromkeys(cell["rate"] for cell in run["cells"]))
    rows = []
    for mode in dict.fromkeys(cell["mode"] for cell in run["cells"]):
        cells = [links.cell_of(run, 4, rate, mode) for rate in rates]
        row = [links.label(run, mode), number(cells[0]["payload_bytes"])]
        row += [f"{cell['step_ms'][1]:.1f}" for cell in cells]
        rows.append([*row, auc if mode == "dct-mesh" else ""])
    times_at = [f"ms at {links.rate_name(rate)}" for rate in rates]
    return table(["exchange", "bytes that leave the node", *times_at, "AUC over float32's"], rows)


@figure("two_dimensional")
def two_dimensional(experiments: Experiments) -> str:
    rows = []
    for part, task in (("generated", "generated rows, 2 ranks"), ("kaggle", "Kaggle rows, 2 x 2")):
        methods = trained.best(experiments["two_dimensional"].of_part(part))
        for name, own in methods.items():
            losses = trained.over(own, methods["mp"]) if name != "mp" else []
            syncs = number(trained.bytes_of(own, "sync"))
            row = [task, trained.label(name), syncs, mean([run["test"]["loss"] for run in own])]
            rows.append([*row, difference(losses), str(len(own))])
    headings = ["rows", "tables", "bytes of syncs per step", "loss", "difference", "seeds"]
    return table(headings, rows)


@figure("reduce_scatter_16")
def reduce_scatter(experiments: Experiments) -> str:
    """All-gather and reduce-scatter at 16 simulated ranks."""
    methods = _methods(experiments["reduce_scatter_16"].runs, "clicks-sgd", 270)
    return table(HEADINGS, _rows(methods, ["dense", "dct:0.5%", "reduce_scatter:0.5%"]))


@figure("des_quality")
def substitution(experiments: Experiments) -> str:
    """DES beside one process."""
    experiment = experiments["des_quality"]
    rows = []
    for part in experiment.parts:
        for name, own in trained.best(experiment.of_part(part.name)).items():
            scores = [mean([run["test"][score] for run in own]) for score in ("auc", "loss")]
            rows.append([part.title, name, *scores, str(len(own))])
    return table(["model", "", "AUC", "log loss", "seeds"], rows)
