"""The ranks that a state averages over: all, or those of its node and its peers on other nodes."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import groups
from .._torch import span
from ..collectives import all_gather, all_reduce_bytes, dense_mean, reduce_scatter
from ..exchange.bucket import Bucket, SegmentState
from ..exchange.plan import BucketPlan, Slice, slices
from ..mesh import NODES, require_mesh

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
        with span("dct::reduce_scatter"):
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
        with span("dct::gather_parts"):
            all_gather(padded, part, self.group)
        buffer.copy_(padded.view(-1)[: buffer.numel()])

    def wire_bytes(self, numel: int, itemsize: int) -> int:
        """Bytes sent per rank and step inside the node for a bucket of `numel` elements."""
        part = self._length(numel) * itemsize
        return all_reduce_bytes(self.size * part, self.size)  # in two halves

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


class NodeBucket(Bucket):
    """A bucket that is summed and gathered whole inside the node, and exchanged in parts.

    The node's residual is the sum of its ranks' states. Each rank keeps its own part; residuals in
    a state for other ranks' parts go to these ranks once, before the first gradient.

    Args:
        node: this rank's.
        sizes: {name: numel} of the bucket's parameters, in its order.
        plan: of this rank's part.
        group, device, step, states: as for `Bucket`, states of whole parameters.
    """

    def __init__(
        self,
        node: Node,
        sizes: dict[str, int],
        plan: BucketPlan,
        group: dist.ProcessGroup,
        device: torch.device,
        step: int,
        states: dict[str, SegmentState],
    ) -> None:
        self._node, self._sizes, names = node, sizes, list(sizes)
        self._pieces = {names[piece.index]: piece for piece in node.slices(list(sizes.values()))}
        own = {name: self._cut(name, states[name]) for name in self._pieces if name in states}
        super().__init__(plan, group, device, step, own)
        self._others: Tensor | None = torch.cat([self._of_others(name, states) for name in names])

    def launch(
        self, buffer: Tensor, scale: Tensor | None = None, inv_scale: Tensor | None = None
    ) -> None:
        """See `reduce`, which is complete on return: the node gathers its parts."""
        self.reduce(buffer, scale, inv_scale)

    def reduce(
        self, buffer: Tensor, scale: Tensor | None = None, inv_scale: Tensor | None = None
    ) -> None:
        """Replace this rank's gradients in `buffer` by their mean over all nodes' ranks."""
        self.begin()
        numel = self.plan.numel
        if self._others is not None:
            owed = self._node.sum_part(self._others.to(buffer.device))
            self.codec.residual += owed[:numel]
            self._others = None
        part = self._node.mean_part(buffer)
        super().reduce(part[:numel], scale, inv_scale)
        self._node.gather(part, buffer)

    def states(self) -> dict[str, SegmentState]:
        """{name: copies, as long as the parameter}, 0 outside of this rank's part."""

        def placed(name: str, part: Tensor) -> Tensor:
            piece = self._pieces[name]
            whole = torch.zeros(self._sizes[name], dtype=torch.float32, device="cpu")
            whole[piece.low : piece.high] = part
            return whole

        return {name: state.map(partial(placed, name)) for name, state in super().states().items()}

    def _cut(self, name: str, state: SegmentState) -> SegmentState:
        """The slice of a state in this rank's part."""
        piece = self._pieces[name]
        return state.map(lambda whole: whole[piece.low : piece.high])

    def _of_others(self, name: str, states: dict[str, SegmentState]) -> Tensor:
        """The residuals of a state for other ranks' parts, as shares of the mean over nodes."""
        if name not in states:
            return torch.zeros(self._sizes[name], dtype=torch.float32, device="cpu")
        owed = states[name].share(self.plan.ranks).clone()
        if name in self._pieces:
            piece = self._pieces[name]
            owed[piece.low : piece.high] = 0
        return owed


_CPU = torch.device("cpu")


class Topology:
    """The groups of a state: of a mesh, or of one dimension.

    Args:
        op: for errors.
        group: the ranks to average over.
        mesh: of these ranks, dimensions ("node", "local"); None: every rank is a node of its own.
        device: of the gradients.

    Attributes:
        everyone: the group of all ranks.
        layout: of a mesh, in words: the ranks of each node.
        node: this rank's; known once opened, like `between` and `close`.
        between: the group that exchanges payloads: ranks of equal number in their nodes.
        close: a function that destroys the groups that `open` made, as the end of this object does.
    """

    def __init__(
        self,
        op: str,
        group: dist.ProcessGroup | None,
        mesh: DeviceMesh | None,
        device: torch.device,
    ) -> None:
        self.everyone = groups.require_group(op, group, "process_group")
        self._given: tuple[dist.ProcessGroup, ...] = (self.everyone,)
        self.layout = "none"
        if mesh is not None:
            self._given = require_mesh(op, mesh, NODES)
            self.layout = str(mesh.mesh.tolist())
            ranks, own = mesh.mesh.flatten().tolist(), dist.get_process_group_ranks(self.everyone)
            if sorted(ranks) != sorted(own):
                raise ValueError(f"dct::{op}: mesh must have the ranks of ddp, {own}, got {ranks}")
            if mesh.device_type != device.type:
                raise ValueError(
                    f"dct::{op}: mesh must be on {device.type} like ddp, got {mesh.device_type}"
                )
        # On the CPU a separate one, because collectives of the executor's thread must not
        # interleave with those of the main thread. On CUDA one thread issues all, in order.
        self._owns = device.type == "cpu"

    def open(self, name: str) -> None:
        """Make the groups that are used; all ranks do, once they agree.

        Args:
            name: for these groups, the same on all ranks and never used before.
        """
        made: tuple[dist.ProcessGroup, ...] = ()
        if self._owns:
            # A mesh has torch's default timeout, unless its maker set a different one.
            given = (self.everyone, *self._given)
            timeout = min(groups.timeout_of(group, _CPU) for group in given)
            self._given = made = tuple(
                groups.separate_group(group, f"{name}/{index}", timeout)
                for index, group in enumerate(self._given)
            )
        self.close = groups.ending(self, *made)
        self.between, *inside = self._given
        self.node = Node(*inside)

    def reduce_densely(self, buffer: Tensor) -> None:
        """Replace `buffer` by its mean over all ranks, sent to other nodes in bfloat16."""
        part = self.node.mean_part(buffer)
        with span("dct::exchange_dense"):
            part.copy_(dense_mean(part, torch.bfloat16, self.between))
        self.node.gather(part, buffer)
