"""Bytes of distributed equivalent substitution beside those of a parameter server, same batches.

    python -m experiments.des_bytes --data ROWS.tsv --batches 64,256,1024
    python -m experiments.des_bytes --multi-hot 10 --rows 40000 --ranks 4

Both are run, on the first batches of the training rows: a parameter server whose shards are on the
workers themselves (a worker sends ids to the owners of their rows, gets the rows, and sends back
their gradients), as it is and with each distinct row of a worker's batch once; and substitution.
Their logits must be the same. Prints a table of bytes that a rank sends in a step, all of them but
the dense part's gradients, which are the same:

    ids/sample  of all fields together
    PS          ids, rows and their gradients
    PS once     the same with each distinct row once
    DES         ids, partial results and their gradients
    saved       by DES, of PS (of PS once); below 0 it sends more

Other options are those of train_dlrm.py.
"""

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from dct_embeddings import FeatureRows, SubstituteOperator
from dct_embeddings.substitution.operators import Bags
from dct_parallel.collectives import all_to_all
from dct_parallel.rows.all_to_all import whole_rows
from dlrm import arguments
from dlrm.argument_types import count, several
from dlrm.command_line import Formatter, Parser, exit_status
from dlrm.data import dataset
from dlrm.data.features import Rows
from dlrm.launch import launch
from dlrm.models.factorised import FACTORISED, FeatureModel
from dlrm.models.substituted import SubstitutedModel
from wire_meter import WireMeter

STEPS = 3
DES, PS, ONCE = "DES", "PS", "PS once"


class ParameterServer(nn.Module):
    """Operators on rows that are pulled from their owners; gradients of them are pushed back.

    Args:
        once: whether a row that a batch asks for several times crosses once, and so the sum of its
            gradients.
    """

    def __init__(
        self, rows: FeatureRows, operators: list[SubstituteOperator], once: bool = False
    ) -> None:
        super().__init__()
        self.rows, self.operators, self.once = rows, nn.ModuleList(operators), once

    def forward(self, ids: Tensor, lengths: Tensor) -> list[Tensor]:
        """The result of every operator; called as `EquivalentSubstitution`."""
        each = torch.arange(len(ids))
        wanted, inverse = ids.unique(return_inverse=True) if self.once else (ids, each)
        owners, names = self.rows.owners(wanted)
        order = owners.argsort(stable=True)
        ranks = dist.get_world_size()
        theirs = torch.bincount(owners, minlength=ranks)
        mine = all_to_all(theirs, [1] * ranks, [1] * ranks, self.rows.group).tolist()
        theirs = theirs.tolist()
        asked = all_to_all(names[order], theirs, mine, self.rows.group)
        pulled = F.embedding(self.rows.places(asked), self.rows.weight, sparse=True)
        arrived = whole_rows(pulled, mine, theirs, group=self.rows.group)
        used, bags = arrived[order.argsort()[inverse]], Bags(lengths.unsqueeze(0))
        results = []
        for operator in self.operators:
            columns = used.narrow(1, operator.first, operator.width)
            results.append(operator.combine(operator.partial(columns, bags)))
        return results


def _served(once: bool) -> Callable[[FeatureModel], FeatureModel]:
    def made(whole: FeatureModel) -> FeatureModel:
        rows = FeatureRows(whole.tables.weight.detach())
        tables = ParameterServer(rows, list(whole.tables.operators), once)
        return FeatureModel(whole.rows, tables, whole.dense)

    return made


SYSTEMS = {PS: _served(False), ONCE: _served(True), DES: SubstitutedModel}


def work(options: argparse.Namespace, args: argparse.Namespace) -> None:
    """Sends on one rank; the first prints the mean over all."""
    data = dataset.load(options)
    if dist.get_rank() == 0:
        headings = ["model", "batch a rank", "ids/sample", PS, ONCE, DES, "saved"]
        print("| " + " | ".join(headings) + " |\n|" + "---|" * len(headings))
    for name, make in FACTORISED.items():
        for batch in args.batches:
            sent, logits = {}, []
            for system, of in SYSTEMS.items():
                torch.manual_seed(0)
                ints = data.train.ints.shape[1]
                model = of(make(data.tables, ints, options.embedding_dim, options.top))
                sent[system], outputs = _sent(model, data.train, batch)
                logits.append(outputs)
            for others in logits[1:]:
                torch.testing.assert_close(others, logits[0])
            ids = (data.train.ids[: STEPS * batch] >= 0).sum() / (STEPS * batch)
            mean = torch.tensor([float(ids), *sent.values()])
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                print(line(name, batch, *(mean / dist.get_world_size()).tolist()), flush=True)


def _sent(model: FeatureModel, rows: Rows, batch: int) -> tuple[float, Tensor]:
    """Bytes a step, and the logits of the last."""
    with WireMeter() as meter:
        for step in range(STEPS):
            part = rows.take(slice(step * batch, (step + 1) * batch))
            logits = model(part.ints, part.ids)
            logits.sum().backward()
        sent = meter.take() / STEPS
    if isinstance(model, SubstitutedModel):
        model.close()
    return sent, logits.detach()


def line(model: str, batch: int, ids: float, ps: float, once: float, des: float) -> str:
    """A line of the table."""
    saved = f"{1 - des / ps:.1%} ({1 - des / once:.1%})" if ps else "-"
    return f"| {model} | {batch:,} | {ids:.0f} | {ps:,.0f} | {once:,.0f} | {des:,.0f} | {saved} |"


def main() -> int:
    return exit_status("des_bytes", _main)


def _main() -> None:
    parser = Parser(prog="des_bytes", description=__doc__, formatter_class=Formatter)
    parser.add_argument("--batches", type=several(count), default="64,256,1024")
    args, rest = parser.parse_known_args()
    most = str(STEPS * max(args.batches))
    options = arguments.parse([*rest, "--epochs", "3", "--batch-size", most])
    launch(work, options.ranks, options, args)


if __name__ == "__main__":
    raise SystemExit(main())
