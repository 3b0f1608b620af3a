"""Trains TorchRec's DLRM with different codecs for embeddings. Measures quality and bytes.

    python -m bench.experiments.torchrec_dlrm --data ROWS.tsv --epochs 3 --batch-size 64

Needs torchrec and fbgemm-gpu (docs/guide/torchrec.md). torchrec.models.dlrm.DLRM runs in
DistributedModelParallel. By default, each table is on one rank. With --row-wise, the rows of each
table are divided between the ranks. Tables use row-wise AdaGrad, which TorchRec fuses into the
backward pass. The MLPs are on all ranks and use SGD. An exchange is one of

    float32             TorchRec without codecs
    fp16, int8, mx4     FBGEMM's codecs with default settings; int8 and mx4 use a scale for every 32
                        entries, and do not support --row-wise
    FORWARD,BACKWARD    dct_embeddings.torchrec.compressed_sharders, with a scale for each embedding
    EXCHANGE+hook       also uses compress_dense on the MLPs, with --density. Without +hook, MLP
                        gradients are averaged in float32. +hook does not support --row-wise

Learning rates of the tables are selected as in mp_formats.py, and finished runs are not repeated.
"""

import argparse
import os
import statistics
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

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
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ModuleSharder, ShardingPlan
from torchrec.models.dlrm import DLRM
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from bench.cli import density, exit_status
from bench.network.methods import START_STEP
from dct_embeddings import plan_shards
from dct_embeddings.torchrec import compress_dense, compressed_sharders
from dct_parallel import DCTState, RowFormat
from dct_parallel.formats import ROW_FORMATS
from dlrm.data import dataset
from dlrm.data.features import INTS

from . import clicks

CPU = torch.device("cpu")
NAMES = ("float32", "fp16", "int8", "mx4", "int4,int4", "int4,ternary", "int4,sign")
NAMES += ("int4,sign+hook",)
FBGEMM = {"fp16": CommType.FP16, "int8": CommType.INT8, "mx4": CommType.MX4}
BAGS = "sparse_arch.embedding_bag_collection"


def sharder(name: str) -> ModuleSharder:
    """The sharder of an exchange. `name` is the exchange without +hook."""
    if name == "float32":
        return EmbeddingBagCollectionSharder()
    if name in FBGEMM:
        config = QCommsConfig(forward_precision=FBGEMM[name], backward_precision=FBGEMM[name])
        codecs = get_qcomm_codecs_registry(config, device=CPU)
        return EmbeddingBagCollectionSharder(qcomm_codecs_registry=codecs)
    return compressed_sharders(format=RowFormat(*name.split(",")))[0]


class Clicks(nn.Module):
    """A DLRM parallelized by TorchRec, with the interface of the DLRM in examples.

    Args:
        rows: number of rows of each table.
        name: the exchange without +hook.
        rate: learning rate of the tables.
        seed: seed of the weights.
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
        ranks, exchange = dist.get_world_size(), sharder(name)
        owners = enumerate(plan_shards(rows, ranks))
        sharding = {f"t{s.table}": table_wise(rank=r) for r, shards in owners for s in shards}
        if options.problem == "row_wise":
            sharding = {table: row_wise() for table in sharding}
        sizes = {"local_size": ranks, "world_size": ranks}
        plan = construct_module_sharding_plan(
            bags, sharding, sharder=exchange, device_type="cpu", **sizes
        )
        torch.manual_seed(seed * ranks + dist.get_rank())  # for the initial weights of the tables
        self.dmp = DistributedModelParallel(
            model, device=CPU, plan=ShardingPlan(plan={BAGS: plan}), sharders=[exchange]
        )

    def mlps(self) -> list[nn.Parameter]:
        """The replicated parameters."""
        return [p for name, p in self.dmp.named_parameters() if BAGS not in name]

    def forward(self, ints: Tensor, ids: Tensor) -> Tensor:
        """Return logits [batch] for `ints` float32 [batch, 13], `ids` int32 [batch, tables]."""
        values = ids.t().flatten().long()
        lengths = torch.ones(values.numel(), dtype=torch.int32)
        features = KeyedJaggedTensor.from_lengths_sync(self._features, values, lengths)
        return self.dmp(ints, features).squeeze(1)


class Rows:
    """A context that counts the bytes of rows that this rank sends.

    TorchRec sends rows with an all-to-all. If `sums` is true (row-wise tables), TorchRec sends rows
    with a reduce-scatter and their gradients with an all-gather, and byte counts assume ring
    algorithms. Messages of 32- or 64-bit integers (ids, counts) are ignored.
    """

    def __init__(self, sums: bool) -> None:
        self._names = ["all_to_all_single"]
        if sums:
            self._names += ["reduce_scatter_tensor", "all_gather_into_tensor", "all_gather_single"]

    def __enter__(self) -> "Rows":
        self.sent = 0
        self._originals = {n: getattr(dist, n) for n in self._names if hasattr(dist, n)}
        for name, original in self._originals.items():
            setattr(dist, name, partial(self._counted, name, original))
        return self

    def __exit__(self, *raised: object) -> None:
        for name, original in self._originals.items():
            setattr(dist, name, original)

    def take(self) -> int:
        """Return the bytes that were sent since the last call."""
        sent, self.sent = self.sent, 0
        return sent

    def _counted(
        self,
        name: str,
        collective: Callable,
        output: Tensor,
        input: Tensor,
        *rest: Any,
        **named: Any,
    ) -> Any:
        if input.dtype not in (torch.int32, torch.int64):
            ranks = dist.get_world_size()
            if name == "all_to_all_single":
                parts = rest[1] if rest else named["input_split_sizes"]
                others = sum(parts) - parts[dist.get_rank()]
                self.sent += input.nbytes * others // max(1, sum(parts))
            elif name == "reduce_scatter_tensor":
                self.sent += input.nbytes * (ranks - 1) // ranks
            else:
                self.sent += input.nbytes * (ranks - 1)
        return collective(output, input, *rest, **named)


def job(
    exchange: str, rate: float, seed: int, data: dataset.Dataset, options: argparse.Namespace
) -> tuple[nn.Module, float, dict[str, float]]:
    """Train with one exchange; see `clicks.Job`. Collective."""
    warnings.simplefilter("ignore")  # hide TorchRec's warnings
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(LOCAL_RANK=rank, LOCAL_WORLD_SIZE=ranks, WORLD_SIZE=ranks)  # for TorchRec
    name, plus, _ = exchange.partition("+")
    model = Clicks(data.tables, name, rate, seed, options)
    state: DCTState | None = None
    if plus:
        state = compress_dense(model.dmp, density=options.density, start_step=START_STEP)
    optimizer = torch.optim.SGD(model.mlps(), options.lr, fused=True)
    sent: list[tuple[int, int]] = []
    with Rows(sums=options.problem == "row_wise") as rows:
        for batch in dataset.batches(data, options.batch_size, seed, options.epochs):
            optimizer.zero_grad()
            logits = model(batch.ints, batch.ids)
            forward = rows.take()
            loss = binary_cross_entropy_with_logits(logits, batch.labels.float())
            loss.backward()
            optimizer.step()
            sent.append((forward, rows.take()))
    if state is not None:
        state.close()
    means = map(statistics.mean, zip(*sent, strict=True))
    return model, loss.item(), dict(zip(("rows forward", "rows backward"), means, strict=True))


def exchange_name(text: str) -> str:
    """An argparse type: the name of an exchange."""
    name, plus, word = text.partition("+")
    forward, _, backward = name.partition(",")
    known = name in ("float32", *FBGEMM) or {forward, backward} <= set(ROW_FORMATS)
    if not known or (plus, word) not in (("", ""), ("+", "hook")):
        rule = f"float32, {', '.join(FBGEMM)}, or two of {', '.join(ROW_FORMATS)} joined by ','"
        raise argparse.ArgumentTypeError(f"must be {rule}, or one of these+hook, got {text!r}")
    return text


def main() -> None:
    parser = clicks.parser("torchrec_dlrm", __doc__, NAMES, exchange_name)
    parser.set_defaults(rates="0.001,0.003,0.01")
    add = parser.add_argument
    add("--density", type=density, default=0.01, help="density of the hook in EXCHANGE+hook")
    row_wise = "divide the rows of each table between the ranks"
    add("--row-wise", dest="problem", action="store_const", const="row_wise", help=row_wise)
    options = parser.parse_args()
    if options.problem and (
        refused := [n for n in options.exchanges if n in ("mx4", "int8") or n.endswith("+hook")]
    ):
        parser.error(f"--row-wise does not support mx4, int8 and +hook, got {', '.join(refused)}")
    clicks.train_by_rates(options, job)


if __name__ == "__main__":
    raise SystemExit(exit_status("torchrec_dlrm", main))
