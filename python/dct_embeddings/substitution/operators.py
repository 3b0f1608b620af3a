"""Operators on the rows of features that are sums over features, up to a last function.

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
    """The rows of each field of each sample.

    Args:
        lengths: int [sources, fields, batch], rows of each bag; rows lie in this order. The samples
            are those of all sources.

    Attributes:
        samples: their number.
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

    DES (arXiv 1909.04823). Subclasses define f as `partial` and g as `combine`, without mutating
    their arguments. Their parameters are used in `partial` only, and the same on every rank.
    Deterministic if `partial` and `combine` are; those here are on the CPU.

    Args:
        width: columns of a feature's row that it uses.
        first: the first of these columns. Operators may share columns.

    Raises:
        ValueError, TypeError: an argument is out of its range; the text names it.
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
        """Raise if it cannot work on rows of `weight` in so many fields. By default never."""

    def forward(self, rows: Tensor, bags: Bags) -> Tensor:
        """Call `partial`. `EquivalentSubstitution` swaps in parameters that sum gradients."""
        return self.partial(rows, bags)

    @abstractmethod
    def partial(self, rows: Tensor, bags: Bags) -> Tensor:
        """f: the contribution [samples, m] of rows [n, width] in `bags`; m depends on the number of
        fields only."""

    @abstractmethod
    def combine(self, total: Tensor) -> Tensor:
        """g: the result for `total` [batch, m], the sum of all ranks' partial results."""


class LinearTerms(SubstituteOperator):
    """The linear terms of logistic regression: y[b] = sum of w[j] over the sample's features j.

    Result [batch], of the rows' dtype. Sends 1 number per sample. `first`: as of
    `SubstituteOperator`; width is 1.
    """

    def __init__(self, first: int = 0) -> None:
        super().__init__(1, first)

    def partial(self, rows: Tensor, bags: Bags) -> Tensor:
        return bags.sums(rows).sum(1)

    def combine(self, total: Tensor) -> Tensor:
        return total.squeeze(1)


class SumPooledEmbedding(SubstituteOperator):
    """An embedding bag per field: y[b, field] = sum of v[j] over the features j in the bag.

    Result [batch, fields, width], of the rows' dtype. Sends fields x width numbers per sample.
    Arguments: as of `SubstituteOperator`.
    """

    def partial(self, rows: Tensor, bags: Bags) -> Tensor:
        return bags.sums(rows).flatten(1)

    def combine(self, total: Tensor) -> Tensor:
        fields: Tensor = total.unflatten(1, (-1, self.width))
        return fields


class FactorizationMachine(SubstituteOperator):
    """Interactions of second order: y[b] = sum of v[j].v[k] over pairs of the sample's features.

    By Rendle's identity, half of |sum of v[j]|^2 - sum of |v[j]|^2. Features of all fields count, a
    feature that a sample has twice as two. Result [batch], of the rows' dtype. Sends width + 1
    numbers per sample. Arguments: as of `SubstituteOperator`.
    """

    def partial(self, rows: Tensor, bags: Bags) -> Tensor:
        squares = rows.square().sum(1, keepdim=True)
        return bags.sums(torch.cat([rows, squares], dim=1)).sum(1)

    def combine(self, total: Tensor) -> Tensor:
        return (total[:, :-1].square().sum(1) - total[:, -1]) / 2


class FirstLayer(SubstituteOperator):
    """The first fully connected layer over all fields' pooled embeddings side by side, no bias.

    y[b] = weight @ the bag sums of all fields. Result [batch, out_features]. Sends `out_features`
    numbers per sample; `SumPooledEmbedding` with a Linear after it sends fields x width. The
    backward pass sends as many. Its weight [out_features, fields * width], of the rows' dtype, is
    on every rank, with torch's initial values; one all-reduce sums its gradient over ranks.

    Args:
        fields: the number of fields in `lengths`.
        width: as of `SubstituteOperator`.
        first: as of `SubstituteOperator`.
        out_features: of the layer.

    Raises:
        ValueError, TypeError: an argument is out of its range; the text names it. In forward:
            `fields` or the weight's dtype does not fit.
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
    """Raise unless partial results of `operator` add up and it fits the rows; the text says why."""
    if not isinstance(operator, SubstituteOperator):
        rule = "a SubstituteOperator, whose partial results add up (docs/guide/des.md)"
        checks.fail(op, arg, rule, type(operator).__name__, TypeError)
    end = operator.first + operator.width
    if end > width:
        rule = f"columns of rows of width {width}"
        checks.fail(op, arg, rule, f"columns {operator.first} to {end - 1}", verb="use")
