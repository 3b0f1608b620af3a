"""How the payloads of all ranks become their mean on every rank. Knows no DDP."""

import torch.distributed as dist
from torch import Tensor

from dct_kernels import checks

from .. import wire
from ..collectives import all_gather
from ..compressor import Compressor


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
        checks.fail("DCTState", "transport", "'auto' or 'gather'", got)
    if transport not in ("auto", *TRANSPORTS):
        checks.fail("DCTState", "transport", "'auto' or 'gather'", repr(transport))
    return TRANSPORTS.get(transport, Gather)
