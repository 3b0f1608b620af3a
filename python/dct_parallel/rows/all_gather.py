"""Compressed all-gather of rows, for a layer whose features are split over ranks."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

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
    start_all_gather,
    start_all_to_all,
)


@runs_eagerly
@checks.names_keywords
def all_gather_rows(
    x: Tensor,
    widths: Sequence[int] | None = None,
    *,
    format: str | torch.dtype | RowFormat,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Concatenate the columns that each rank has of the same rows. Differentiable in x.

    This function is for tensor parallelism. Each rank sends its columns compressed, as in
    `all_to_all_rows`. A density selects the k = ceil(density * d) largest entries of each row of x.
    As with the all-gather of torch, the gradient of x is the sum over all ranks. If all ranks
    compute the same loss, divide the loss by the number of ranks. The sum is in float32 in rank
    order, so it is deterministic.

    The forward pass runs one all-gather, padded to the widest x. The backward pass runs one
    all-to-all, which sends gradients to the rank of the columns. Every rank must run both passes.
    `widths` has the same effect as `output_splits` in `all_to_all_rows`.

    Args:
        x: float32, bfloat16 or float16 [B, d], the same B on every rank; not mutated.
        widths: the d of every rank; given on all ranks or on none.
        format, group: as in `all_to_all_rows`.

    Returns:
        [B, sum of every rank's d] in x's dtype, in rank order.

    Raises:
        ValueError, TypeError, RuntimeError: as in `all_to_all_rows`; also if B differs.

    Source: see `all_to_all_rows`. This project applies the method to an all-gather.
    """
    return all_gather_rows_async(x, widths, format=format, group=group).wait()


@runs_eagerly
@checks.names_keywords
def all_gather_rows_async(
    x: Tensor,
    widths: Sequence[int] | None = None,
    *,
    format: str | torch.dtype | RowFormat,
    group: dist.ProcessGroup | None = None,
) -> Transfer:
    """Like `all_gather_rows`, but returns a handle immediately; its `wait()` returns the rows.

    See `all_to_all_rows_async`.
    """
    op = "all_gather_rows"
    group = require_group(op, group)
    x = require_rows(op, x)
    row_format = RowFormat.parse(op, format)
    rows, width = x.shape
    if widths is None:
        counts = [[width]] * group.size()
        settings = {"B": rows, **row_format.settings_to_compare(x)}
        widths = [n for [n] in all_to_all_numbers(op, counts, settings, x.device, group)]
    require_counts(op, "widths", widths, group.size(), low=1)
    if widths[group.rank()] != width:
        checks.fail(op, "x", f"width {widths[group.rank()]} like widths", width, verb="have")
    return _start(x, list(widths), [row_format.codec(width, x.dtype) for width in widths], group)


def _start(
    x: Tensor, widths: list[int], codecs: list[RowCodec], group: dist.ProcessGroup
) -> Transfer:
    rows, dtype = len(x), x.dtype
    rank, ranks, held = group.rank(), group.size(), GroupForBackward(group)
    codec = codecs[rank]
    longest = rows * max(codec.message_bytes for codec in codecs)

    def send(x: Tensor) -> Receive:
        message = codec.encode(x).flatten()
        receive = start_all_gather(pad(message, (0, longest - len(message))), held)
        return lambda: torch.cat([*map(decode, codecs, receive())], 1)

    def decode(codec: RowCodec, message: Tensor) -> Tensor:
        encoded = message[: rows * codec.message_bytes]
        return codec.decode(encoded.view(rows, codec.message_bytes), dtype)

    def send_gradient(grad: Tensor) -> Receive:
        parts = zip(codecs, grad.split(widths, 1), strict=True)
        messages = [codec.encode_gradient(part.contiguous()).flatten() for codec, part in parts]
        sizes = [len(message) for message in messages]
        receive = start_all_to_all(torch.cat(messages), sizes, [sizes[rank]] * ranks, held)
        gradients = (ranks, rows, codec.gradient_bytes)
        return lambda: codec.decode_gradient_sum(receive().view(gradients), dtype)

    return Transfer("all_gather_rows", x, send, send_gradient)
