"""The layer: operators on rows of all ranks, by the sums of their partial results."""

import contextlib
import zlib
from collections.abc import Iterable, Sequence
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from dct_kernels import checks
from dct_parallel.groups import refusing, require_group
from dct_parallel.rows.transfer import exchange_numbers

from ..bag_message import by_rank, exchange_bags, require_bags
from ..groups import GroupOfModule, require_alike
from .aggregation import all_reduce, reduce_scatter, with_summed_gradient
from .feature_rows import SharedRows
from .operators import Bags, SubstituteOperator, require_operator

_OP = "EquivalentSubstitution"
AGGREGATES = ("reduce_scatter", "all_reduce")


class EquivalentSubstitution(nn.Module):
    """Operators on rows of features that ranks share, computed on the ranks that own the rows.

    Distributed equivalent substitution (arXiv 1909.04823): each rank computes an operator's partial
    result from its own rows, and partial results are added up. Their bytes depend on the number of
    samples, not on that of their features; neither rows nor their gradients are sent. Training is
    that of one process with all samples, except for the order of sums. What it sends and when it
    pays: docs/guide/des.md.

    Forward and backward are collective, with equally many samples on every rank. The host waits in
    forward, for counts, so it cannot be captured in a CUDA graph. Deterministic on the CPU. Keep it
    outside of DistributedDataParallel. A copy (copy.deepcopy, AveragedModel) shares the process
    groups. Save `state_dict()`, because the module itself cannot be saved.

    Args:
        rows: of the features, and the ranks that share them: FeatureRows or DynamicFeatureRows.
        operators: results are in their order. Their parameters, if they have any, become those of
            the first rank, and gradients are added up over ranks. Some or all of them may be
            frozen, on all ranks alike.
        aggregate: "reduce_scatter": every rank gives the bags of its own samples and gets their
            results. "all_reduce", the paper's form: all give the same global batch and get all
            results.
        ids_group: a process group of the same ranks for ids and counts, so that their bytes can be
            told apart; default that of `rows`.

    Raises:
        ValueError, TypeError: an argument is out of its range; the text names it.
        ValueError: ranks differ in operators or aggregate; on all of them.
        RuntimeError: an argument is out of its range on a different rank only, as the text says.
    """

    def __init__(
        self,
        rows: SharedRows,
        operators: Sequence[SubstituteOperator],
        aggregate: str = "reduce_scatter",
        ids_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        checks.require_type(_OP, "rows", rows, SharedRows, "FeatureRows or DynamicFeatureRows")
        operators = list(operators) if isinstance(operators, Iterable) else operators
        with refusing(_OP, rows.group):
            ids_group = rows.group if ids_group is None else require_group(_OP, ids_group)
            of_rows, of_ids = map(dist.get_process_group_ranks, (rows.group, ids_group))
            if of_ids != of_rows:  # ids would get to others than the owners of their rows
                checks.fail(_OP, "ids_group", f"ranks {of_rows} like rows", of_ids, verb="have")
            self._ids_group = GroupOfModule(_OP, ids_group)
        told = {"operators": operators, "aggregate": aggregate, "rows": type(rows).__name__}
        require_alike(_OP, told, rows.group, rows.weight.device)
        checks.require_type(_OP, "operators", operators, list, "a sequence of SubstituteOperators")
        if len(operators) == 0:
            checks.fail(_OP, "operators", "at least one", "none", verb="have")
        for index, operator in enumerate(operators):
            require_operator(_OP, f"operators[{index}]", operator, rows.width)
        checks.require_choice(_OP, "aggregate", aggregate, AGGREGATES)
        self.rows, self.operators, self.aggregate = rows, nn.ModuleList(operators), aggregate
        for parameter in self.operators.parameters():
            dist.broadcast(parameter.detach(), group=rows.group, group_src=0)

    def forward(self, ids: Tensor, lengths: Tensor) -> list[Tensor]:
        """The result of every operator, for this rank's samples or for those of all.

        Args:
            ids: int32 or int64 [sum of lengths], bag after bag: those of the first field, sample by
                sample, then those of the next. Features of different fields have different ids,
                unless they are to share a row.
            lengths: int32 or int64 [fields, batch], how many ids are in each bag; 0 is allowed.

        Returns:
            A tensor per operator, of the rows' dtype: [batch, ...] as the operator says. Arguments
            are not mutated; in training mode DynamicFeatureRows gets rows for new features.

        Raises:
            ValueError, TypeError: an argument is out of its range; on every rank, naming the ranks,
                with the details on those.
            ValueError: batch, fields, which parameters get gradients, or whether the rows are in
                training mode, differs between ranks, or with "all_reduce" the ids do; on every
                rank.
            ValueError: some rank has too little capacity for the rows of new features; on every
                rank, naming those. No rank has made a row.
            ValueError: received lengths do not add up to the ids received with them.
        """
        names, bags, tight = self._bags(ids, lengths)
        if tight:
            self._require_room(names)
        places, weight = self.rows.places(names), self.rows.weight
        rows = F.embedding(places, weight, padding_idx=self.rows.no_row, sparse=True)
        operators = list(cast(Iterable[SubstituteOperator], self.operators))
        partials = [self._partial(operator, rows, bags) for operator in operators]
        aggregate = reduce_scatter if self.aggregate == "reduce_scatter" else all_reduce
        total = aggregate(torch.cat(partials, 1), self.rows.group)
        totals = total.split([partial.shape[1] for partial in partials], dim=1)
        return [operator.combine(part) for operator, part in zip(operators, totals, strict=True)]

    def _partial(self, operator: SubstituteOperator, rows: Tensor, bags: Bags) -> Tensor:
        own = {
            name: with_summed_gradient(parameter, self.rows.group)
            for name, parameter in operator.named_parameters()
        }
        columns = rows.narrow(1, operator.first, operator.width)
        partial: Tensor = functional_call(operator, own, (columns, bags))
        shape = tuple(getattr(partial, "shape", ()))
        if len(shape) != 2 or shape[0] != bags.samples:
            arg = f"{type(operator).__name__}.partial"
            checks.fail(_OP, arg, f"a tensor [{bags.samples}, m]", shape, verb="return")
        return partial

    def _bags(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Bags, bool]:
        """Names and bags of the global batch that this rank owns; see `_agree` for the last.

        Each rank has a part of the batch, and samples are rank by rank. With "all_reduce" each has
        the whole batch, and nothing is sent.
        """
        self._require_usable(ids, lengths)
        rank, ranks, bags = self.rows.group.rank(), self.rows.group.size(), lengths.numel()
        owners, names = self.rows.owners(ids)
        bag = torch.repeat_interleave(torch.arange(bags, device=ids.device), lengths.flatten())
        lengths_of, names_of, _ = by_rank(owners * bags + bag, names, [bags] * ranks)
        if self.aggregate == "all_reduce":
            own, checksum = names_of[rank], _checksum(ids, lengths)
            _, tight = self._agree([0] * ranks, lengths.shape, len(own), checksum)
            return own, Bags(lengths_of[rank].view(1, *lengths.shape)), tight
        arriving, tight = self._agree([len(own) for own in names_of], lengths.shape, len(ids))
        group = self._ids_group.get()
        differ = [(count, -1) for count in arriving]  # lengths are always sent
        came, own = exchange_bags(_OP, lengths_of, names_of, [-1] * ranks, differ, group)
        return own, Bags(came.view(ranks, *lengths.shape)), tight

    def _require_usable(self, ids: Tensor, lengths: Tensor) -> None:
        """Raise if they are not, after telling the other ranks that this one cannot go on."""
        try:
            require_bags(_OP, ids, lengths, self.rows.weight)
            if len(lengths) == 0:
                checks.fail(_OP, "lengths", "at least 1 field", "none", verb="have")
            self.rows.require_ids(_OP, ids)
            for operator in cast(Iterable[SubstituteOperator], self.operators):
                operator.require_fit(self.rows.weight, len(lengths))
        except (TypeError, ValueError):
            with contextlib.suppress(ValueError):
                self._agree([0] * self.rows.group.size(), (0, 0), 0, usable=False)
            raise

    def _require_room(self, names: Tensor) -> None:
        """Raise on all ranks if some lacks room for its names' rows, before any is made.

        Takes one more exchange of counts.
        """
        need, capacity = len(self.rows) + self.rows.missing(names), self.rows.capacity
        assert capacity is not None  # else no batch is too large for it
        told = [[need, capacity]] * self.rows.group.size()
        heard = exchange_numbers(_OP, told, {}, self.rows.weight.device, self._ids_group.get())
        over = [
            f"{most} for {need} on rank {rank}"
            for rank, (need, most) in enumerate(heard)
            if need > most
        ]
        if over:
            checks.fail(_OP, "capacity", "at least the number of features seen", ", ".join(over))

    def _agree(
        self,
        counts: list[int],
        shape: Sequence[int],
        ids: int,
        checksum: int = 0,
        usable: bool = True,
    ) -> tuple[list[int], bool]:
        """Tell rank r counts[r], if all agree on the rest.

        Args:
            ids: this rank's part of those of the global batch.

        Returns:
            The counts that every rank told this one; whether the batch has more ids than some rank
            has room for rows, which is the same on every rank.
        """
        fields, batch = shape
        trained = [name for name, own in self.named_parameters() if own.requires_grad]
        same = {
            "input accepted": usable,
            "fields": fields,
            "batch": batch,
            "training": self.rows.training,
            "parameters with gradients": _set_of(trained if torch.is_grad_enabled() else []),
        }
        if self.aggregate == "all_reduce":
            same["checksum of the batch"] = checksum
        capacity = self.rows.capacity
        limits = [] if capacity is None else [ids, capacity - len(self.rows)]
        numbers = [[count, *limits] for count in counts]
        device, group = self.rows.weight.device, self._ids_group.get()
        heard = exchange_numbers(_OP, numbers, same, device, group)
        arriving, *of_ranks = zip(*heard, strict=True)
        return list(arriving), bool(of_ranks) and sum(of_ranks[0]) > min(of_ranks[1])


def _set_of(names: Sequence[str]) -> int:
    """A number for these names: their count, then a checksum."""
    return len(names) * 10**10 + zlib.crc32("\n".join(names).encode())


def _checksum(ids: Tensor, lengths: Tensor) -> int:
    values = torch.cat([ids.long(), lengths.flatten().long()])
    place = torch.arange(len(values), device=values.device)
    return int(((values ^ place * 0x9E3779B1) * (2 * place + 1)).sum()) % 2**52
