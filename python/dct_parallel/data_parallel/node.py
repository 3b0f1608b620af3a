"""The ranks of one node, which send each other gradients densely; each rank has a part."""

from collections.abc import Sequence

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import record_function

from .. import wire
from ..collectives import all_gather, reduce_scatter
from ..exchange.plan import Slice, slices

_ALIGNMENT = 8  # elements: 16 bytes or more of every dtype


class Node:
    """Cuts buckets into as many equal parts as the node has ranks; each rank exchanges its own.

    A part is a range of whole 16 bytes, so the last ones may be short or empty. In a node of one
    rank the part is the bucket itself, and nothing is sent.

    Args:
        group: the ranks of this rank's node; None: no other.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.ranks = [0] if group is None else dist.get_process_group_ranks(group)
        self.rank, self.size = 0 if group is None else group.rank(), len(self.ranks)

    def slices(self, sizes: Sequence[int]) -> list[Slice]:
        """This rank's part of a bucket, as slices of parameters of these sizes."""
        length = self._length(sum(sizes))
        return list(slices(sizes, self.rank * length, (self.rank + 1) * length))

    def sum_part(self, buffer: Tensor) -> Tensor:
        """The sum over the node's ranks of this rank's part of `buffer` [numel], in its dtype.

        Returns a new tensor of the length of a full part, 0 past the bucket's end; in a node of one
        rank `buffer` itself.
        """
        if self.group is None or self.size == 1:
            return buffer
        length = self._length(buffer.numel())
        part = buffer.new_empty(length)
        padded = F.pad(buffer, (0, self.size * length - buffer.numel()))
        with record_function("dct::reduce_scatter"):
            reduce_scatter(part, padded, self.group)
        return part

    def mean_part(self, buffer: Tensor) -> Tensor:
        """The same of the mean; `buffer` is overwritten.

        Divided before it is summed, as DDP does: half as likely to overflow.
        """
        return self.sum_part(buffer if self.size == 1 else buffer.div_(self.size))

    def gather(self, part: Tensor, buffer: Tensor) -> None:
        """Write every rank's part, of the length that `sum_part` gave it, into `buffer` [numel]."""
        if self.group is None or self.size == 1:
            return
        padded = part.new_empty(self.size, part.numel())
        with record_function("dct::gather_parts"):
            all_gather(padded, part, self.group)
        buffer.copy_(padded.view(-1)[: buffer.numel()])

    def wire_bytes(self, numel: int, itemsize: int) -> int:
        """Bytes sent per rank and step inside the node for a bucket of so many elements."""
        part = self._length(numel) * itemsize
        return wire.all_reduce_bytes(self.size * part, self.size)  # in two halves

    def sentence(self, nbytes: int) -> str:
        """The line after a plan's table: whose part it is of, and the bytes inside the node."""
        if self.size == 1:
            return ""
        return (
            f"\nAll of this is between nodes, of part {self.rank} of {self.size} of every bucket. "
            f"Inside the node\nthis rank sends {nbytes:,} bytes, in a reduce-scatter and an "
            "all-gather."
        )

    def _length(self, numel: int) -> int:
        share = -(-numel // self.size)
        return -(-share // _ALIGNMENT) * _ALIGNMENT
