"""Rows to the ranks they belong to: the pooled-embedding exchange of a recommender."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dct_kernels import checks

from ..groups import GroupForBackward, require_group
from .codecs import RowCodec
from .packing import require_rows
from .row_format import RowFormat
from .transfer import (
    Receive,
    Transfer,
    exchange_numbers,
    exchange_of_rows,
    require_counts,
    start_all_to_all,
)


@exchange_of_rows
@checks.names_keywords
def all_to_all_rows(
    x: Tensor,
    splits: Sequence[int],
    output_splits: Sequence[int] | None = None,
    *,
    format: str | torch.dtype | RowFormat,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Send rows to the ranks they belong to, compressed. Differentiable in x.

    Like torch.distributed.all_to_all_single with uneven splits, but compresses rows and gradients.
    With a density, the gradient of a row is that of its sent entries. Otherwise it is
    straight-through, quantized on its way. With density 1 or every entry, in x's own dtype, the
    result has the same bits as the uncompressed exchange. Deterministic.

    Forward and backward are one collective each. Every rank of the group must call this function,
    even if it has no rows. If x needs a gradient, every rank must run the backward pass. Without
    `output_splits`, an all-to-all of 40 bytes to every rank comes first, which checks that the
    ranks agree. The host waits for its result, so the call cannot be captured in a CUDA graph. With
    `output_splits`, ranks that disagree may hang or receive wrong values, but never read out of
    bounds.

    Args:
        x: float32, bfloat16 or float16 [sum(splits), d], ordered by destination; not mutated.
        splits: rows to send to each rank of the group, from 0 up.
        output_splits: rows to receive from each; given on every rank or on none.
        format: a name ("int8", "int4", "bfloat16"), a torch dtype or a `RowFormat`:
            `RowFormat("int4", backward="sign")`, `RowFormat(density=0.05)`. The same on every rank.
        group: the ranks that take part, default all; gloo or NCCL. Its timeout bounds the wait for
            a missing rank.

    Returns:
        [rows received, d] of x's dtype, ordered by source.

    Raises:
        ValueError, TypeError: an argument is out of its range on this rank. The other ranks raise
            an error when the group's timeout ends.
        ValueError: d, a setting or requires_grad differ between ranks. Raised on every rank, with
            the values of all ranks; not with `output_splits`.
        RuntimeError: from the collective, if a rank is missing.

    Source: DCT, model-parallel side (arXiv 2010.08899). Exactly k entries per row, few bits, and
    the wire format are our reconstruction.
    """
    return all_to_all_rows_async(x, splits, output_splits, format=format, group=group).wait()


@exchange_of_rows
@checks.names_keywords
def all_to_all_rows_async(
    x: Tensor,
    splits: Sequence[int],
    output_splits: Sequence[int] | None = None,
    *,
    format: str | torch.dtype | RowFormat,
    group: dist.ProcessGroup | None = None,
) -> Transfer:
    """Like `all_to_all_rows`, but returns a handle immediately; its `wait()` returns the rows.

    Computation before `wait()` overlaps with the exchange, and its backward pass with the exchange
    of gradients. The host waits here only without `output_splits`, for the counts. Every rank calls
    `wait()` once per handle, in the same order. A rank may call `all_to_all_rows` while others call
    this function. Arguments and errors are the same.
    """
    op = "all_to_all_rows"
    group = require_group(op, group)
    x = require_rows(op, x)
    row_format = RowFormat.parse(op, format)
    require_counts(op, "splits", splits, group.size())
    rows, width = x.shape
    if rows != sum(splits):
        raise ValueError(f"dct::{op}: x must have {sum(splits)} rows like splits, got {rows}")
    if output_splits is None:
        counts, settings = [[n] for n in splits], {"d": width, **row_format.settings_to_compare(x)}
        output_splits = [n for [n] in exchange_numbers(op, counts, settings, x.device, group)]
    require_counts(op, "output_splits", output_splits, group.size())
    if width == 0:  # raised on every rank, because by now they agree on the width
        raise ValueError(f"dct::{op}: x must have at least 1 column, got 0")
    return _start(op, x, row_format.codec(width, x.dtype), splits, output_splits, group)


# Collective, and differentiable in x: (x [sum(splits), d] ordered by destination, splits,
# output_splits, group=...) to [sum(output_splits), d] by source. For example
# functools.partial(all_to_all_rows, format="int8").
RowExchange = Callable[..., Tensor]


def whole_rows(
    x: Tensor, splits: Sequence[int], output_splits: Sequence[int], *, group: dist.ProcessGroup
) -> Tensor:
    """A `RowExchange` of uncompressed rows of any dtype."""
    return _start("whole_rows", x, RowCodec(), splits, output_splits, group).wait()


def _start(
    op: str,
    x: Tensor,
    codec: RowCodec,
    splits: Sequence[int],
    output_splits: Sequence[int],
    group: dist.ProcessGroup,
) -> Transfer:
    dtype, held = x.dtype, GroupForBackward(group)
    splits, output_splits = list(splits), list(output_splits)  # the caller may change its own

    def send(x: Tensor) -> Receive:
        receive = start_all_to_all(codec.encode(x), splits, output_splits, held)
        return lambda: codec.decode(receive(), dtype)

    def send_gradient(grad: Tensor) -> Receive:
        message = codec.encode_gradient(grad.contiguous())
        receive = start_all_to_all(message, output_splits, splits, held)
        return lambda: codec.decode_gradient(receive(), dtype)

    return Transfer(op, x, send, send_gradient)
