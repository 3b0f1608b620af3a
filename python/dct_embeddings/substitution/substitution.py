"""The layer that computes operators from sums of the ranks' partial results."""

import contextlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from dct_kernels import checks
from dct_parallel.groups import bit_sums, digest, known_group, require_group, sharing_errors
from dct_parallel.rows.transfer import all_to_all_numbers

from ..bag_message import all_to_all_bags, by_rank, require_bags
from ..groups import GroupOfModule, require_same_settings
from ..loading import CheckedModule
from .aggregation import all_reduce, reduce_scatter, with_summed_gradient
from .feature_rows import SharedRows
from .operators import Bags, SubstituteOperator, require_operator

_OP = "EquivalentSubstitution"
AGGREGATES = ("reduce_scatter", "all_reduce")


class EquivalentSubstitution(CheckedModule):
    """Computes operators on shared rows of features, on the ranks that own the rows.

    Each rank computes an operator's partial result from its rows, and ranks sum the partial
    results. The size of a partial result grows with the number of samples, not with the number of
    features. Ranks do not send rows or gradients of rows. Except for the order of sums, training is
    the same as in one process with all samples. See docs/guide/des.md.

    Forward and backward are collective, with the same number of samples on every rank. The host
    waits for counts in forward, so CUDA graphs cannot capture it. Results are deterministic on the
    CPU. Do not wrap the module in DistributedDataParallel. A copy (copy.deepcopy, AveragedModel)
    shares the process groups. Save `state_dict()`, because the module itself cannot be saved.
    Loading a state that does not match raises an error before anything is loaded.

    Args:
        rows: FeatureRows or DynamicFeatureRows, on the ranks that share the features.
        operators: a sequence of operators, in the order of results. Every rank starts with the
            parameters of the first rank, and gradients are summed over ranks. Freeze the same
            parameters on all ranks.
        aggregate: "reduce_scatter": every rank passes the bags of its own samples and receives
            their results. "all_reduce", as in DES: all ranks pass the same global batch and
            receive all results.
        ids_group: a process group of the same ranks for ids and counts, to measure their bytes
            separately; default: the group of `rows`.

    Raises:
        ValueError, TypeError: an argument is out of range.
        ValueError: ranks differ in operators or aggregate. Every rank raises.
        RuntimeError: an argument is out of range on another rank only.

    Source: distributed equivalent substitution (arXiv 1909.04823).
    """

    _loaded = False  # whether a state was loaded since the last forward

    def __init__(
        self,
        rows: SharedRows,
        operators: Sequence[SubstituteOperator],
        aggregate: str = "reduce_scatter",
        ids_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        operators = list(operators) if isinstance(operators, Iterable) else operators
        with sharing_errors(_OP, known_group(getattr(rows, "group", None))):
            checks.require_type(_OP, "rows", rows, SharedRows, "FeatureRows or DynamicFeatureRows")
            ids_group = rows.group if ids_group is None else ids_group
            ids_group = require_group(_OP, ids_group, "ids_group")
            expected, found = map(dist.get_process_group_ranks, (rows.group, ids_group))
            if found != expected:  # ids would not reach the owners of their rows
                checks.fail(_OP, "ids_group", f"ranks {expected} like rows", found, verb="have")
            self._ids_group = GroupOfModule(_OP, ids_group)
        settings = {"operators": operators, "aggregate": aggregate, "rows": type(rows).__name__}
        require_same_settings(_OP, settings, rows.group, rows.weight.device)
        checks.require_type(_OP, "operators", operators, list, "a sequence of SubstituteOperators")
        if len(operators) == 0:
            checks.fail(_OP, "operators", "at least one", "none", verb="have")
        for index, operator in enumerate(operators):
            require_operator(_OP, f"operators[{index}]", operator, rows.width)
        checks.require_choice(_OP, "aggregate", aggregate, AGGREGATES)
        self.rows, self.operators, self.aggregate = rows, nn.ModuleList(operators), aggregate
        for parameter in self.operators.parameters():
            dist.broadcast(parameter.detach(), group=rows.group, group_src=0)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *more: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *more)
        self._loaded = True

    def forward(self, ids: Tensor, lengths: Tensor) -> list[Tensor]:
        """Return the result of every operator, for the samples of this rank or of all ranks.

        Args:
            ids: int32 or int64 [sum of lengths]: the bags of the first field, sample by sample,
                then the bags of the next field. Features of different fields with the same id share
                a row.
            lengths: int32 or int64 [fields, batch], the number of ids in each bag, which may be 0.

        Returns:
            One tensor per operator, [batch, ...] in the dtype of the rows; see the operator.
            Arguments are not mutated. In training mode DynamicFeatureRows adds rows for new
            features.

        Raises:
            ValueError, TypeError: an argument is out of range on some rank. Every rank raises an
                error with its name and value.
            ValueError: batch, fields, training mode of the rows, the set of parameters with
                gradients, or with "all_reduce" the ids differ between ranks, or in the first call
                after a load the parameters of the operators. Every rank raises.
            ValueError: a rank has too little capacity for the rows of new features. No row is
                added, and every rank raises.
            ValueError: received lengths do not add up to the received ids.
        """
        if self._loaded:
            sums = digest(bit_sums(self.operators.parameters()))
            settings = {"parameters of the loaded operators": sums}
            require_same_settings(_OP, settings, self.rows.group, self.rows.weight.device)
            self._loaded = False
        names, bags, tight = self._bags(ids, lengths)
        if tight:
            self._require_capacity(names)
        places, weight = self.rows.places(names), self.rows.weight
        rows = F.embedding(places, weight, padding_idx=self.rows.no_row, sparse=True)
        operators = list(cast(Iterable[SubstituteOperator], self.operators))
        partials = [self._partial(operator, rows, bags) for operator in operators]
        aggregate = reduce_scatter if self.aggregate == "reduce_scatter" else all_reduce
        total = aggregate(torch.cat(partials, 1), self.rows.group)
        totals = total.split([partial.shape[1] for partial in partials], dim=1)
        return [operator.combine(part) for operator, part in zip(operators, totals, strict=True)]

    def _partial(self, operator: SubstituteOperator, rows: Tensor, bags: Bags) -> Tensor:
        named, group = operator.named_parameters(), self.rows.group
        parameters = {name: with_summed_gradient(p, group) for name, p in named}
        columns = rows.narrow(1, operator.first, operator.width)
        partial: Tensor = functional_call(operator, parameters, (columns, bags))
        shape = tuple(getattr(partial, "shape", ()))
        if len(shape) != 2 or shape[0] != bags.samples:
            arg, rule = f"{type(operator).__name__}.partial", f"a tensor [{bags.samples}, m]"
            checks.fail(_OP, arg, rule, shape, verb="return")
        return partial

    def _bags(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Bags, bool]:
        """Return the names and bags of this rank's rows in the global batch, and whether to check
        the capacity (see `_compare`). With "all_reduce" every rank has the whole batch already.
        """
        self._require_usable(ids, lengths)
        rank, ranks, bags = self.rows.group.rank(), self.rows.group.size(), lengths.numel()
        owners, names = self.rows.owners(ids)
        bag = torch.arange(bags, dtype=torch.int64, device=ids.device)
        bag = bag.repeat_interleave(lengths.flatten())
        lengths_of, names_of, _ = by_rank(owners * bags + bag, names, [bags] * ranks)
        if self.aggregate == "all_reduce":
            local, checksum = names_of[rank], _checksum(ids, lengths)
            _, tight = self._compare([0] * ranks, lengths.shape, len(local), checksum)
            return local, Bags(lengths_of[rank].view(1, *lengths.shape)), tight
        counts, tight = self._compare([len(part) for part in names_of], lengths.shape, len(ids))
        group, always = self._ids_group.get(), [-1] * ranks  # -1: always send lengths
        arriving = list(zip(counts, always, strict=True))
        received, local = all_to_all_bags(_OP, lengths_of, names_of, always, arriving, group)
        return local, Bags(received.view(ranks, *lengths.shape)), tight

    def _require_usable(self, ids: Tensor, lengths: Tensor) -> None:
        """Raise if the arguments are invalid. The other ranks also raise."""
        try:
            require_bags(_OP, ids, lengths, self.rows.weight)
            if len(lengths) == 0:
                checks.fail(_OP, "lengths", "at least 1 field", "none", verb="have")
            self.rows.require_ids(_OP, ids)
            for operator in cast(Iterable[SubstituteOperator], self.operators):
                operator.require_fit(self.rows.weight, len(lengths))
        except (TypeError, ValueError) as error:
            with contextlib.suppress(ValueError):
                self._compare([0] * self.rows.group.size(), (0, 0), 0, error=error)
            raise

    def _require_capacity(self, names: Tensor) -> None:
        """Raise on all ranks if a rank lacks capacity. Takes one exchange of counts."""
        needed, capacity = len(self.rows) + self.rows.missing(names), self.rows.capacity
        assert capacity is not None  # only called if the capacity is limited
        numbers = [[needed, capacity]] * self.rows.group.size()
        pairs = all_to_all_numbers(_OP, numbers, {}, self.rows.weight.device, self._ids_group.get())
        over = [f"{c} for {n} on rank {rank}" for rank, (n, c) in enumerate(pairs) if n > c]
        if over:
            rule, got = "at least the number of features seen", ", ".join(over)
            checks.fail(_OP, "capacity", rule, got)

    def _compare(
        self,
        counts: list[int],
        shape: Sequence[int],
        ids: int,
        checksum: int = 0,
        error: Exception | None = None,
    ) -> tuple[list[int], bool]:
        """Send counts[r] to rank r. Raise on every rank if other arguments differ between ranks.

        Args:
            ids: the number of ids that this rank contributes to the global batch.
            error: why this rank's arguments are invalid, so that every rank must raise.

        Returns:
            The counts received from each rank, and whether any rank has fewer free rows than the
            batch has ids. The second value is the same on every rank.
        """
        fields, batch = shape
        trained = [name for name, p in self.named_parameters() if p.requires_grad]
        settings = {
            "fields": fields,
            "batch": batch,
            "training": self.rows.training,
            "parameters with gradients": _names_code(trained if torch.is_grad_enabled() else []),
        }
        if self.aggregate == "all_reduce":
            settings["checksum of the batch"] = checksum
        capacity = self.rows.capacity
        limits = [] if capacity is None else [ids, capacity - len(self.rows)]
        numbers = [[count, *limits] for count in counts]
        device, group = self.rows.weight.device, self._ids_group.get()
        received = all_to_all_numbers(_OP, numbers, settings, device, group, error)
        arriving, *limits_of_ranks = zip(*received, strict=True)
        tight = bool(limits_of_ranks) and sum(limits_of_ranks[0]) > min(limits_of_ranks[1])
        return list(arriving), tight


def _names_code(names: Sequence[str]) -> int:
    """A number that identifies these names: their count, then a checksum."""
    return len(names) * 10**10 + zlib.crc32("\n".join(names).encode())


def _checksum(ids: Tensor, lengths: Tensor) -> int:
    values = torch.cat([ids.long(), lengths.flatten().long()])
    place = torch.arange(len(values), dtype=torch.int64, device=values.device)
    return int(((values ^ place * 0x9E3779B1) * (2 * place + 1)).sum()) % 2**52
