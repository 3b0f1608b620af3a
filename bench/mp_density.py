"""Hybrid DLRM over densities of its pooled-embedding exchange; mp_formats.py has rows in few bits.

    python bench/mp_density.py --data ROWS.tsv --epochs 5 --batch-size 64 --seeds 3
    python bench/mp_density.py --rows 1000000 --densities 0.25,0.075 --embedding-lrs 3,10

All runs of a seed start from the same weights and see the same batches; the MLPs' gradients are
averaged in float32, so that only the exchange of rows differs. Prints a table of bytes and scores;
writes summary.json. Where few entries of a row cross, few are trained in a step, so that tables
want a higher learning rate: with --embedding-lrs everything is trained with each rate, and the
table shows the one that is best for it, by mean log loss; summary.json has all.

--ablations adds, for each density:

    fresh mask        the backward pass sends its own largest gradients, not those of the mask
    one threshold     the largest entries of the whole batch cross, not those of every row
    wide rows         a row is what all tables of a rank say of a sample, not one table's embedding
    off at inference  the trained model, tested with all entries crossing

The first two compute on whole tensors; their bytes are not counted. Other options, and --out, are
those of dct-train.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor
from torch.autograd.function import once_differentiable

from dct_dlrm import arguments, loop, progress
from dct_dlrm.data import dataset
from dct_dlrm.data.features import TABLES
from dct_dlrm.launch import launch
from dct_dlrm.models.row_exchange import EXCHANGES, every_entry, largest_entries
from dct_dlrm.modes import MODES
from dct_parallel import pack_rows, unpack_rows
from dct_parallel.rows.all_to_all import Exchange
from dct_parallel.rows.packing import row_k

VALUE_DTYPE = torch.bfloat16  # as largest_entries has it
WHOLE = every_entry("float32", "float32")


class FreshMask(torch.autograd.Function):
    """Nothing forward; of the gradient the k largest entries of every row."""

    @staticmethod
    def forward(ctx, x: Tensor, k: int) -> Tensor:
        ctx.k = k
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return unpack_rows(*pack_rows(grad, ctx.k, VALUE_DTYPE), grad.shape[1], grad.dtype), None


def fresh_mask(density: float) -> Exchange:
    def exchange(x, splits, output_splits, *, group):
        k = row_k(x.shape[1], density)
        kept = unpack_rows(*pack_rows(x.detach(), k, VALUE_DTYPE), x.shape[1], x.dtype)
        sent = x + (kept - x).detach()  # the values of `kept`, the gradient of every entry
        return FreshMask.apply(WHOLE(sent, splits, output_splits, group=group), k)

    return exchange


def one_threshold(density: float) -> Exchange:
    def exchange(x, splits, output_splits, *, group):
        size = x.detach().abs()
        kept = row_k(x.shape[1], density) * len(x)
        threshold = size.flatten().kthvalue(size.numel() - kept + 1).values
        sent = (x * (size >= threshold)).to(VALUE_DTYPE)
        return WHOLE(sent.to(x.dtype), splits, output_splits, group=group)

    return exchange


def wide_rows(density: float) -> Exchange:
    packed = largest_entries(density)

    def exchange(x, splits, output_splits, *, group):
        tables, rest = divmod(TABLES, group.size())
        if rest:
            raise ValueError(f"wide rows need ranks that divide {TABLES}, got {group.size()}")
        per_sample = [[count // tables for count in counts] for counts in (splits, output_splits)]
        ranks, width = group.size(), x.shape[1]  # rows come for every rank table by table
        wide = x.view(ranks, tables, -1, width).transpose(1, 2).reshape(-1, tables * width)
        arrived = packed(wide, *per_sample, group=group).view(ranks, -1, tables, width)
        return arrived.transpose(1, 2).reshape(-1, width)

    return exchange


class Variant(NamedTuple):
    """One way of exchanging rows; `counted`: whether the bytes it sends are its own."""

    exchange: Exchange
    density: float | None = None
    ablation: bool = False
    counted: bool = True


def variants(args: argparse.Namespace) -> dict[str, Variant]:
    """Everything that is trained, by name, in the order of the table; uncompressed first."""
    found = {
        "float32": Variant(WHOLE),
        "float16": Variant(every_entry("float16", "float16")),
    }
    for density in args.densities:
        found[f"DCT {100 * density:.4g} %"] = Variant(largest_entries(density), density)
    for density in [density for density in args.densities if args.ablations and density < 1]:
        name = f"{100 * density:.4g} %, "
        found[name + "fresh mask"] = Variant(fresh_mask(density), density, True, False)
        found[name + "one threshold"] = Variant(one_threshold(density), density, True, False)
        found[name + "wide rows"] = Variant(wide_rows(density), density, True)
    return found


def work(options: argparse.Namespace, args: argparse.Namespace) -> None:
    """All runs, on one rank."""
    console = Console() if dist.get_rank() == 0 else None
    data = dataset.load(options)
    trained = variants(args)
    for name, variant in trained.items():
        EXCHANGES[name] = lambda options, exchange=variant.exchange: exchange
        MODES[name] = MODES["dense"]
    records = []
    for seed, lr, (name, variant) in product(
        range(options.seeds), args.embedding_lrs, trained.items()
    ):
        options.embedding_lr = lr
        steps = options.epochs * data.description["steps_per_epoch"]
        run_name = f"{name}, lr {lr:g}, seed {seed}"
        with progress.bar(console, run_name, steps) as on_step:
            model, run = loop.train(name, seed, data, options, on_step)
        record = run.summary() | variant._asdict() | {"exchange": name, "embedding_lr": lr}
        record["auc"], record["log_loss"], _ = loop.test(model, data.test, data.train)
        if args.ablations and variant.density:
            model.exchange = WHOLE
            record["auc_off"], record["log_loss_off"], _ = loop.test(model, data.test, data.train)
        model.close()
        records.append(record)
        if console is not None:
            scores = f"AUC {record['auc']:.4f}, log loss {record['log_loss']:.4f}"
            console.print(f"{run_name}: {scores}", highlight=False)
    if console is not None:
        write(options, data.description, records)
        console.print(f"\n{table(records)}\n", markup=False, highlight=False, soft_wrap=True)
        console.print(f"in {options.out}: summary.json", style="dim")


def exchanged(record: dict) -> float:
    """Bytes of rows in a step, forward and backward."""
    directions = ("mp_forward", "mp_backward")
    return sum(record[f"{direction}_bytes_per_step_per_rank"] for direction in directions)


def best(records: Sequence[dict]) -> dict[str, list[dict]]:
    """Of every exchange its runs, one per seed, at the learning rate of lowest mean log loss."""
    runs: dict[str, dict[float, list[dict]]] = {}
    for record in records:
        of_exchange = runs.setdefault(record["exchange"], {})
        of_exchange.setdefault(record["embedding_lr"], []).append(record)
    return {
        name: min(by_rate.values(), key=lambda runs: statistics.mean(r["log_loss"] for r in runs))
        for name, by_rate in runs.items()
    }


def table(records: Sequence[dict]) -> str:
    """Markdown: mean and standard deviation over seeds."""
    scores = {"auc": "AUC", "log_loss": "log loss", "auc_off": "AUC, off at inference"}
    scores = {key: title for key, title in scores.items() if any(key in run for run in records)}
    headings = ["rows", "bytes forward", "backward", "fewer by", *scores.values(), "tables' lr"]
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    dense = exchanged(records[0])
    for name, runs in best(records).items():
        sent = ["", "", ""]
        if runs[0]["counted"]:
            sent = [
                f"{runs[0][f'mp_{direction}_bytes_per_step_per_rank']:,.0f}"
                for direction in ("forward", "backward")
            ]
            sent.append(f"{dense / exchanged(runs[0]):.1f}x")
        cells = [name, *sent, *(spread(runs, key) for key in scores)]
        lines.append("| " + " | ".join([*cells, f"{runs[0]['embedding_lr']:g}"]) + " |")
    ids = records[0]["ids_bytes_per_step_per_rank"]
    return "\n".join([*lines, "", f"Beside it, {ids:,.0f} bytes of ids a step in every run."])


def spread(runs: Sequence[dict], key: str) -> str:
    values = [run[key] for run in runs if key in run]
    if not values:
        return ""
    deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{deviation}"


def write(options: argparse.Namespace, description: dict, records: list[dict]) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    config = {key: str(value) for key, value in vars(options).items() if key != "embedding_lr"}
    config |= {"ranks": dist.get_world_size(), "torch": torch.__version__}
    summary = {"config": config, "data": description, "runs": records}
    Path(options.out, "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--densities", default="1,0.5,0.25,0.125,0.0625", help="of a row")
    parser.add_argument("--embedding-lrs", help="of the tables; default that of all")
    parser.add_argument("--ablations", action="store_true", help="train the variants above, too")
    args, rest = parser.parse_known_args()
    args.densities = [float(density) for density in args.densities.split(",")]
    options = arguments.parse(["--out", "runs/mp_density", *rest, "--parallel", "hybrid"])
    rates = args.embedding_lrs.split(",") if args.embedding_lrs else [options.lr]
    args.embedding_lrs = [float(rate) for rate in rates]
    launch(work, options.ranks, options, args)


if __name__ == "__main__":
    main()
