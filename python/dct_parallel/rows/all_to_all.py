"""Packed rows to the ranks they belong to: the pooled-embedding exchange of a recommender.

DCT, model-parallel side (arXiv 2010.08899): of every row the k largest entries cross, and in the
backward pass their gradients, at positions that both sides know by then. Exactly k a row, so that
every message's size is known beforehand, and the wire format are our reconstruction.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dct_kernels import checks

from ..groups import GroupForBackward, require_group
from .counts import exchange_counts, require_counts
from .messages import from_message, require_rows, to_message
from .packing import pack, row_k, unpack


def all_to_all_rows(
    x: Tensor,
    splits: Sequence[int],
    output_splits: Sequence[int] | None = None,
    *,
    density: float,
    value_dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Send rows to the ranks they belong to, of each its largest entries. Differentiable in x.

    As torch.distributed.all_to_all_single with uneven splits, except that k = ceil(density * d)
    entries of a row arrive and the others are zero there. The gradient of a sent row is that of the
    received one at those entries. Deterministic; density 1 in x's own dtype equals the uncompressed
    exchange bit for bit, forward and backward.

    For a row, k values and their positions cross in one collective forward, k values in one
    backward. Both need every rank of the group, one without rows included: all call this, and if x
    needs a gradient all run the backward pass through the result. Without `output_splits`, another
    all-to-all goes ahead, of 40 bytes to every rank, and the host waits for its result (on CUDA a
    synchronisation). It also checks that ranks agree. With `output_splits` nothing of this is spent
    and nothing is checked: ranks that disagree may then hang or read rubbish, never out of bounds.

    Args:
        x: float32, bfloat16 or float16 [sum(splits), d], ordered by destination; not mutated.
        splits: how many rows go to each rank of the group, from 0 up.
        output_splits: how many rows come from each; given on every rank or on none.
        density: fraction of each row to send, in (0, 1].
        value_dtype: of values and gradients on the wire, float32, bfloat16 or float16; default x's.
        group: the ranks that take part, default all; gloo or NCCL. Its timeout bounds the wait for
            a rank that is gone.

    Returns:
        [rows received, d] of x's dtype, ordered by source.

    Raises:
        ValueError, TypeError: an argument is out of its range here. The other ranks get an error
            when the group's timeout ends.
        ValueError: d, k, value_dtype or requires_grad differ between ranks; on every rank, naming
            everybody's. Not with `output_splits`.
        RuntimeError: from the collective, if a rank is gone.
    """
    op = "all_to_all_rows"
    group = require_group(op, group)
    x = require_rows(op, x)
    checks.require_density(op, density)
    require_counts(op, "splits", splits, group.size())
    if x.shape[0] != sum(splits):
        checks.fail(op, "x", f"{sum(splits)} rows like splits", x.shape[0], verb="have")
    value_dtype = value_dtype or x.dtype
    checks.require_dtype(op, "value_dtype", value_dtype, checks.FLOATS)
    k = row_k(x.shape[1], density)
    if output_splits is None:
        must_match = {
            "d": x.shape[1],
            "k": k,
            "value_dtype": value_dtype,
            "requires_grad": x.requires_grad and torch.is_grad_enabled(),
        }
        output_splits = exchange_counts(op, splits, must_match, x.device, group)
    require_counts(op, "output_splits", output_splits, group.size())
    values, positions = pack(x, k, value_dtype)
    received = _Exchange.apply(values, positions, list(splits), list(output_splits), group)
    return unpack(*received, x.shape[1], x.dtype)


class _Exchange(torch.autograd.Function):
    """Values and positions there, the values' gradients back."""

    @staticmethod
    def forward(ctx, values, positions, splits, output_splits, group):
        ctx.splits, ctx.output_splits = splits, output_splits
        ctx.group = GroupForBackward(group)
        sent = to_message(values, positions)
        received = sent.new_empty(sum(output_splits), sent.shape[1])
        dist.all_to_all_single(received, sent, output_splits, splits, group=group)
        values, positions = from_message(received, values.shape[1], values.dtype)
        ctx.mark_non_differentiable(positions)
        return values, positions

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _):
        returned = grad.new_empty(sum(ctx.splits), grad.shape[1])
        sent = grad.contiguous()
        group = ctx.group.get()
        dist.all_to_all_single(returned, sent, ctx.splits, ctx.output_splits, group=group)
        return returned, None, None, None, None
