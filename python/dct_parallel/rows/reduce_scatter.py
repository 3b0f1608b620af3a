"""Compressed reduce-scatter of rows, for pooled embeddings of a table that is split by rows."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ..groups import GroupForBackward
from .codecs import RowFormat, dequantize_sum
from .transfer import Receive, Transfer, runs_eagerly, start_all_gather, start_all_to_all


@runs_eagerly
def reduce_scatter_rows_async(
    x: Tensor,
    splits: Sequence[int],
    *,
    format: RowFormat,
    group: dist.ProcessGroup,
    average_gradients: bool = False,
) -> Transfer:
    """Sum the rows of each rank over all ranks, with compression. Differentiable in x.

    This is a reduce-scatter of parts that may differ in size. Messages in a quantized format cannot
    be added. So one all-to-all sends each row to its rank, which adds the rows in float32 and in
    rank order. The result is deterministic. Gradients are straight-through and quantized. One
    all-gather, padded to the longest part, sends the gradients of all ranks to every rank.

    Ranks do not compare their arguments. Every rank must call this function with the same `splits`,
    `format` and width. If x needs a gradient, every rank must run the backward pass.

    Args:
        x: float32, bfloat16 or float16 [sum(splits), d], ordered by destination; not mutated.
        splits: the number of rows of each rank, at least 0.
        format: a format without a density.
        group: the ranks that take part.
        average_gradients: divide gradients by the number of ranks.

    Returns:
        A handle, as from `all_to_all_rows_async`. Its `wait()` returns this rank's rows
        [splits[rank], d] of x's dtype.
    """
    dtype, width, held = x.dtype, x.shape[1], GroupForBackward(group)
    codec, ranks, splits = format.codec(width, dtype), group.size(), list(splits)
    rows = splits[group.rank()]
    even = len(set(splits)) == 1

    def send(x: Tensor) -> Receive:
        receive = start_all_to_all(codec.encode(x), splits, [rows] * ranks, held)
        return lambda: add(receive().view(ranks, rows, codec.message_bytes))

    def add(messages: Tensor) -> Tensor:
        forward, _ = format.formats(dtype)
        return dequantize_sum(messages, width, forward, dtype)

    def send_gradient(grad: Tensor) -> Receive:
        message = codec.encode_gradient(grad.contiguous())
        padding = (0, 0, 0, max(splits) - rows)
        receive = start_all_gather(pad(message, padding).flatten(), held)
        return lambda: gradient(receive().view(ranks, max(splits), codec.gradient_bytes))

    def gradient(messages: Tensor) -> Tensor:
        parts = zip(messages, splits, strict=True)
        sent = messages.flatten(0, 1) if even else torch.cat([m[:n] for m, n in parts])
        grad = codec.decode_gradient(sent, dtype)
        return grad.div_(ranks) if average_gradients else grad

    return Transfer("reduce_scatter_rows", x, send, send_gradient)
