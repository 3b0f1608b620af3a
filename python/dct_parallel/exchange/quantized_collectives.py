"""Quantized collectives of one tensor without error feedback, for `dct_parallel.process_group`."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from dct_kernels import quantized_payload_bytes

from ..collectives import all_gather as gather_messages
from ..collectives import all_gather_bytes, all_reduce_bytes
from .all_reduce import tensor_bucket
from .results import Exchange, Statuses
from .settings import Settings

_quantize_pack = torch.ops.dct.quantize_pack.default
_dequantize_sum = torch.ops.dct.dequantize_sum.default


def exchange(
    collective: str,
    format: str,
    op: Any,
    part: Tensor,
    parts: Sequence[Tensor],
    group: dist.ProcessGroup,
) -> tuple[Exchange, int, int]:
    """Run a collective. All tensors are contiguous.

    Args:
        collective: "all_reduce" reduces `part` in place, as `all_reduce_compressed` does.
            "reduce_scatter" writes the sum or mean of all ranks' parts[rank of this process] into
            `part`. "all_gather" writes the rounded `part` of every rank into `parts`.
        parts: one tensor, or a tensor for each rank.

    Returns:
        The exchange, and the bytes that this rank would send without compression, and sends.
    """
    ranks, numel = group.size(), part.numel()
    if collective == "all_reduce":
        bucket, scale = tensor_bucket(part, Settings(1.0, format, has_residual=False), op, group)
        bucket.reduce(part.view(-1), scale)
        return bucket, all_reduce_bytes(part.nbytes, ranks), bucket.plan.wire_bytes
    nbytes = quantized_payload_bytes(numel, format)
    received = part.new_empty(ranks, nbytes, dtype=torch.uint8)
    if collective == "reduce_scatter":
        rows = parts[0] if len(parts) == 1 else torch.stack([row.view(-1) for row in parts])
        sent = torch.empty_like(received)
        _quantize_pack(None, rows.view(ranks, numel), sent, format)
        dist.all_to_all_single(received, sent, group=group)
        factor = 1 / ranks if op == ReduceOp.AVG else 1.0
        status = _dequantize_sum(received, part.view(-1), format, factor)
    else:
        sent = torch.empty_like(received[:1])
        _quantize_pack(None, part.view(1, numel), sent, format)
        gather_messages(received, sent[0], group)
        rows = parts[0] if len(parts) == 1 else part.new_empty(ranks, numel)
        status = _dequantize_sum(received.unsqueeze(0), rows.view(ranks, numel), format)
        if len(parts) > 1:
            for out, row in zip(parts, rows, strict=True):
                out.copy_(row.view_as(out))
    statuses = Statuses(status.view(-1), dist.get_process_group_ranks(group))
    return statuses, all_gather_bytes(part.nbytes, ranks), all_gather_bytes(nbytes, ranks)
