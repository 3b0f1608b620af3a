"""Equivalent substitution: ranks own rows of features and exchange partial results, not rows.

    python examples/substitution.py --ranks 2

Trains DeepFM. Its three operators (linear terms, a factorization machine, pooled embeddings) have
equivalent substitutes: each rank applies an operator to the rows that it owns, and the ranks sum
the partial results. A row is created when its feature first appears. Prints the quality and bytes
of three runs on the same batches: one process with all samples, ranks that average the MLP's
gradients in float32, and ranks that compress these gradients with DCT. The first two runs differ
only in the order of sums.
"""

import argparse
import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from dct_embeddings import (
    DynamicFeatureRows,
    EquivalentSubstitution,
    FactorizationMachine,
    LinearTerms,
    RowWiseAdagrad,
    SumPooledEmbedding,
)
from dct_parallel import DCTState, dct_hook
from dlrm import report
from dlrm.arguments import make_parser
from dlrm.comparison import describe, make_console, progress, run_program
from dlrm.data.dataset import Dataset, batches, load
from dlrm.data.features import INTS, TABLES, Rows
from dlrm.errors import UsageError
from dlrm.loop import Run, digest, replicated
from dlrm.models.dlrm import layers
from dlrm.options import count, fraction, positive
from dlrm.ranks import from_all_ranks
from dlrm.scores import evaluate
from dlrm.training import require_equal_weights, train

EPILOG = """\
examples:
  python examples/substitution.py
      generated rows on 2 local ranks
  python examples/substitution.py --data train.txt --capacity 5000000
      a file in Criteo's format with up to 5 million features per rank
"""
SEED, WIDTH, HIDDEN = 0, 16, (256, 128)


class DeepFM(nn.Module):
    """DeepFM (arXiv 1703.04247) with features distributed over the ranks of a group.

    Args:
        capacity: number of features that this rank can own.
        rows_group, ids_group: groups of the same ranks, for partial results and for ids.
    """

    def __init__(
        self, capacity: int, rows_group: dist.ProcessGroup, ids_group: dist.ProcessGroup
    ) -> None:
        super().__init__()
        # A row has a weight for the linear terms, then an embedding that the other operators share.
        rows = DynamicFeatureRows(1 + WIDTH, capacity, seed=SEED, group=rows_group)
        operators = [
            LinearTerms(),
            FactorizationMachine(WIDTH, first=1),
            SumPooledEmbedding(WIDTH, first=1),
        ]
        self.features = EquivalentSubstitution(rows, operators, ids_group=ids_group)
        self.deep = nn.Sequential(*layers([INTS + TABLES * WIDTH, *HIDDEN, 1])[:-1])

    def forward(self, ints: Tensor, ids: Tensor) -> Tensor:
        """Return logits [batch] for `ints` float32 [batch, 13] and `ids` int64 [batch, 26]."""
        columns = ids.t().contiguous()
        try:
            found = self.features(columns.flatten(), torch.ones_like(columns))
        except ValueError as error:
            if "capacity must" not in str(error):
                raise
            raise UsageError(f"--capacity must be large enough: {error}") from None
        linear, pairs, pooled = found
        deep = self.deep(torch.cat([ints, pooled.flatten(1)], dim=1)).squeeze(1)
        return linear + pairs + deep


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options. On an error, print the option, rule and value, and exit with status 2."""
    description = "Train DeepFM with equivalent substitution, and in one process for comparison."
    parser = make_parser("substitution.py", description, EPILOG, rows=60_000)
    add = parser.add_argument
    add("--ranks", type=count, default=2, help="number of local processes, without torchrun")
    add("--capacity", type=count, default=200_000, help="number of features that a rank can own")
    add("--density", type=fraction, default=0.01, help="sent fraction of the MLP's gradients")
    add("--lr", type=positive, default=0.05, help="learning rate of the MLP, which uses SGD")
    add(
        "--embedding-lr",
        type=positive,
        default=0.02,
        help="learning rate of the features' rows, which use row-wise AdaGrad",
    )
    return parser.parse_args(arguments)


def compare(options: argparse.Namespace) -> None:
    """Train all three runs. Rank 0 prints the results. Collective."""
    console = make_console()
    data = load(options.data, options.rows, None, options.batch_size)
    describe(console, data)
    runs = {}
    for name in ("one process", "dense", "compressed"):
        with progress(console, name, data) as on_step:
            runs[name] = [run(name, data, options, on_step)]
    if console is not None:
        report.print_table(console, runs, None)


def run(
    name: str, data: Dataset, options: argparse.Namespace, on_step: Callable[[], object]
) -> Run:
    """Train and test one model. Collective."""
    is_alone = name == "one process"
    ranks = range(dist.get_world_size())
    # To train in one process, each rank forms its own group. All ranks compute the same results.
    grouped = [[rank] for rank in ranks] if is_alone else [list(ranks)]
    groups = {each: dist.new_subgroups_by_enumeration(grouped)[0] for each in ("rows", "ids")}
    steps = list(batches(data, options.batch_size, SEED))
    torch.manual_seed(SEED)
    model = DeepFM(
        options.capacity * (len(ranks) if is_alone else 1), groups["rows"], groups["ids"]
    )
    state = None
    if is_alone:
        steps = [Rows.concatenate(parts) for parts in zip(*from_all_ranks(steps), strict=True)]
    else:
        model.deep = replicated(model.deep)
    if name == "dense":
        model.deep.register_comm_hook(None, default_hooks.allreduce_hook)
    if name == "compressed":
        state = DCTState(model.deep, density=options.density)
        model.deep.register_comm_hook(state, dct_hook)
    optimizers = [
        torch.optim.SGD(model.deep.parameters(), options.lr),
        RowWiseAdagrad(model.features.parameters(), options.embedding_lr),
    ]
    record = train(model, optimizers, steps, groups, on_step)
    require_equal_weights(digest(model.deep))
    if state is not None:
        state.close()
    result = Run(SEED, evaluate(model, data.test, data.train), record, None, digest(model.deep))
    for group in groups.values():
        dist.destroy_process_group(group)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    return run_program("substitution.py", compare, parse(arguments))


if __name__ == "__main__":
    sys.exit(main())
