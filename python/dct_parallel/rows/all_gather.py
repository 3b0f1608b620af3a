"""Rows to every rank: a layer whose features are split over ranks.

DCT, model-parallel side (arXiv 2010.08899), for tensor parallelism: each rank packs its own slice
of the features, so the mask is that of the owner. The use for this collective, exactly k per row,
and the wire format are our reconstruction.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from dct_kernels import checks

from ..collectives import all_gather
from ..groups import require_group
from .codecs import RowCodec
from .packing import require_rows
from .row_format import RowFormat
from .transfer import Transfer, exchange_counts, require_counts


def all_gather_rows(
    x: Tensor,
    widths: Sequence[int] | None = None,
    *,
    format: str | torch.dtype | RowFormat,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Every rank's features of the same rows, side by side, compressed. Differentiable in x.

    For tensor parallelism: each rank's part of a row is sent as in `all_to_all_rows`; with a
    density, k = ceil(density * its width) entries of it. The gradient is the sum of all ranks'
    gradients of that part, as with torch's own all-gather: ranks that compute the same loss from
    the result divide it by their number. Summed in rank order in float32, so it is deterministic.

    Forward is one all-gather, padded to the longest rank's part; backward is one all-to-all, of the
    gradient of each part to its rank. Both need every rank, as `all_to_all_rows` says. Without
    `widths`, an all-to-all of 40 bytes to every rank comes first, and the host waits for its
    result; it also checks that ranks agree. With `widths` neither happens, as there with
    `output_splits`.

    Args:
        x: float32, bfloat16 or float16 [B, d], the same B on every rank; not mutated.
        widths: every rank's d; given on every rank or on none.
        format: as of `all_to_all_rows`.
        group: as of `all_to_all_rows`.

    Returns:
        [B, sum of every rank's d] of x's dtype, in rank order.

    Raises:
        ValueError, TypeError: an argument is out of its range here. The other ranks get an error
            when the group's timeout ends.
        ValueError: B, a setting or requires_grad differ between ranks; on every rank, naming every
            rank's. Not with `widths`.
        RuntimeError: from the collective, if a rank is gone.
    """
    return all_gather_rows_async(x, widths, format=format, group=group).wait()


def all_gather_rows_async(
    x: Tensor,
    widths: Sequence[int] | None = None,
    *,
    format: str | torch.dtype | RowFormat,
    group: dist.ProcessGroup | None = None,
) -> Transfer:
    """Like `all_gather_rows`, but returns a handle at once; its `wait()` gives the rows, once.

    For the rest see `all_to_all_rows_async`.
    """
    op = "all_gather_rows"
    group = require_group(op, group)
    x = require_rows(op, x)
    form = RowFormat.of(op, format)
    rows, width = x.shape
    if widths is None:
        needs_grad = x.requires_grad and torch.is_grad_enabled()
        must_match = {"B": rows, **form.told(x.dtype), "requires_grad": needs_grad}
        widths = exchange_counts(op, [width] * group.size(), must_match, x.device, group)
    require_counts(op, "widths", widths, group.size(), low=1)
    if widths[group.rank()] != width:
        checks.fail(op, "x", f"width {widths[group.rank()]} like widths", width, verb="have")
    codecs = [form.codec(width, x.dtype) for width in widths]
    return _AllGather(codecs, list(widths), rows, group).start(x)


class _AllGather(Transfer):
    """Encoded parts of rows to everybody, the encoded gradients of each to its owner."""

    def __init__(
        self, codecs: list[RowCodec], widths: list[int], rows: int, group: dist.ProcessGroup
    ) -> None:
        super().__init__(group)
        self._codecs, self._widths, self._rows = codecs, widths, rows
        self._rank = group.rank()
        self._own = codecs[self._rank]

    def _send(self, x: Tensor) -> None:
        message = self._own.encode(x).flatten()
        longest = self._rows * max(codec.message_bytes for codec in self._codecs)
        received = message.new_empty(len(self._codecs), longest)
        padded = pad(message, (0, longest - len(message)))
        work = all_gather(received, padded, self._group.get(), async_op=True)
        self._in_flight = work, received

    def _receive(self) -> Tensor:
        parts = []
        for message, codec in zip(self._arrived(), self._codecs, strict=True):
            size = codec.message_bytes
            part = message[: self._rows * size].view(self._rows, size)
            parts.append(codec.decode(part, self._dtype))
        return torch.cat(parts, 1)

    def _send_gradient(self, grad: Tensor) -> None:
        parts = zip(grad.split(self._widths, 1), self._codecs, strict=True)
        messages = [codec.encode_gradient(part.contiguous()) for part, codec in parts]
        sizes = [message.numel() for message in messages]
        sent = torch.cat([message.flatten() for message in messages])
        self._all_to_all(sent, sizes, [sizes[self._rank]] * len(sizes))

    def _receive_gradient(self) -> Tensor:
        messages = self._arrived().view(len(self._codecs), self._rows, self._own.gradient_bytes)
        total = torch.zeros(self._rows, self._widths[self._rank], device=messages.device)
        for message in messages:  # in rank order: the same bits every time
            total += self._own.decode_gradient(message, torch.float32)
        return total.to(self._dtype)
