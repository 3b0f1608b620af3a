"""How tensors and payloads cross the network. Knows no DDP.

Collectives are called as `torch.distributed.<name>`, where a `WireMeter` can see them, and block
their caller (gloo) or the current stream (NCCL) until they are done.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from dct_kernels import _checks

from . import wire
from .compressor import Compressor


def all_gather(output: Tensor, tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Every rank's `tensor` [n] into `output` [P, n], in rank order."""
    # One collective, two names: from torch 2.13 the older warns, before it the newer is missing.
    if hasattr(dist, "all_gather_single"):
        dist.all_gather_single(output.view(-1), tensor, group=group)
    else:
        dist.all_gather_into_tensor(output.view(-1), tensor, group=group)


def dense_mean(tensor: Tensor, dtype: torch.dtype, group: dist.ProcessGroup) -> Tensor:
    """The mean of every rank's `tensor`, sent and returned in `dtype`; the same on every rank.

    Divided before it is summed, as DDP does: half as likely to overflow.
    """
    mean = tensor.to(dtype, copy=True).div_(group.size())
    dist.all_reduce(mean, group=group)
    return mean


class Gather:
    """One all-gather of the payload; every rank sums all of them, in rank order.

    Each rank sends its payload P - 1 times, so bytes grow with P: it pays while the density is well
    below 1 / P.
    """

    name = "gather"

    def __init__(self, compressor: Compressor, group: dist.ProcessGroup) -> None:
        self._compressor = compressor
        self._group = group
        shape = (group.size(), compressor.payload.numel())
        self.payloads = compressor.payload.new_zeros(shape)

    @staticmethod
    def wire_bytes(payload_bytes: int, world_size: int) -> int:
        """Bytes this rank sends in a step."""
        return wire.all_gather_bytes(payload_bytes, world_size)

    def reduce(self, payload: Tensor, out: Tensor, out_scale: Tensor | None = None) -> Tensor:
        """Write the mean of every rank's payload into `out`; returns each one's status, int32 [P].

        `self.payloads` holds what was received, until the next call.
        """
        all_gather(self.payloads, payload, self._group)
        return self._compressor.unpack(self.payloads, out, out_scale)


TRANSPORTS = {Gather.name: Gather}


def resolve_transport(transport: str) -> type[Gather]:
    """The class behind a transport's name; "auto" is gather, the only one in this version."""
    if transport == "shard":
        got = "'shard', which is not available in this version"
        _checks.fail("DCTState", "transport", "'auto' or 'gather'", got)
    if transport not in ("auto", *TRANSPORTS):
        _checks.fail("DCTState", "transport", "'auto' or 'gather'", repr(transport))
    return TRANSPORTS.get(transport, Gather)
