"""Averages over a mesh of nodes: dense inside a node, compressed between nodes.

Without a mesh, every rank is its own node.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dct_kernels import checks

from .. import groups
from .._torch import span
from ..collectives import all_gather, all_reduce_bytes, dense_mean, reduce_scatter
from ..exchange.bucket import Bucket, SegmentState
from ..exchange.plan import BucketPlan, Slice, slices
from ..mesh import NODES, require_mesh

_ALIGNMENT = 8  # elements, at least 16 bytes in every dtype


class Node:
    """Splits each bucket into parts. Each rank of the node exchanges one part with other nodes.

    The length of a part is a multiple of 16 bytes, so the last parts may be shorter or empty. In a
    node of one rank, the part is the whole bucket, and nothing is sent inside the node.

    Args:
        group: the process group of this rank's node; None if the node has no other rank.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.ranks = [0] if group is None else dist.get_process_group_ranks(group)
        self.rank, self.size = 0 if group is None else group.rank(), len(self.ranks)

    def slices(self, sizes: Sequence[int]) -> list[Slice]:
        """This rank's part of a bucket, as slices of the parameters with these sizes."""
        length = self._length(sum(sizes))
        return list(slices(sizes, self.rank * length, (self.rank + 1) * length))

    def sum_part(self, buffer: Tensor) -> Tensor:
        """Sum this rank's part of `buffer` [numel] over the node's ranks, in its dtype.

        Returns a new tensor with the length of the longest part, padded with zeros. In a node of
        one rank, returns `buffer` itself.
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
        """Like `sum_part`, but computes the mean, and may overwrite `buffer`.

        Ranks divide before the sum, as DDP does, because the sum could overflow in float16.
        """
        return self.sum_part(buffer if self.size == 1 else buffer.div_(self.size))

    def gather(self, part: Tensor, buffer: Tensor) -> None:
        """Gather the parts of all ranks of the node, as `sum_part` pads them, into `buffer`."""
        if self.group is None or self.size == 1:
            return
        padded = part.new_empty(self.size, part.numel())
        with span("dct::gather_parts"):
            all_gather(padded, part, self.group)
        buffer.copy_(padded.view(-1)[: buffer.numel()])

    def wire_bytes(self, numel: int, itemsize: int) -> int:
        """Bytes that a rank sends inside its node per step for a bucket of `numel` elements."""
        # A reduce-scatter and an all-gather send as many bytes as an all-reduce.
        return all_reduce_bytes(self.size * self._length(numel) * itemsize, self.size)

    def sentence(self, nbytes: int) -> str:
        """Text to append to a plan's table: this rank's part, and the bytes inside the node."""
        if self.size == 1:
            return ""
        return (
            f"\nThis is the traffic between nodes of part {self.rank} of {self.size} of every "
            f"bucket.\nInside the node this rank sends {nbytes:,} bytes, in a reduce-scatter and "
            "an all-gather."
        )

    def _length(self, numel: int) -> int:
        share = -(-numel // self.size)
        return -(-share // _ALIGNMENT) * _ALIGNMENT


class NodeBucket(Bucket):
    """A bucket of which each rank of a node exchanges one part with other nodes.

    The residual of a node is the sum of the residuals of its ranks. Each rank keeps the residual
    of its own part. If the states also contain residuals for the parts of other ranks, a
    reduce-scatter sends these residuals to the other ranks before the first gradient.

    Args:
        node: this rank's node.
        sizes: {name: numel} for the parameters, in the order of the bucket.
        plan: the plan of this rank's part.
        group, device, step, states: as for `Bucket`; the states cover whole parameters.
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
        part = {name: self._cut(name, states[name]) for name in self._pieces if name in states}
        super().__init__(plan, group, device, step, part)
        pending = [self._pending_for_others(name, states) for name in names]
        self._pending: Tensor | None = torch.cat(pending)

    def start(self, buffer: Tensor, inv_scale: Tensor | None = None) -> None:
        self.begin()
        numel = self.plan.numel
        if self._pending is not None:
            self.codec.residual += self._node.sum_part(self._pending.to(buffer.device))[:numel]
            self._pending = None
        self._part = self._node.mean_part(buffer)
        super().start(self._part[:numel], inv_scale)

    def finish(self, out: Tensor, scale: Tensor | None = None) -> None:
        """Write the mean over all ranks of all nodes into `out`."""
        if self._part.is_cuda:  # the executor allocated it on a different stream
            self._part.record_stream(torch.cuda.current_stream(self._part.device))
        super().finish(self._part[: self.plan.numel], scale)
        self._node.gather(self._part, out)
        del self._part  # frees its memory

    def states(self) -> dict[str, SegmentState]:
        """{name: a copy of the state of the whole parameter, with 0 outside this rank's part}."""

        def placed(name: str, part: Tensor) -> Tensor:
            piece = self._pieces[name]
            whole = torch.zeros(self._sizes[name], dtype=torch.float32, device="cpu")
            whole[piece.low : piece.high] = part
            return whole

        return {name: state.map(partial(placed, name)) for name, state in super().states().items()}

    def _cut(self, name: str, state: SegmentState) -> SegmentState:
        """The slice of a state that is in this rank's part."""
        piece = self._pieces[name]
        return state.map(lambda whole: whole[piece.low : piece.high])

    def _pending_for_others(self, name: str, states: dict[str, SegmentState]) -> Tensor:
        """The pending entries in other ranks' parts, as contributions to the sum over nodes."""
        if name not in states:
            return torch.zeros(self._sizes[name], dtype=torch.float32, device="cpu")
        pending = states[name].share(self.plan.ranks).clone()
        if name in self._pieces:
            piece = self._pieces[name]
            pending[piece.low : piece.high] = 0
        return pending


_CPU = torch.device("cpu")


class Topology:
    """The process groups of a state, from a mesh or from one group.

    Args:
        op: the name for error messages.
        group: the ranks to average over.
        mesh: these ranks in dimensions ("node", "local"); None: every rank is its own node.
        device: the device of the gradients.

    Attributes:
        all_ranks: the group to average over.
        layout: the ranks of each node as text, or "none" without a mesh.
        node: this rank's node. Set by `open`, as are `between` and `close`.
        between: the group of ranks with the same local rank, which exchange payloads.
        close: destroys the groups that `open` created, as does garbage collection of this object.
    """

    def __init__(
        self,
        op: str,
        group: dist.ProcessGroup | None,
        mesh: DeviceMesh | None,
        device: torch.device,
    ) -> None:
        self.all_ranks = groups.require_group(op, group, "process_group")
        self._given: tuple[dist.ProcessGroup, ...] = (self.all_ranks,)
        self.layout = "none"
        if mesh is not None:
            self._given = require_mesh(op, mesh, NODES)
            self.layout = str(mesh.mesh.tolist())
            ranks = mesh.mesh.flatten().tolist()
            expected = dist.get_process_group_ranks(self.all_ranks)
            if sorted(ranks) != sorted(expected):
                checks.fail(op, "mesh", f"the ranks of ddp, {expected}", ranks, verb="have")
            if mesh.device_type != device.type:
                checks.fail(op, "mesh", f"on {device.type} like ddp", mesh.device_type)
        # The CPU needs separate groups, because collectives of the executor's thread must not
        # interleave with collectives of the main thread. The executor on CUDA has no thread.
        self._separate = device.type == "cpu"

    def open(self, name: str) -> None:
        """Create the groups for the exchange. Collective, after ranks have compared settings.

        Args:
            name: a new name for these groups, the same on all ranks.
        """
        made: tuple[dist.ProcessGroup, ...] = ()
        if self._separate:
            # The groups of a mesh have torch's default timeout unless the user set another one.
            given = (self.all_ranks, *self._given)
            timeout = min(groups.timeout_of(group, _CPU) for group in given)
            self._given = made = tuple(
                groups.separate_group(group, f"{name}/{index}", timeout)
                for index, group in enumerate(self._given)
            )
        self.close = groups.destroyer(self, *made)
        self.between, *inside = self._given
        self.node = Node(*inside)


class DenseMean:
    """Averages a bucket in a dense step. Messages between nodes are in bfloat16.

    Args:
        topology: an open topology of the ranks to average over.
    """

    def __init__(self, topology: Topology) -> None:
        self._node, self._between = topology.node, topology.between

    def start(self, buffer: Tensor, inv_scale: Tensor | None = None) -> None:
        """Replace `buffer` by its mean over all ranks."""
        part = self._node.mean_part(buffer)
        with span("dct::exchange_dense"):
            part.copy_(dense_mean(part, torch.bfloat16, self._between))
        self._node.gather(part, buffer)

    def finish(self, out: Tensor, scale: Tensor | None = None) -> None:
        """Do nothing, because the exchange is complete."""
