"""Two-dimensional parallelism: embedding tables in shards and replicas.

    python examples/two_dimensional.py --ranks 4 --replicas 2

Trains DLRM twice on the same batches: first with all exchanges in float32, then compressed. Prints
the quality and bytes of both runs. Each group of ranks has a replica of all tables, which are
sharded inside the group: ranks send ids to the owners of the rows and receive embeddings.
`ReplicaSync` averages the replicas every few steps. The MLPs are on all ranks.
"""

import argparse
import os
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from dct_embeddings import MomentumScaledRowWiseAdagrad, ReplicaSync, plan_shards
from dct_parallel import DCTState, dct_hook
from dct_parallel.exchange.settings import FORMATS
from dct_parallel.formats import ROW_FORMATS
from dlrm import report
from dlrm.arguments import make_parser
from dlrm.comparison import describe, make_console, progress, run_program
from dlrm.data.dataset import Dataset, batches, load
from dlrm.errors import UsageError
from dlrm.launch import under_torchrun
from dlrm.loop import Run, digest, replicated
from dlrm.models.dlrm import BOTTOM, DLRM, TOP
from dlrm.models.row_exchange import rows_in
from dlrm.models.sharded import ShardedDLRM
from dlrm.options import count, fraction, positive
from dlrm.scores import evaluate
from dlrm.training import require_equal_weights, train

EPILOG = """\
examples:
  python examples/two_dimensional.py
      generated rows on 4 local ranks; 2 replicas of the tables, each sharded over 2 ranks
  python examples/two_dimensional.py --data train.txt --replicas 4 --sync-every 20
      a file in Criteo's format; all tables on every rank
"""
SEED, HASH_SIZE, EMBEDDING_DIM = 0, 4000, 16


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options. On an error, print the option, rule and value, and exit with status 2."""
    description = "Train DLRM with sharded and replicated tables, in float32 and compressed."
    parser = make_parser("two_dimensional.py", description, EPILOG, rows=60_000)
    add = parser.add_argument
    add("--ranks", type=count, default=4, help="number of local processes, without torchrun")
    add("--replicas", type=count, default=2, help="number of groups, each with all tables")
    add("--sync-every", type=count, default=10, metavar="N", help="steps between syncs of replicas")
    add("--sync-format", choices=FORMATS, default="int4", help="format of the changes of replicas")
    add("--row-format", choices=ROW_FORMATS, default="int8", help="format of embeddings")
    add("--density", type=fraction, default=0.01, help="sent fraction of the MLPs' gradients")
    add("--lr", type=positive, default=0.1, help="learning rate of the MLPs, which use SGD")
    add(
        "--embedding-lr",
        type=positive,
        default=0.02,
        help="learning rate of the tables, which use momentum-scaled row-wise AdaGrad",
    )
    options = parser.parse_args(arguments)
    ranks = int(os.environ["WORLD_SIZE"]) if under_torchrun() else options.ranks
    if ranks % options.replicas:
        parser.error(f"--replicas must divide the {ranks} ranks, got {options.replicas}")
    return options


def compare(options: argparse.Namespace) -> None:
    """Train both variants. Rank 0 prints the results. Collective."""
    console = make_console()
    data = load(options.data, options.rows, HASH_SIZE, options.batch_size)
    describe(console, data)
    runs = {}
    for name in ("dense", "compressed"):
        with progress(console, name, data) as on_step:
            runs[name] = [run(name == "compressed", data, options, on_step)]
    if console is not None:
        report.print_table(console, runs, None)


def run(is_compressed: bool, data: Dataset, options: argparse.Namespace, on_step) -> Run:
    """Train and test one variant. Collective."""
    shards = dist.get_world_size() // options.replicas
    if shards > len(data.tables):
        raise UsageError(f"--ranks must be at most {len(data.tables)} per replica, got {shards}")
    torch.manual_seed(SEED)
    whole = DLRM(data.tables, EMBEDDING_DIM, BOTTOM, TOP)
    exchange = rows_in(options.row_format if is_compressed else "float32")
    plan = plan_shards(data.tables, shards)
    model = ShardedDLRM(whole, plan, exchange, dedup=True, replicas=options.replicas, sparse=True)
    model.mlps = replicated(model.mlps)
    state = None
    if is_compressed:
        state = DCTState(model.mlps, density=options.density)
        model.mlps.register_comm_hook(state, dct_hook)
    else:
        model.mlps.register_comm_hook(None, default_hooks.allreduce_hook)

    mlps = torch.optim.SGD(model.mlps.parameters(), options.lr)
    # The accumulators of a replica grow faster than they would in one group with all samples.
    tables = MomentumScaledRowWiseAdagrad(
        model.tables.parameters(), options.embedding_lr, scale=options.replicas
    )
    sync = ReplicaSync(
        model.tables,
        optimizer=tables,
        every=options.sync_every,
        format=options.sync_format if is_compressed else "float32",
    )
    groups = {"ids": model.ids_group, "rows": model.rows_group, "sync": model.sync_group}
    steps = batches(data, options.batch_size, SEED)
    record = train(model, [mlps, tables], steps, groups, on_step, after_step=sync.step)
    sync.flush()  # now all replicas are equal
    require_equal_weights(digest(model.mlps))
    require_equal_weights(digest(model.tables), model.sync_group)
    if state is not None:
        state.close()
    result = Run(SEED, evaluate(model, data.test, data.train), record, None, digest(model))
    model.close()
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    return run_program("two_dimensional.py", compare, parse(arguments))


if __name__ == "__main__":
    sys.exit(main())
