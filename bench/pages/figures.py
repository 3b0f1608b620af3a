"""Tables of figures from results, for blocks in other pages (blocks.py): small, a few columns."""

import textwrap
from collections.abc import Callable, Mapping, Sequence

from dct_parallel.exchange.codec import Settings
from dct_parallel.exchange.plan import BucketPlan
from tables import difference, mean, number, plain, table, times

from . import trained
from .experiments import Experiment

Experiments = Mapping[str, Experiment]
FIGURES: dict[str, tuple[Callable[[Experiments], str], tuple[str, ...]]] = {}


def figure(*sources: str) -> Callable:
    """Of a function of all experiments that makes a table: the pages that it is from."""

    def add(make: Callable[[Experiments], str]) -> Callable:
        FIGURES[make.__name__.replace("_", "-")] = make, sources
        return make

    return add


@figure("link_few_bits", "thresholds", "text_python", "mp_formats", "link_hybrid_formats")
def methods(experiments: Experiments) -> str:
    """What to use, in one table."""
    (run,) = experiments["link_few_bits"].runs
    criteo = _methods(experiments["thresholds"].of_part("criteo"), "clicks-sgd", 270)
    text = on_python(experiments, "warm-2-long")
    kaggle, _ = row_runs(experiments)
    hybrid = experiments["link_hybrid_formats"].of_part("ranks-2")[0]
    rows = [
        [HOOK, *_step(run, "dct"), _over(criteo, "dct:0.5%")],
        [INT4, *_step(run, "dct-int4"), _over(text, "int4")],
        [TERNARY, *_step(run, "local-ternary"), _over(text, "local-ternary:100%x10")],
        [
            ROWS,
            trained.factor(kaggle["int4,int4+dedup"], kaggle["float32"]),
            _step(hybrid, "hybrid-format-dedup")[1],
            _over(kaggle, "int4,int4+dedup"),
        ],
    ]
    clicks = "a click model, SGD ([with momentum](docs/guide/choosing.md#momentum))"
    trains = (clicks, "a transformer, AdamW", "the same, fewer bytes")
    for row, what in zip(rows, (*trains, "embedding rows between ranks"), strict=True):
        row.insert(0, what)
    headings = ["you train", "use", "fewer bytes", "ms at 1 Gbit/s"]
    return table([*headings, "loss over float32's (negative is better)"], rows)


def _step(run: dict, mode: str) -> tuple[str, str]:
    """How many times fewer bytes a step has than float32's, and its milliseconds at 1 Gbit/s."""
    cells = {cell["mode"]: cell for cell in run["cells"] if cell["rate"] == 1e9}
    sent = {name: cell["payload_bytes"] for name, cell in cells.items()}
    fewer = sent.get("dense", sent.get("hybrid-dense")) / sent[mode]
    return times(fewer), f"{cells[mode]['step_ms'][1]:.1f}"


HOOK = "`DCTState(ddp, density=0.005)`"
INT4 = '`DCTState(ddp, format="int4")`'
TERNARY = "`DCTAverager(model, period=10)`"
ROWS = '`all_to_all_rows(x, splits, format="int4")`, distinct rows'


def _over(methods: dict[str, list[dict]], name: str) -> str:
    return difference(trained.over(methods[name], trained.baseline(methods)))


def _times(methods: dict[str, list[dict]], name: str) -> str:
    return trained.factor(methods[name], trained.baseline(methods))


def _methods(runs: Sequence[dict], problem: str, steps: int) -> dict[str, list[dict]]:
    of_problem = [run for run in runs if trained.problem(run) == problem]
    return trained.best([run for run in of_problem if run["steps"] == steps], of_problem)


def on_python(experiments: Experiments, part: str) -> dict[str, list[dict]]:
    """The transformer's methods on Python sources, each at its best rate, without transports."""
    methods = trained.best(experiments["text_python"].of_part(part))
    return {name.replace(",transport=reduce_scatter", ""): runs for name, runs in methods.items()}


@figure("text_python")
def transformers(experiments: Experiments) -> str:
    """What to use for so many bytes."""
    parts = ("ranks-2", "ranks-2-long", "ranks-4", "ranks-4-long")
    columns = [on_python(experiments, part) for part in parts]
    rows = []
    for use, name in (
        ("DDP with torch's `bf16_compress_hook`", "bf16"),
        (f"{INT4} and `dct_hook`", "int4"),
        ("weights averaged in float32, every 10 steps", "local-float32:100%x10"),
        ('the hook with `format="ternary"`', "ternary"),
        (TERNARY.replace("10", "3"), "local-ternary:100%x3"),
        ("`period=6`, spaced as below", "local-ternary:100%x6,spaced=root"),
        (TERNARY, "local-ternary:100%x10"),
    ):
        over = [_over(methods, name) if name in methods else "" for methods in columns]
        rows.append([_times(columns[0], name), use, *over])
    headings = [f"{ranks} ranks, {steps} steps" for ranks in (2, 4) for steps in ("600", "3,000")]
    return table(["fewer bytes by", "use", *headings], rows)


@figure("text_python")
def warm_ups(experiments: Experiments) -> str:
    """The same where the rate rises for longer."""
    parts = {"warm-2-long": "ranks-2-long", "warm-4": "ranks-4"}
    columns = [on_python(experiments, part) for part in parts]
    short = [on_python(experiments, part)["dense"] for part in parts.values()]
    own = [trained.over(of["dense"], dense) for of, dense in zip(columns, short, strict=True)]
    rows = [["float32, over its own after 50", *map(difference, own)]]
    for use, name in (
        (INT4, "int4"),
        (TERNARY.replace("10", "3"), "local-ternary:100%x3"),
        ("`period=6`, spaced as below", "local-ternary:100%x6,spaced=root"),
        (TERNARY, "local-ternary:100%x10"),
    ):
        rows.append([use, *(_over(of, name) if name in of else "" for of in columns)])
    headings = ["2 ranks, 300 of 3,000 steps", "4 ranks, 150 of 600 steps"]
    return table(["use", *headings], rows)


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


@figure("neighbours")
def momentum(experiments: Experiments) -> str:
    """DLRM under SGD with momentum; bytes as for 2 ranks."""
    averager = "`DCTAverager(model, period={}, density={}{})`".format
    columns = {
        "generated rows": "clicks-momentum",
        "Criteo's rows": "criteo-momentum",
        "4 ranks": "clicks-momentum-4",
    }
    of_part = experiments["neighbours"].of_part
    methods = [trained.best(of_part(part)) for part in columns.values()]
    methods = [
        {name.removesuffix(",transport=reduce_scatter"): runs for name, runs in of.items()}
        for of in methods
    ]
    rows = []
    for use, *names in (
        ("`DCTState(ddp, density=0.01)`", "dct:1%"),
        (HOOK, "dct:0.5%", "reduce_scatter:0.5%"),
        (TERNARY, "local-ternary:100%x10"),
        (averager(10, 0.01, ""), "local:1%x10"),
        (averager(1, 0.005, ", step_ahead=True"), "ahead:0.5%"),
        (averager(1, 0.001, ", step_ahead=True"), "ahead:0.1%"),
    ):
        found = [next((name for name in names if name in of), None) for of in methods]
        over = [_over(of, name) if name else "" for of, name in zip(methods, found, strict=True)]
        fewer = trained.steady if use.startswith("`DCTState") else trained.factor
        rows.append([fewer(methods[0][names[0]], methods[0]["dense"]), use, *over])
    return table(["fewer bytes by", "use", *columns], rows)


def row_runs(experiments: Experiments) -> tuple[dict, dict]:
    """{exchange: runs} on Kaggle's rows, and on generated ones."""
    of_part = experiments["mp_formats"].of_part
    return trained.best(of_part("kaggle")), trained.best(of_part("generated"))


@figure("mp_formats")
def rows(experiments: Experiments) -> str:
    """Rows of a hybrid DLRM, on Kaggle's rows and on generated ones."""
    found = []
    for name, option in (
        ("int4,int4+dedup", "--row-format int4 --dedup"),
        ("int4,ternary+dedup", "--row-format int4,ternary --dedup"),
        ("int4,sign+dedup", "--row-format int4,sign --dedup"),
        ("7.5%+dedup", "--row-density 0.075 --dedup"),
    ):
        row = [f"`{option}`"]
        for methods in row_runs(experiments):
            if not (own := methods.get(name)):
                row += ["", ""]
                continue
            dense = methods["float32"]
            rate = own[0]["rate"] / dense[0]["rate"]
            said = f", at {rate:g} times its rate" if rate != 1 else ""
            row.append(f"{trained.factor(own, dense)} ({trained.of_distinct(own)})")
            row.append(difference(trained.over(own, dense, "auc")) + said)
        found.append(row)
    headings = ["`train_dlrm.py --parallel hybrid` and", "fewer bytes by, Kaggle rows"]
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
    settings = Settings(0.005, "bfloat16")
    ranks, rows = (2, 4, 8, 64), []
    for name in ("all_gather", "reduce_scatter"):
        plans = [BucketPlan(("x",), (2**22,), settings, name, ranks=n) for n in ranks]
        ring = [8 * (n - 1) / n * 2**22 for n in ranks]
        factors = zip(ring, plans, strict=True)
        rows.append([f"`{name}`", *(f"{whole / plan.wire_bytes:.0f}x" for whole, plan in factors)])
    return table(["ranks", *map(str, ranks)], rows)


@figure()
def parameter_server(experiments: Experiments) -> str:
    """Computed: megabytes into and out of the busiest machine in a step, 2^22 elements at 0.5 %."""
    ranks, numel = (2, 4, 8, 64), 2**22
    settings = Settings(0.005, "bfloat16")
    pairs = [
        [BucketPlan(("x",), (numel,), settings, name, ranks=n) for n in ranks]
        for name in ("all_gather", "reduce_scatter")
    ]
    messages = [plan.payload_bytes for plan in pairs[0]]
    rows = {
        "one server: gradients compressed, the model sent back in float32": [
            n * (message + 4 * numel) for n, message in zip(ranks, messages, strict=True)
        ],
        "one server: the mean compressed, too": [
            2 * n * message for n, message in zip(ranks, messages, strict=True)
        ],
        "every rank owns a range: `reduce_scatter`": [2 * plan.wire_bytes for plan in pairs[1]],
    }
    cells = [[name, *(f"{each / 1e6:.2f}" for each in row)] for name, row in rows.items()]
    return table(["ranks", *map(str, ranks)], cells)


@figure()
def reliability(experiments: Experiments) -> str:
    """Cases of every part and door, and what each part checks."""
    parts = [each for each in experiments.values() if each.group == "Reliability"]
    parts.sort(key=lambda part: part.name)
    rows, checked = [], []
    for part in parts:
        name = part.name.removeprefix("reliability_")
        said = f"- **{name}**: {part.title[0].lower()}{part.title[1:]}. {part.question}"
        checked += textwrap.wrap(said, 118, subsequent_indent="  ", break_on_hyphens=False)
        links = [f"[{name}](docs/results/{part.name}.md)"] + [""] * len(part.runs[1:])
        rows += [[link, *_counts(run)] for link, run in zip(links, part.runs, strict=True)]
    found = table(["part", "door", "asked for", "run", "failed"], rows)
    return "\n".join([found, "", *checked])


def _counts(run: dict) -> list[str]:
    return [run["door"], *(f"{run[key]:,}" for key in ("asked", "done", "failed"))]
