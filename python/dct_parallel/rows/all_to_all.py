"""Rows to the ranks they belong to: the pooled-embedding exchange of a recommender.

DCT, model-parallel side (arXiv 2010.08899): the k largest entries of every row are sent, and in the
backward pass their gradients, at positions that both sides know by then. Exactly k per row, so that
every message's size is known beforehand, and the wire format are our reconstruction. If that loses
quality, every entry can be sent, in few bits.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dct_kernels import checks

from ..groups import require_group
from .codecs import RowCodec
from .packing import require_rows
from .row_format import RowFormat
from .transfer import Transfer, exchange_counts, require_counts


def all_to_all_rows(
    x: Tensor,
    splits: Sequence[int],
    output_splits: Sequence[int] | None = None,
    *,
    format: str | torch.dtype | RowFormat,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Send rows to the ranks they belong to, compressed. Differentiable in x.

    Like torch.distributed.all_to_all_single with uneven splits, but each row is sent as `format`
    says. The gradient of a sent row is that of the received one: with a density at the entries that
    were sent, otherwise straight-through, quantized on its way. Deterministic; x's own dtype both
    ways equals the uncompressed exchange bit for bit, and so does density 1 in it.

    One collective forward, one backward. Both need every rank of the group, also ranks without
    rows: all call this, and if x needs a gradient all run the backward pass through the result.
    Without `output_splits`, an all-to-all of 40 bytes to every rank comes first, and the host waits
    for its result (on CUDA it synchronizes, so it cannot be captured in a graph). It also checks
    that ranks agree. With `output_splits` neither happens: ranks that disagree may then hang or
    read rubbish, but never out of bounds.

    Args:
        x: float32, bfloat16 or float16 [sum(splits), d], ordered by destination; not mutated.
        splits: rows to send to each rank of the group, from 0 up.
        output_splits: rows to receive from each; given on every rank or on none.
        format: what is sent, a name ("int8", "int4", "bfloat16"), a torch dtype or a `RowFormat`:
            `RowFormat("int4", backward="sign")`, `RowFormat(density=0.05)`. The same on every rank.
        group: the ranks that take part, default all; gloo or NCCL. Its timeout bounds the wait for
            a rank that is gone.

    Returns:
        [rows received, d] of x's dtype, ordered by source.

    Raises:
        ValueError, TypeError: an argument is out of its range here. The other ranks get an error
            when the group's timeout ends.
        ValueError: d, a setting or requires_grad differ between ranks; on every rank, naming every
            rank's. Not with `output_splits`.
        RuntimeError: from the collective, if a rank is gone.
    """
    return all_to_all_rows_async(x, splits, output_splits, format=format, group=group).wait()


def all_to_all_rows_async(
    x: Tensor,
    splits: Sequence[int],
    output_splits: Sequence[int] | None = None,
    *,
    format: str | torch.dtype | RowFormat,
    group: dist.ProcessGroup | None = None,
) -> Transfer:
    """Like `all_to_all_rows`, but returns a handle at once; its `wait()` gives the rows, once.

    Computation in between overlaps with the exchange, and its backward pass with that of the
    gradients. The host waits here only without `output_splits`, for the counts. Every rank calls
    `wait`, in the same order if it has several handles. A rank may call `all_to_all_rows` where
    others call this. Arguments and errors are the same; a second `wait` is a RuntimeError.
    """
    op = "all_to_all_rows"
    group = require_group(op, group)
    x = require_rows(op, x)
    form = RowFormat.of(op, format)
    require_counts(op, "splits", splits, group.size())
    if x.shape[0] != sum(splits):
        checks.fail(op, "x", f"{sum(splits)} rows like splits", x.shape[0], verb="have")
    if output_splits is None:
        needs_grad = x.requires_grad and torch.is_grad_enabled()
        must_match = {"d": x.shape[1], **form.told(x.dtype), "requires_grad": needs_grad}
        output_splits = exchange_counts(op, splits, must_match, x.device, group)
    require_counts(op, "output_splits", output_splits, group.size())
    if x.shape[1] == 0:  # on every rank, because they agree by now: none waits for the others
        checks.fail(op, "x", "at least 1 column", 0, verb="have")
    codec = form.codec(x.shape[1], x.dtype)
    return _AllToAll(codec, splits, output_splits, group).start(x)


# Collective, and differentiable in x: (x [sum(splits), d] ordered by destination, splits,
# output_splits, group=...) to [sum(output_splits), d] by source. `all_to_all_rows` is one, once its
# format is bound: functools.partial(all_to_all_rows, format="int8").
RowExchange = Callable[..., Tensor]


def whole_rows(
    x: Tensor, splits: Sequence[int], output_splits: Sequence[int], *, group: dist.ProcessGroup
) -> Tensor:
    """A `RowExchange` of rows of any dtype as they are, and of their gradients."""
    return _AllToAll(RowCodec(), splits, output_splits, group).start(x).wait()


class _AllToAll(Transfer):
    """Encoded rows there, their encoded gradients back."""

    def __init__(
        self,
        codec: RowCodec,
        splits: Sequence[int],
        output_splits: Sequence[int],
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__(group)
        self._codec = codec
        self._splits, self._output_splits = list(splits), list(output_splits)

    def _send(self, x: Tensor) -> None:
        self._all_to_all(self._codec.encode(x), self._splits, self._output_splits)

    def _receive(self) -> Tensor:
        return self._codec.decode(self._arrived(), self._dtype)

    def _send_gradient(self, grad: Tensor) -> None:
        message = self._codec.encode_gradient(grad.contiguous())
        self._all_to_all(message, self._output_splits, self._splits)

    def _receive_gradient(self) -> Tensor:
        return self._codec.decode_gradient(self._arrived(), self._dtype)
