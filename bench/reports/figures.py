"""Tables of figures from results, for blocks in other pages (blocks.py): small, a few columns."""

import re
from collections.abc import Callable, Mapping, Sequence

from . import kernels, links, trained
from .experiments import Experiment
from .markdown import difference, mean, number, plain, table, times

Experiments = Mapping[str, Experiment]
FIGURES: dict[str, tuple[Callable[[Experiments], str], tuple[str, ...]]] = {}


def figure(*sources: str) -> Callable:
    """Of a function of all experiments that makes a table: the pages that it is from."""

    def add(make: Callable[[Experiments], str]) -> Callable:
        FIGURES[make.__name__.replace("_", "-")] = make, sources
        return make

    return add


@figure()
def index(experiments: Experiments) -> str:
    """Of bench/README.md: what was kept."""
    rows = [
        [
            each.question or each.title,
            f"`{_program(each.command)}`",
            f"[{each.name}.json](bench/results/{each.path.parent.name}/{each.path.name})",
            f"[page](docs/results/{each.name}.md)",
        ]
        for each in experiments.values()
    ]
    return table(["question", "command", "result", "page"], sorted(rows, key=lambda row: row[1:]))


def _program(command: str) -> str:
    """What of a command says which program it is."""
    found = re.search(r"[\w/]+\.(?:py|sh)|dct-bench\)? \w+|dct-train", command)
    return found[0].replace(")", "").removeprefix("bench/") if found else command.split()[0]


@figure("link_one_threshold")
def headline(experiments: Experiments) -> str:
    """Bytes and time of a step over a slow link."""
    (run,) = experiments["link_one_threshold"].runs
    rows = []
    for cell in run["cells"]:
        bold = "**" if cell["mode"] == "dct" else ""
        name = links.label(run, cell["mode"]).replace("DCT, all-gather", "**DCT**")
        row = [name, number(cell["payload_bytes"]), _fewer(run, cell["mode"])]
        rows.append([*row, f"{bold}{cell['step_ms'][1]:.1f}{bold}"])
    return table(["exchange", "bytes per step", "fewer by", "ms per step at 100 Mbit/s"], rows)


def _fewer(run: dict, mode: str) -> str:
    sent = {cell["mode"]: cell["payload_bytes"] for cell in run["cells"]}
    return times(sent["dense"] / sent[mode]) if mode != "dense" else ""


@figure("link_one_threshold", "thresholds", "value_formats", "text_3000", "mp_formats")
def methods(experiments: Experiments) -> str:
    """What to use, in one table."""
    (run,) = experiments["link_one_threshold"].runs
    criteo = _methods(experiments["thresholds"].of_part("criteo"), "clicks-sgd", 270)
    text, longer = _cosine(experiments), _cosine(experiments, 3000)
    kaggle, generated = _row_runs(experiments)
    fewest, most = (
        trained.factor(of["int4,int4+dedup"], of["float32"]) for of in (kaggle, generated)
    )
    aucs = trained.over(kaggle["int4,int4+dedup"], kaggle["float32"], "auc")
    local = "local-ternary:100%x10"

    def over_both(name: str) -> str:
        return f"{_over(text, name)} after 600 steps, {_over(longer, name)} after 3,000"

    rows = [
        [
            "SGD, a click model",
            HOOK,
            _fewer(run, "dct"),
            f"{_over(criteo, 'dct:0.5%')} of log loss",
        ],
        ["Adam(W), a rate that decays", INT4, _times(text, "int4"), over_both("int4")],
        ["the same, with fewer bytes", TERNARY, _times(text, local), over_both(local)],
        ["embedding rows between ranks", ROWS, f"{fewest} to {most}", f"{difference(aucs)} of AUC"],
    ]
    guides = ("ddp", "transformers", "transformers", "rows")
    for row, page in zip(rows, guides, strict=True):
        row.append(f"[{page}](docs/guide/{page}.md)")
    headings = ["you train with", "use", "fewer bytes than float32", "loss over float32's", "page"]
    return table(headings, rows)


HOOK = "`DCTState(ddp, density=0.005)`"
INT4 = '`DCTState(ddp, density=1, value_dtype="int4")`'
TERNARY = '`DCTAverager(model, density=1, period=10, value_dtype="ternary")`'
ROWS = '`all_to_all_rows(x, splits, forward="int4", backward="int4")`, distinct rows'


def _over(methods: dict[str, list[dict]], name: str) -> str:
    return difference(trained.over(methods[name], trained.baseline(methods)))


def _times(methods: dict[str, list[dict]], name: str) -> str:
    return trained.factor(methods[name], trained.baseline(methods))


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


COSINE = "text-adamw-cosine"
TEXT = ("value_formats", "text_3000")


def _each_once(runs: Sequence[dict]) -> list[dict]:
    """The dense runs stand beside others more than once."""
    found = {(r["method"], r["rate"], r["seed"], r["steps"]): r for r in reversed(runs)}
    return list(reversed(found.values()))


def _text_runs(experiments: Experiments) -> list[dict]:
    """The transformer's under AdamW and cosine."""
    runs = [run for name in TEXT if name in experiments for run in experiments[name].runs]
    return _each_once([run for run in runs if trained.problem(run) == COSINE])


def _cosine(experiments: Experiments, steps: int = 600) -> dict[str, list[dict]]:
    """The transformer's methods under AdamW and cosine after so many steps."""
    return _methods(_text_runs(experiments), COSINE, steps)


@figure(*TEXT)
def transformers(experiments: Experiments) -> str:
    """What to use for so many bytes."""
    text, longer = _cosine(experiments), _cosine(experiments, 3000)
    rows = []
    for use, name in (
        ("DDP with torch's `bf16_compress_hook`", "bf16"),
        (f"{INT4} and `dct_hook`", "int4"),
        (TERNARY, "local-ternary:100%x10"),
        ("the same with `period=30`", "local-ternary:100%x30"),
        ("the same with `period=50`", "local-ternary:100%x50"),
    ):
        over = [_over(runs, name) if name in runs else "" for runs in (text, longer)]
        rows.append([_times(text, name), use, *over])
    return table(["fewer bytes by", "use", "loss, 600 steps", "loss, 3,000 steps"], rows)


@figure("thresholds")
def click_models(experiments: Experiments) -> str:
    """DLRM, by optimizer and density; bytes once the hook's first steps are over."""
    rows = []
    for optimizer, part, task, percents in (
        ("SGD", "criteo", "Criteo rows, 270 steps", ("0.5", "0.1")),
        ("row-wise AdaGrad on tables, Adam on MLPs", "adam", "generated rows, 600 steps", ("0.5",)),
    ):
        methods = trained.best(experiments["thresholds"].of_part(part))
        for percent in percents:
            own = methods[f"dct:{percent}%"]
            row = [optimizer, f"{percent} %", trained.steady(own, methods["dense"])]
            losses = trained.over(own, methods["dense"])
            row += [difference(losses), f"{max(losses):+.4f}"]
            rows.append([*row, f"{task}, {len(own)} seeds"])
    headings = ["optimizer", "density", "fewer bytes by", "log loss over float32's", "at most"]
    return table([*headings, "measured on"], rows)


def _choices(experiments: Experiments) -> list[tuple[str, str, dict[str, list[dict]], str]]:
    """(what is trained with, on what, {method: runs}, the method) of `optimizers`."""
    constant = experiments["dp_density"].runs
    thresholds = experiments["thresholds"].of_part
    criteo = _methods(thresholds("criteo"), "clicks-sgd", 270)
    adam = _methods(thresholds("adam"), "clicks-adam", 600)
    cosine = _cosine(experiments)
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


def _row_runs(experiments: Experiments) -> tuple[dict, dict]:
    """{exchange: runs} on Kaggle's rows, and on generated ones."""
    of_part = experiments["mp_formats"].of_part
    return trained.best(of_part("kaggle")), trained.best(of_part("generated"))


@figure("mp_formats")
def rows(experiments: Experiments) -> str:
    """Rows of a hybrid DLRM, on Kaggle's rows and on generated ones."""
    found = []
    for name, option in (
        ("int4,int4+dedup", "--mp-format int4,int4 --dedup"),
        ("int4,ternary+dedup", "--mp-format int4,ternary --dedup"),
        ("int4,sign+dedup", "--mp-format int4,sign --dedup"),
        ("7.5%+dedup", "--mp-density 0.075 --dedup"),
    ):
        row = [f"`{option}`"]
        for methods in _row_runs(experiments):
            if not (own := methods.get(name)):
                row += ["", ""]
                continue
            dense = methods["float32"]
            rate = own[0]["rate"] / dense[0]["rate"]
            said = f", at {rate:g} times its rate" if rate != 1 else ""
            row.append(f"{trained.factor(own, dense)} ({trained.of_distinct(own)})")
            row.append(difference(trained.over(own, dense, "auc")) + said)
        found.append(row)
    headings = ["`dct-train --parallel hybrid` and", "fewer bytes by, Kaggle rows"]
    headings += ["AUC over float32's", "generated rows", "AUC over float32's"]
    return table(headings, found)


@figure("torchrec_dlrm")
def torchrec(experiments: Experiments) -> str:
    """Codecs and the hook in TorchRec's DLRM."""
    found = trained.best(experiments["torchrec_dlrm"].of_part("quality"))
    dense = found["float32"]
    rows = []
    by_bytes = sorted(found.items(), key=lambda item: ("hook" in item[0], -trained.sent(item[1])))
    for name, runs in by_bytes:
        row = [trained.label(name) if name != "float32" else "no codec", number(trained.sent(runs))]
        row += [trained.factor(runs, dense), mean([run["test"]["auc"] for run in runs])]
        row.append("" if runs is dense else difference(trained.over(runs, dense, "auc")))
        rows.append(row)
    return table(["rows", "bytes of rows", "fewer by", "AUC", "over float32's"], rows)


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
def des_quality(experiments: Experiments) -> str:
    """DES beside one process."""
    experiment = experiments["des_quality"]
    rows = []
    for part in experiment.parts:
        for name, own in trained.best(experiment.of_part(part.name)).items():
            scores = [mean([run["test"][score] for run in own]) for score in ("auc", "loss")]
            rows.append([part.title, name, *scores, str(len(own))])
    return table(["model", "", "AUC", "log loss", "seeds"], rows)


@figure("des_bytes")
def substitution(experiments: Experiments) -> str:
    """Bytes of DES beside a parameter server's, 256 samples a rank."""
    rows = []
    for run in experiments["des_bytes"].runs:
        if run["batch a rank"] == "256":
            saved, once = run["saved by DES"].rstrip(")").split(" (")
            rows.append([run["model"], run["ids a sample"], saved, once])
    return table(["model", "ids per sample", "saved by DES", "against distinct rows once"], rows)


@figure("pipeline_lm")
def pipeline(experiments: Experiments) -> str:
    """A cut of a transformer, 1,000 steps."""
    shown = ("all, dense", "every entry, `int4`", "25 %", "10 %")
    runs = {run["of a row crosses"]: run for run in experiments["pipeline_lm"].of_part("1000")}
    keys = ("fewer bytes by", "held-out loss, 1,000 steps")
    rows = [[name, *(runs[name][key] for key in keys)] for name in shown]
    return table(["of a row is sent", "fewer bytes by", "held-out loss"], rows)


@figure("fully_sharded")
def fsdp2(experiments: Experiments) -> str:
    return plain(experiments["fully_sharded"].runs)


@figure("bucket_sizes")
def buckets(experiments: Experiments) -> str:
    return plain(experiments["bucket_sizes"].runs)


@figure()
def bytes_by_density(experiments: Experiments) -> str:
    """Computed: bytes of a step per element, headers left out."""
    ranks = (2, 4, 8)
    rows = [["float32 ring", *(f"{8 * (n - 1) / n:g}" for n in ranks)]]
    for density in (0.01, 0.005, 0.001):
        capacity = 1.25 * density  # of 4 bytes each
        sent = [f"{4 * capacity * (n - 1):.4g}" for n in ranks]
        rows.append([f"{100 * density:g} %", *sent])
    return table(["density", *(f"{n} ranks" for n in ranks)], rows)


@figure()
def bytes_by_ranks(experiments: Experiments) -> str:
    """Computed: times fewer bytes than a float32 ring, 2^22 elements at 0.5 %, headers and all."""
    import torch

    from dct_parallel.exchange.all_gather import AllGather
    from dct_parallel.exchange.codec import Settings
    from dct_parallel.exchange.plan import BucketPlan
    from dct_parallel.exchange.reduce_scatter import ReduceScatter

    settings = Settings(0.005, 1000, "fresh", torch.bfloat16)
    ranks, rows = (2, 4, 8, 64), []
    for name, transport in (("all_gather", AllGather), ("reduce_scatter", ReduceScatter)):
        plans = [BucketPlan(("x",), (2**22,), settings, transport, ranks=n) for n in ranks]
        ring = [8 * (n - 1) / n * 2**22 for n in ranks]
        factors = zip(ring, plans, strict=True)
        rows.append([f"`{name}`", *(f"{whole / plan.wire_bytes:.0f}x" for whole, plan in factors)])
    return table(["ranks", *map(str, ranks)], rows)
