"""Compressed all-to-all of rows, for example the pooled embeddings of a recommender."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dct_kernels import checks

from ..groups import GroupForBackward, require_group
from .codecs import RowCodec, RowFormat
from .packing import require_rows
from .transfer import (
    Receive,
    Transfer,
    all_to_all_numbers,
    require_counts,
    runs_eagerly,
    start_all_to_all,
)


@runs_eagerly
@checks.names_keywords
def all_to_all_rows(
    x: Tensor,
    splits: Sequence[int],
    output_splits: Sequence[int] | None = None,
    *,
    format: str | torch.dtype | RowFormat,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Send compressed rows to the ranks that they belong to. Differentiable in x.

    It works like torch.distributed.all_to_all_single with uneven splits, but compresses rows and
    gradients. With a density, only sent entries receive a gradient. Otherwise gradients are
    straight-through and quantized. If all entries are sent in x's dtype, the result has the same
    bits as the uncompressed exchange. Results are deterministic.

    The forward and backward pass run one collective each. Every rank of the group must call this
    function, even if it has no rows. If x needs a gradient, every rank must run the backward pass.
    Without `output_splits`, ranks first compare their arguments in an all-to-all of 40 bytes to
    every rank. The host waits for this comparison, so CUDA graphs cannot capture the call. With
    `output_splits`, ranks with different arguments may hang or receive wrong values, but never read
    out of bounds.

    Args:
        x: float32, bfloat16 or float16 [sum(splits), d], ordered by destination; not mutated.
        splits: number of rows to send to each rank of the group, at least 0.
        output_splits: number of rows to receive from each rank; given on all ranks or on none.
        format: a name ("int8", "int4", "bfloat16"), a torch dtype or a `RowFormat`, such as
            `RowFormat("int4", backward="sign")` or `RowFormat(density=0.05)`; the same on all
            ranks.
        group: the ranks that take part; default: all. gloo or NCCL. Its timeout bounds the wait for
            a missing rank.

    Returns:
        [rows received, d] in x's dtype, ordered by source.

    Raises:
        ValueError, TypeError: an argument is out of range on this rank. The other ranks raise an
            error at the group's timeout.
        ValueError: d, a setting or requires_grad differ between ranks. Every rank raises, but only
            without `output_splits`.
        RuntimeError: the collective failed, for example because a rank is missing.

    Source: DCT, model-parallel (arXiv 2010.08899). This project adds exactly k entries per row,
    quantized formats and the wire format.
    """
    return all_to_all_rows_async(x, splits, output_splits, format=format, group=group).wait()


@runs_eagerly
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

    Computation before `wait()` overlaps with the exchange. The backward pass of this computation
    overlaps with the exchange of gradients. Without `output_splits`, this call blocks until it has
    received the counts. Every rank calls `wait()` once per handle, in the same order. Some ranks
    may call `all_to_all_rows` instead. Arguments and errors are as in `all_to_all_rows`.
    """
    op = "all_to_all_rows"
    group = require_group(op, group)
    x = require_rows(op, x)
    row_format = RowFormat.parse(op, format)
    require_counts(op, "splits", splits, group.size())
    rows, width = x.shape
    if rows != sum(splits):
        checks.fail(op, "x", f"{sum(splits)} rows like splits", rows, verb="have")
    if output_splits is None:
        counts, settings = [[n] for n in splits], {"d": width, **row_format.settings_to_compare(x)}
        output_splits = [n for [n] in all_to_all_numbers(op, counts, settings, x.device, group)]
    require_counts(op, "output_splits", output_splits, group.size())
    if width == 0:  # checked after the comparison, so that every rank raises
        checks.fail(op, "x", "at least 1 column", "0", verb="have")
    return _start(op, x, row_format.codec(width, x.dtype), splits, output_splits, group)


# A collective that is differentiable in x, like functools.partial(all_to_all_rows, format="int8").
# Its arguments are x [sum(splits), d] ordered by destination, splits, output_splits and group=...
# It returns rows [sum(output_splits), d] ordered by source.
RowExchange = Callable[..., Tensor]


def whole_rows(
    x: Tensor, splits: Sequence[int], output_splits: Sequence[int], *, group: dist.ProcessGroup
) -> Tensor:
    """Exchange uncompressed rows of any dtype. This function is a `RowExchange`."""
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
    splits, output_splits = list(splits), list(output_splits)  # the caller may change its lists

    def send(x: Tensor) -> Receive:
        receive = start_all_to_all(codec.encode(x), splits, output_splits, held)
        return lambda: codec.decode(receive(), dtype)

    def send_gradient(grad: Tensor) -> Receive:
        message = codec.encode_gradient(grad.contiguous())
        receive = start_all_to_all(message, output_splits, splits, held)
        return lambda: codec.decode_gradient(receive(), dtype)

    return Transfer(op, x, send, send_gradient)
