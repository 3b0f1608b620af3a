"""Operators on rows of features, each a function of a sum over features."""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dct_kernels import checks

MOST = 2**31 - 1


class Bags:
    """The bags of all samples, one per sample and field. A bag is a list of rows.

    Args:
        lengths: int [sources, fields, batch], the number of rows in each bag, in the order of rows.
            A source is a rank that passed samples.

    Attributes:
        samples: the number of samples of all sources.
    """

    def __init__(self, lengths: Tensor) -> None:
        self._shape = lengths.shape
        self.samples = lengths.shape[0] * lengths.shape[2]
        flat = lengths.flatten().long()
        self._starts = flat.cumsum(0) - flat

    def sums(self, rows: Tensor) -> Tensor:
        """Sum the rows [n, w] of each bag in order: [samples, fields, w], 0 for empty bags."""
        each = torch.arange(len(rows), dtype=torch.int64, device=rows.device)
        pooled = F.embedding_bag(each, rows, self._starts, mode="sum")
        return pooled.view(*self._shape, rows.shape[1]).transpose(1, 2).flatten(0, 1)


class SubstituteOperator(nn.Module, ABC):
    """An operator y = g(sum over ranks of f(rows of the rank)) of an `EquivalentSubstitution`.

    Subclasses implement f as `partial` and g as `combine`, without mutating arguments. Only
    `partial` uses parameters, which are the same on every rank. Results are deterministic if
    `partial` and `combine` are. The operators of this package are deterministic on the CPU.

    Args:
        width: the number of columns of a feature's row that the operator uses.
        first: the first of these columns. Operators may share columns.

    Raises:
        ValueError, TypeError: an argument is out of range.

    Source: DES (arXiv 1909.04823).
    """

    def __init__(self, width: int, first: int = 0) -> None:
        super().__init__()
        op = type(self).__name__
        checks.require_int(op, "width", width, 1, MOST)
        checks.require_int(op, "first", first, 0, MOST)
        self.width, self.first = width, first

    def extra_repr(self) -> str:
        found = [f"{name}={tuple(p.shape)} {p.dtype}" for name, p in self.named_parameters()]
        return ", ".join([f"width={self.width}", f"first={self.first}", *found])

    def require_fit(self, weight: Tensor, fields: int) -> None:
        """Raise if the operator cannot use rows of `weight` with this number of fields."""

    def forward(self, rows: Tensor, bags: Bags) -> Tensor:
        """Call `partial`. functional_call needs `forward` to substitute the parameters."""
        return self.partial(rows, bags)

    @abstractmethod
    def partial(self, rows: Tensor, bags: Bags) -> Tensor:
        """Compute f of rows [n, width] in `bags`: [samples, m]. m depends on the field count."""

    @abstractmethod
    def combine(self, total: Tensor) -> Tensor:
        """Compute g from `total` [batch, m], the sum of the partial results of all ranks."""


class LinearTerms(SubstituteOperator):
    """The linear terms of logistic regression: y[b] = sum of w[j] over the sample's features j.

    The result is [batch], in the dtype of the rows. The operator sends one number per sample. The
    width is 1. For `first`, see `SubstituteOperator`.
    """

    def __init__(self, first: int = 0) -> None:
        super().__init__(1, first)

    def partial(self, rows: Tensor, bags: Bags) -> Tensor:
        return bags.sums(rows).sum(1)

    def combine(self, total: Tensor) -> Tensor:
        return total.squeeze(1)


class SumPooledEmbedding(SubstituteOperator):
    """An embedding bag per field: y[b, field] = sum of v[j] over the features j in the bag.

    The result is [batch, fields, width], in the dtype of the rows. The operator sends fields x
    width numbers per sample.
    """

    def partial(self, rows: Tensor, bags: Bags) -> Tensor:
        return bags.sums(rows).flatten(1)

    def combine(self, total: Tensor) -> Tensor:
        fields: Tensor = total.unflatten(1, (-1, self.width))
        return fields


class FactorizationMachine(SubstituteOperator):
    """Second-order interactions: y[b] = sum of v[j].v[k] over pairs of the sample's features.

    The operator uses Rendle's identity: half of (|sum of v[j]|^2 - sum of |v[j]|^2). Features of
    all fields are included, and each repetition of a feature counts. The result is [batch], in the
    dtype of the rows. The operator sends width + 1 numbers per sample.
    """

    def partial(self, rows: Tensor, bags: Bags) -> Tensor:
        squares = rows.square().sum(1, keepdim=True)
        return bags.sums(torch.cat([rows, squares], dim=1)).sum(1)

    def combine(self, total: Tensor) -> Tensor:
        return (total[:, :-1].square().sum(1) - total[:, -1]) / 2


class FirstLayer(SubstituteOperator):
    """The first linear layer over the concatenated pooled embeddings of all fields, without bias.

    y[b] = weight @ (bag sums of all fields), [batch, out_features]. The operator sends
    `out_features` numbers per sample in each direction, while `SumPooledEmbedding` followed by a
    Linear sends fields x width numbers. Every rank holds the weight [out_features, fields * width].
    The weight starts as float32 on the CPU with torch's initial values. Use `to` to move it to the
    dtype and device of the rows. One all-reduce sums the gradient of the weight over ranks.

    Args:
        fields: the number of fields in `lengths`.
        width, first: see `SubstituteOperator`.
        out_features: the number of outputs of the layer.

    Raises:
        ValueError, TypeError: an argument is out of range, or, in forward, `fields` or the dtype of
            the weight does not match.
    """

    def __init__(self, fields: int, width: int, out_features: int, first: int = 0) -> None:
        super().__init__(width, first)
        checks.require_int("FirstLayer", "fields", fields, 1, MOST)
        checks.require_int("FirstLayer", "out_features", out_features, 1, MOST)
        inputs = fields * width
        linear = nn.Linear(inputs, out_features, bias=False, dtype=torch.float32, device="cpu")
        self.weight = linear.weight

    def require_fit(self, weight: Tensor, fields: int) -> None:
        expected, dtype = self.weight.shape[1] // self.width, self.weight.dtype
        if dtype != weight.dtype:
            checks.fail("FirstLayer", "weight", f"{weight.dtype} like rows", str(dtype), TypeError)
        if fields != expected:
            checks.fail("FirstLayer", "lengths", f"{expected} fields", fields, verb="have")

    def partial(self, rows: Tensor, bags: Bags) -> Tensor:
        return F.linear(bags.sums(rows).flatten(1), self.weight)

    def combine(self, total: Tensor) -> Tensor:
        return total


def require_operator(op: str, arg: str, operator: nn.Module, width: int) -> None:
    """Raise unless `operator` is a SubstituteOperator for rows of this width."""
    if not isinstance(operator, SubstituteOperator):
        rule = "a SubstituteOperator, whose partial results add up (docs/guide/des.md)"
        checks.fail(op, arg, rule, checks.shown(operator), TypeError)
    end = operator.first + operator.width
    if end > width:
        rule, got = f"use columns of rows of width {width}", f"{operator.first} to {end - 1}"
        raise ValueError(f"dct::{op}: {arg} must {rule}, got columns {got}")
