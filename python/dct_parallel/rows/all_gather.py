"""Packed rows to every rank: a layer whose features are split over ranks.

DCT, model-parallel side (arXiv 2010.08899), for tensor parallelism: each rank packs its own slice
of the features, so the mask is that of the owner. The use for this collective, exactly k a row, and
the wire format are our reconstruction.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from dct_kernels import checks, row_gather
from dct_kernels.row_layout import position_bytes

from ..collectives import all_gather
from ..groups import GroupForBackward, require_group
from .counts import exchange_counts, require_counts
from .messages import from_message, require_rows, to_message
from .packing import pack, row_k, unpack


def all_gather_rows(
    x: Tensor,
    widths: Sequence[int] | None = None,
    *,
    density: float,
    value_dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Every rank's features of the same rows, side by side. Differentiable in x.

    Of each rank's part of a row the k = ceil(density * its width) largest entries arrive, the
    others are zero. The gradient is the sum of all ranks' gradients of that part, at the entries
    that were sent, as of torch's own all-gather: ranks that compute the same loss from the result
    divide it by their number. Summed in rank order in float32, so it is deterministic; density 1 in
    x's own dtype equals the uncompressed run.

    Forward, k values and their positions a row cross in one all-gather, filled up to the longest
    rank's; backward, each rank sends each other k values a row, in one all-to-all. Both need every
    rank, as `all_to_all_rows` says. Without `widths`, an all-to-all of 40 bytes to every rank goes
    ahead, and the host waits for its result; it also checks that ranks agree. With `widths` nothing
    of this is spent and nothing is checked.

    Args:
        x: float32, bfloat16 or float16 [B, d], the same B on every rank; not mutated.
        widths: every rank's d; given on every rank or on none.
        density: fraction of each part of a row to send, in (0, 1].
        value_dtype: of values and gradients on the wire, float32, bfloat16 or float16; default x's.
        group: the ranks that take part, default all; gloo or NCCL.

    Returns:
        [B, sum of every rank's d] of x's dtype, in rank order.

    Raises:
        ValueError, TypeError: an argument is out of its range here. The other ranks get an error
            when the group's timeout ends.
        ValueError: B, density, value_dtype or requires_grad differ between ranks; on every rank,
            naming everybody's. Not with `widths`.
        RuntimeError: from the collective, if a rank is gone.
    """
    op = "all_gather_rows"
    group = require_group(op, group)
    x = require_rows(op, x)
    checks.require_density(op, density)
    value_dtype = value_dtype or x.dtype
    checks.require_dtype(op, "value_dtype", value_dtype, checks.FLOATS)
    if widths is None:
        must_match = {
            "B": x.shape[0],
            "density": float(density),
            "value_dtype": value_dtype,
            "requires_grad": x.requires_grad and torch.is_grad_enabled(),
        }
        widths = exchange_counts(op, [x.shape[1]] * group.size(), must_match, x.device, group)
    require_counts(op, "widths", widths, group.size(), low=1)
    if widths[group.rank()] != x.shape[1]:
        checks.fail(op, "x", f"of width {widths[group.rank()]} like widths", x.shape[1])
    return _Gather.apply(x, list(widths), float(density), value_dtype, group)


class _Gather(torch.autograd.Function):
    """Packed parts of rows to everybody, the gradients of their values back to the owner."""

    @staticmethod
    def forward(ctx, x, widths, density, value_dtype, group):
        rows, ks = x.shape[0], [row_k(width, density) for width in widths]
        sizes = [
            k * value_dtype.itemsize + position_bytes(width, k)
            for width, k in zip(widths, ks, strict=True)
        ]
        own = to_message(*pack(x, ks[group.rank()], value_dtype)).flatten()
        received = own.new_empty(len(sizes), rows * max(sizes))
        all_gather(received, pad(own, (0, received.shape[1] - len(own))), group)
        parts, positions = [], []
        for message, size, width, k in zip(received, sizes, widths, ks, strict=True):
            packed = from_message(message[: rows * size].view(rows, size), k, value_dtype)
            parts.append(unpack(*packed, width, x.dtype))
            positions.append(packed[1])
        ctx.save_for_backward(*positions)
        ctx.widths, ctx.ks, ctx.value_dtype = widths, ks, value_dtype
        ctx.group = GroupForBackward(group)
        return torch.cat(parts, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        group = ctx.group.get()
        rank, rows = group.rank(), grad.shape[0]
        parts = zip(grad.split(ctx.widths, 1), ctx.saved_tensors, ctx.ks, strict=True)
        sent = [row_gather(part.contiguous(), at, k, ctx.value_dtype) for part, at, k in parts]
        sizes = [rows * k for k in ctx.ks]
        received = grad.new_empty(len(sizes), rows, ctx.ks[rank], dtype=ctx.value_dtype)
        dist.all_to_all_single(
            received.view(-1),
            torch.cat([part.flatten() for part in sent]),
            [sizes[rank]] * len(sizes),
            sizes,
            group=group,
        )
        total = torch.zeros_like(received[0], dtype=torch.float32)
        for part in received:  # in rank order: the same bits every time
            total += part.float()
        own = ctx.saved_tensors[rank]
        return unpack(total, own, ctx.widths[rank], grad.dtype), None, None, None, None
