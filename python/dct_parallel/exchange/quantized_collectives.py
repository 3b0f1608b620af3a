"""Quantized collectives of one tensor without error feedback, for `dct_parallel.process_group`.

Each one returns an `Exchange`, which has the statuses of the messages, and the bytes that this rank
sends.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from dct_kernels import quantized_payload_bytes

from ..collectives import all_gather as gather_messages
from ..collectives import all_gather_bytes
from .all_reduce import tensor_bucket
from .results import Exchange, Statuses
from .settings import Settings

_quantize_pack = torch.ops.dct.quantize_pack.default
_dequantize_sum = torch.ops.dct.dequantize_sum.default


def all_reduce(
    tensor: Tensor, op: Any, format: str, group: dist.ProcessGroup
) -> tuple[Exchange, int]:
    """Reduce a contiguous tensor in place, as `all_reduce_compressed` does."""
    bucket, scale = tensor_bucket(tensor, Settings(1.0, format, has_residual=False), op, group)
    bucket.reduce(tensor.view(-1), scale)
    return bucket, bucket.plan.wire_bytes


def reduce_scatter(
    output: Tensor, parts: Any, op: Any, format: str, group: dist.ProcessGroup
) -> tuple[Exchange, int]:
    """Write the sum or mean of all ranks' parts[rank of this process] into `output`.

    Args:
        output: contiguous, written.
        parts: the part for each rank, each with the number of elements of `output`. One tensor, or
            a list of tensors.
    """
    ranks = group.size()
    rows = parts if isinstance(parts, Tensor) else torch.stack([part.view(-1) for part in parts])
    messages = _new_messages(ranks, output, format)
    _quantize_pack(None, rows.view(ranks, -1), messages, format)
    received = torch.empty_like(messages)
    dist.all_to_all_single(received, messages, group=group)
    scale = 1 / ranks if op == ReduceOp.AVG else 1.0
    return _result(_dequantize_sum(received, output.view(-1), format, scale), messages, group)


def all_gather(
    parts: Any, tensor: Tensor, format: str, group: dist.ProcessGroup
) -> tuple[Exchange, int]:
    """Write the rounded `tensor` of every rank into `parts`. The result is the same on all ranks.

    Args:
        parts: the part of each rank, each with the number of elements of `tensor`. One contiguous
            tensor, or a list of tensors.
        tensor: contiguous.
    """
    ranks, numel = group.size(), tensor.numel()
    message, messages = (_new_messages(count, tensor, format) for count in (1, ranks))
    _quantize_pack(None, tensor.view(1, numel), message, format)
    gather_messages(messages, message.view(-1), group)
    is_list = not isinstance(parts, Tensor)
    out = tensor.new_empty(ranks, numel) if is_list else parts.view(ranks, numel)
    status = _dequantize_sum(messages.unsqueeze(0), out, format)
    if is_list:
        for part, row in zip(parts, out, strict=True):
            part.copy_(row.view_as(part))
    return _result(status, messages, group)


def _result(status: Tensor, messages: Tensor, group: dist.ProcessGroup) -> tuple[Exchange, int]:
    ranks = dist.get_process_group_ranks(group)
    return Statuses(status.view(-1), ranks), all_gather_bytes(messages.shape[1], len(ranks))


def _new_messages(count: int, part: Tensor, format: str) -> Tensor:
    nbytes = quantized_payload_bytes(part.numel(), format)
    return torch.empty(count, nbytes, dtype=torch.uint8, device=part.device)
