"""TorchRec's own DLRM over codecs of its exchange of embeddings: quality, bytes and step time.

    python -m experiments.torchrec_dlrm --data ROWS.tsv --epochs 3 --batch-size 64 --out runs/kaggle
    sudo $(which python) -m experiments.torchrec_dlrm --link 1gbit --rows 40000 \\
        --batch-size 1024 --rates 0.003 --seeds 4

Needs torchrec and fbgemm-gpu (docs/guide/torchrec.md). torchrec.models.dlrm.DLRM in
DistributedModelParallel: each table on one rank, under row-wise AdaGrad as TorchRec fuses it into
the backward pass; the MLPs on all, by SGD. An exchange is one of

    float32                 TorchRec without codecs
    fp16, int8, mx4         FBGEMM's codecs, at their defaults: the last two have a scale for every
                            32 entries, and MX4 on a CPU is a slow reference
    FORWARD,BACKWARD        dct_embeddings.torchrec.qcomm_codecs, a scale for each embedding
    EXCHANGE+hook           compress_dense on the MLPs, too, of --density (default 0.01); without
                            it their gradients are averaged in float32

Rates of the tables are chosen by validation rows from seed 0, and test rows read from seeds 1, 2,
... at the best, as in mp_formats.py. With --link every rank is in a network namespace of its own,
and the link between them has that rate (as in bench/link.py; needs root): for the step times. They
are rank 0's medians, from batch to updated weights.

Other options are those of train_dlrm.py.
"""

import argparse
import math
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import QuantizedCommCodecs, ShardingPlan
from torchrec.models.dlrm import DLRM
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dct_embeddings import plan_shards
from dct_embeddings.torchrec import compress_dense, qcomm_codecs
from dct_parallel import DCTState, RowFormat
from dct_parallel.rows.counts import ROW_FORMATS
from dlrm import loop
from dlrm.command_line import Formatter, Parser, exit_status
from dlrm.data import dataset
from dlrm.data.features import INTS
from dlrm.errors import UsageError
from dlrm.launch import is_first, under_torchrun
from dlrm.modes import MODES, START_STEP
from network.namespaces import Namespaces
from pages import trained
from rates import parse_rate
from wire_meter import WireMeter

from .run_files import Run, add_rates, parse, scored, settings_of, train_by_rates, write_report

CPU = torch.device("cpu")
NAMES = ("float32", "fp16", "int8", "mx4", "int4,int4", "int4,ternary", "int4,sign")
NAMES += ("int4,sign+hook",)
FBGEMM = {"fp16": CommType.FP16, "int8": CommType.INT8, "mx4": CommType.MX4}
SETTINGS = ("rows", "test_fraction", "validation_fraction", "epochs", "batch_size", "lr")
SETTINGS += ("hash_size", "embedding_dim", "bottom", "top", "density", "link")
BAGS = "sparse_arch.embedding_bag_collection"
PURPOSES = ("ids", "mp_forward", "mp_backward", "dp")
PORT = "29500"  # in a namespace every port is free


def codecs(name: str, width: int) -> dict[str, QuantizedCommCodecs] | None:
    """A registry for an exchange's name, less +hook."""
    if name == "float32":
        return None
    if name in FBGEMM:
        config = QCommsConfig(forward_precision=FBGEMM[name], backward_precision=FBGEMM[name])
        return get_qcomm_codecs_registry(config, device=CPU)
    return qcomm_codecs(width, format=RowFormat(*name.split(",")))


class Clicks(nn.Module):
    """A DLRM under TorchRec's parallelism, called as this package's is.

    Args:
        rows: of each table.
        name: of the exchange.
        rate: of the tables.
        seed: of the weights.
    """

    def __init__(
        self, rows: Sequence[int], name: str, rate: float, seed: int, options: argparse.Namespace
    ) -> None:
        super().__init__()
        width = options.embedding_dim
        self._features = [f"f{t}" for t in range(len(rows))]
        tables = [
            EmbeddingBagConfig(
                name=f"t{t}", embedding_dim=width, num_embeddings=count, feature_names=[f"f{t}"]
            )
            for t, count in enumerate(rows)
        ]
        torch.manual_seed(seed)
        model = DLRM(
            EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
            dense_in_features=INTS,
            dense_arch_layer_sizes=[*options.bottom, width],
            over_arch_layer_sizes=[*options.top, 1],
        )
        bags = model.get_submodule(BAGS)
        apply_optimizer_in_backward(RowWiseAdagrad, bags.parameters(), {"lr": rate, "eps": 1e-8})
        sharder = EmbeddingBagCollectionSharder(qcomm_codecs_registry=codecs(name, width))
        ranks = dist.get_world_size()
        owners = enumerate(plan_shards(rows, ranks))
        of_tables = {f"t{s.table}": table_wise(rank=r) for r, own in owners for s in own}
        plan = construct_module_sharding_plan(
            bags, of_tables, sharder=sharder, local_size=ranks, world_size=ranks, device_type="cpu"
        )
        torch.manual_seed(seed * ranks + dist.get_rank())  # of the tables, which are made now
        self.dmp = DistributedModelParallel(
            model, device=CPU, plan=ShardingPlan(plan={BAGS: plan}), sharders=[sharder]
        )

    def mlps(self) -> list[nn.Parameter]:
        """What every rank has."""
        return [p for name, p in self.dmp.named_parameters() if BAGS not in name]

    def forward(self, ints: Tensor, ids: Tensor) -> Tensor:
        """Logits [batch] of integers float32 [batch, 13] and table rows int32 [batch, tables]."""
        values = ids.t().flatten().long()
        lengths = torch.ones(values.numel(), dtype=torch.int32)
        features = KeyedJaggedTensor.from_lengths_sync(self._features, values, lengths)
        return self.dmp(ints, features).squeeze(1)


class Sent:
    """A context: bytes that this rank sends, step by step, by what they are for (`PURPOSES`).

    An all-to-all of integers of 32 bits and more has ids and their counts, any other has rows;
    whatever is no all-to-all has the MLPs' gradients.
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, int]] = []
        self._now, self._way = dict.fromkeys(PURPOSES, 0), "mp_forward"
        self._all = WireMeter()

    def __enter__(self) -> "Sent":
        self._original = dist.all_to_all_single
        dist.all_to_all_single = self._all_to_all
        self._all.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._all.__exit__(*raised)
        dist.all_to_all_single = self._original

    def forward_done(self) -> None:
        self._way = "mp_backward"

    def step_done(self) -> None:
        self._now["dp"] = self._all.take() - sum(self._now.values())
        self.steps.append(self._now)
        self._now, self._way = dict.fromkeys(PURPOSES, 0), "mp_forward"

    def _all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> dist.Work | None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        parts = input_split_sizes or [1] * ranks
        to_others = input.nbytes * (sum(parts) - parts[rank]) // max(1, sum(parts))
        self._now["ids" if input.dtype in (torch.int32, torch.int64) else self._way] += to_others
        splits = output_split_sizes, input_split_sizes
        return self._original(output, input, *splits, group, async_op)


def train(
    run: Run, data: dataset.Dataset, options: argparse.Namespace, on_step: Callable
) -> tuple[nn.Module, dict]:
    """The trained model, bytes by purpose and the median time of a step. Collective."""
    name, plus, _ = run.exchange.partition("+")
    model = Clicks(data.tables, name, run.rate, run.seed, options)
    ddp = model.dmp._dmp_wrapped_module
    state: DCTState | None = None
    if plus:
        state = compress_dense(model.dmp, density=options.density, start_step=START_STEP)
    else:
        MODES["dense"](ddp, options)  # DDP's own all-reduce is not counted
    optimizer = torch.optim.SGD(model.mlps(), options.lr, fused=True)
    times = []
    with Sent() as sent:
        steps = data.description["steps_per_epoch"]
        for batch in loop.batches_of(data.train, run.seed, steps, options):
            start = time.perf_counter()
            optimizer.zero_grad()
            logits = model(batch.ints, batch.ids)
            sent.forward_done()
            loss = binary_cross_entropy_with_logits(logits, batch.labels.float())
            loss.backward()
            optimizer.step()
            times.append(1e3 * (time.perf_counter() - start))
            sent.step_done()
            if not math.isfinite(loss.item()):
                raise UsageError(f"--rates must be so small that the loss stays finite: {run}")
            on_step(loss.item())
    if state is not None:
        state.close()
    usual = sent.steps[START_STEP:]
    sums = torch.tensor([[step[p] for p in PURPOSES] for step in usual]).sum(0)
    dist.all_reduce(sums)
    means = (sums.double() / (len(usual) * dist.get_world_size())).tolist()
    found = {f"{p}_bytes_per_step_per_rank": m for p, m in zip(PURPOSES, means, strict=True)}
    return model, found | {"step_ms_median": statistics.median(times[START_STEP:])}


def job(
    run: Run, data: dataset.Dataset, options: argparse.Namespace, on_step: Callable
) -> tuple[dict, str]:
    """Of `run_files`: one run."""
    warnings.simplefilter("ignore")  # TorchRec's are its own; it asks for torchrun's variables
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(LOCAL_RANK=rank, LOCAL_WORLD_SIZE=ranks, WORLD_SIZE=ranks)
    model, found = train(run, data, options, on_step)
    scores, said = scored(model, run, data)
    return scores | found, said


def over_link(rate: float | None, ranks: int, arguments: Sequence[str]) -> int:
    """This program on ranks in namespaces, with a link of `rate` between them: its exit status."""
    with Namespaces(ranks) as network:
        network.set_rate(rate)
        common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": network.address(0), "MASTER_PORT": PORT}
        common |= {"LOCAL_WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": network.interface}
        modules = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        common["PYTHONPATH"] = os.pathsep.join(filter(None, modules))
        common["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # it warns of addresses without a name
        processes = [
            subprocess.Popen(
                network.command(
                    rank, [sys.executable, "-m", "experiments.torchrec_dlrm", *arguments]
                ),
                env=os.environ | common | {"RANK": str(rank)},
            )
            for rank in range(ranks)
        ]
        return max(abs(process.wait()) for process in processes)


def exchange_name(text: str) -> str:
    """An argparse type: the name of an exchange, checked."""
    name, plus, word = text.partition("+")
    forward, _, backward = name.partition(",")
    known = name in ("float32", *FBGEMM) or {forward, backward} <= set(ROW_FORMATS)
    if not known or (plus, word) not in (("", ""), ("+", "hook")):
        rule = f"float32, {', '.join(FBGEMM)}, or two of {', '.join(ROW_FORMATS)} joined by ','"
        raise argparse.ArgumentTypeError(f"must be {rule}, or one of these+hook, got {text!r}")
    return text


def main() -> int:
    return exit_status("torchrec_dlrm", _main)


def _main() -> int | None:
    parser = Parser(prog="torchrec_dlrm", description=__doc__, formatter_class=Formatter)
    parser.add_argument(
        "--exchanges", nargs="+", type=exchange_name, default=NAMES, metavar="EXCHANGE"
    )
    add_rates(parser, [0.001, 0.003, 0.01], seeds=5)
    parser.add_argument("--link", type=parse_rate, metavar="RATE", help="such as 1gbit")
    parser.add_argument("--out", type=Path, default=Path("runs/torchrec_dlrm"), metavar="DIR")
    given = ["--embedding-dim", "64", "--density", "0.01", *sys.argv[1:]]
    options, args = parse(parser, "hybrid", given)
    if args.link is not None and not under_torchrun():
        return over_link(args.link, options.ranks, sys.argv[1:])
    options.link = args.link
    settings = settings_of(options, SETTINGS)
    records = train_by_rates(options, args, args.exchanges, settings, job)
    if is_first():
        write_report(options.out, trained.report(records))
    return None


if __name__ == "__main__":
    raise SystemExit(main())
