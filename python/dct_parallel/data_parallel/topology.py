"""The ranks that a state averages over: all, or those of its node and its peers on other nodes."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import record_function

from dct_kernels import checks

from .. import groups
from ..collectives import dense_mean
from ..mesh import NODES, require_mesh
from .node import Node

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
        self.everyone = groups.require_group(op, group)
        self._given: tuple[dist.ProcessGroup, ...] = (self.everyone,)
        self.layout = "none"
        if mesh is not None:
            self._given = require_mesh(op, mesh, NODES)
            self.layout = str(mesh.mesh.tolist())
            ranks, own = mesh.mesh.flatten().tolist(), dist.get_process_group_ranks(self.everyone)
            if sorted(ranks) != sorted(own):
                checks.fail(op, "mesh", f"the ranks of ddp, {own}", ranks, verb="have")
            if mesh.device_type != device.type:
                checks.fail(op, "mesh", f"on {device.type} like ddp", mesh.device_type)
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

    def dense_mean(self, buffer: Tensor) -> Tensor:
        """Replace `buffer` by its mean over all ranks, sent to other nodes in bfloat16."""
        part = self.node.mean_part(buffer)
        with record_function("dct::exchange_dense"):
            part.copy_(dense_mean(part, torch.bfloat16, self.between))
        self.node.gather(part, buffer)
        return buffer
