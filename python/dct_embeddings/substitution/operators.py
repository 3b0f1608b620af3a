"""Operators on the rows of features that are sums over features, but for what comes last.

Such an operator y = F(rows of a sample's features) has an equivalent substitute: y = g(sum over
ranks of f(the rows that a rank owns)). `partial` is f, `combine` is g (arXiv 1909.04823).
"""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dct_kernels import checks

MOST = 2**31 - 1


class Bags:
    """Which rows belong to which field of which sample.

    Args:
        lengths: int [sources, fields, batch], rows of each bag; rows lie in this order. The samples
            are those of all sources.

    Attributes:
        samples: how many they are.
    """

    def __init__(self, lengths: Tensor) -> None:
        self._shape = lengths.shape
        self.samples = lengths.shape[0] * lengths.shape[2]
        flat = lengths.flatten().long()
        self._starts = flat.cumsum(0) - flat

    def sums(self, rows: Tensor) -> Tensor:
        """The sum of every bag's rows [n, w], in their order: [samples, fields, w]; 0 if empty."""
        each = torch.arange(len(rows), device=rows.device)
        pooled = F.embedding_bag(each, rows, self._starts, mode="sum")
        return pooled.view(*self._shape, rows.shape[1]).transpose(1, 2).flatten(0, 1)


class SubstituteOperator(nn.Module, ABC):
    """An operator y = g(sum over ranks of f(own rows)) of an `EquivalentSubstitution`.

    Parameters of its own are used in `partial`, and the same on every rank.

    Args:
        width: numbers of a feature's row that it uses.
        first: where in the row they begin, so that operators may share some of them, or none.
    """

    def __init__(self, width: int, first: int = 0) -> None:
        super().__init__()
        op = type(self).__name__
        checks.require_int(op, "width", width, 1, MOST)
        checks.require_int(op, "first", first, 0, MOST)
        self.width, self.first = width, first

    def extra_repr(self) -> str:
        own = [f"{name}={tuple(p.shape)} {p.dtype}" for name, p in self.named_parameters()]
        return ", ".join([f"width={self.width}", f"first={self.first}", *own])

    def require_fit(self, weight: Tensor, fields: int) -> None:
        """Raise if it cannot work on rows of `weight` in bags of so many fields. Here it can."""

    def forward(self, rows: Tensor, bags: Bags) -> Tensor:
        """`partial`: by a call, `EquivalentSubstitution` lends it parameters that sum gradients."""
        return self.partial(rows, bags)

    @abstractmethod
    def partial(self, rows: Tensor, bags: Bags) -> Tensor:
        """f: what rows [n, width] of `bags` contribute, [samples, m]; m by the fields alone."""

    @abstractmethod
    def combine(self, total: Tensor) -> Tensor:
        """g: the result from the sum of all ranks' partial results, [batch, m]."""


class LinearTerms(SubstituteOperator):
    """The linear terms of logistic regression: y[b] = sum of w[j] over the sample's features j.

    Sends 1 number a sample.
    """

    def __init__(self, first: int = 0) -> None:
        super().__init__(1, first)

    def partial(self, rows: Tensor, bags: Bags) -> Tensor:
        return bags.sums(rows).sum(1)

    def combine(self, total: Tensor) -> Tensor:
        return total.squeeze(1)


class SumPooledEmbedding(SubstituteOperator):
    """An embedding bag a field: y[b, field] = sum of v[j] over the features j in the bag.

    Sends fields x width numbers a sample.
    """

    def partial(self, rows: Tensor, bags: Bags) -> Tensor:
        return bags.sums(rows).flatten(1)

    def combine(self, total: Tensor) -> Tensor:
        fields: Tensor = total.unflatten(1, (-1, self.width))
        return fields


class FactorizationMachine(SubstituteOperator):
    """Interactions of second order: y[b] = sum of v[j].v[k] over pairs of the sample's features.

    By Rendle's identity, half of |sum of v[j]|^2 - sum of |v[j]|^2. Features of all fields count, a
    feature that a sample has twice as two. Sends width + 1 numbers a sample.
    """

    def partial(self, rows: Tensor, bags: Bags) -> Tensor:
        squares = rows.square().sum(1, keepdim=True)
        return bags.sums(torch.cat([rows, squares], dim=1)).sum(1)

    def combine(self, total: Tensor) -> Tensor:
        return (total[:, :-1].square().sum(1) - total[:, -1]) / 2


class FirstLayer(SubstituteOperator):
    """The first fully connected layer over all fields' pooled embeddings side by side, no bias.

    y[b] = weight @ the bag sums of all fields. Sends `out_features` numbers a sample, where
    `SumPooledEmbedding` with a Linear after it sends fields x width, and has no more to send back.
    Its weight [out_features, fields * width] is on every rank, with torch's initial values; what
    ranks have of its gradient is added up by one all-reduce.

    Args:
        fields: as many as `lengths` will have.
        width: as of `SubstituteOperator`.
        first: as of `SubstituteOperator`.
        out_features: of the layer.
    """

    def __init__(self, fields: int, width: int, out_features: int, first: int = 0) -> None:
        super().__init__(width, first)
        checks.require_int("FirstLayer", "fields", fields, 1, MOST)
        checks.require_int("FirstLayer", "out_features", out_features, 1, MOST)
        self.weight = nn.Linear(fields * width, out_features, bias=False).weight

    def require_fit(self, weight: Tensor, fields: int) -> None:
        own = self.weight.shape[1] // self.width
        if self.weight.dtype != weight.dtype:
            rule, got = f"{weight.dtype} like rows", str(self.weight.dtype)
            checks.fail("FirstLayer", "weight", rule, got, TypeError)
        if fields != own:
            checks.fail("FirstLayer", "lengths", f"{own} fields", fields, verb="have")

    def partial(self, rows: Tensor, bags: Bags) -> Tensor:
        return F.linear(bags.sums(rows).flatten(1), self.weight)

    def combine(self, total: Tensor) -> Tensor:
        return total


def require_operator(op: str, arg: str, operator: nn.Module, width: int) -> None:
    """`operator` has partial results that add up, or the error says why not, and fits the rows."""
    if not isinstance(operator, SubstituteOperator):
        rule = "a SubstituteOperator, whose partial results add up"
        checks.fail(op, arg, rule, f"{type(operator).__name__}{_why_not(operator)}", TypeError)
    end = operator.first + operator.width
    if end > width:
        rule = f"columns of rows of width {width}"
        checks.fail(op, arg, rule, f"columns {operator.first} to {end - 1}", verb="use")


def _why_not(module: object) -> str:
    name, mode = type(module).__name__, getattr(module, "mode", None)
    if name.startswith(("MaxPool", "AdaptiveMaxPool")) or mode == "max":
        return ": the maximum of a bag is no sum of what ranks have of it"
    if isinstance(module, (nn.MultiheadAttention, nn.TransformerEncoderLayer)):
        return ": attention weighs a row by the others of its bag, which other ranks have"
    if mode == "mean":
        return ": take SumPooledEmbedding, and divide by the lengths"
    return ""
