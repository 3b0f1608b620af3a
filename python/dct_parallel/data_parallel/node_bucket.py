"""One bucket of DDP's on a cluster: each rank of a node exchanges a part with other nodes."""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ..exchange.bucket import Bucket
from ..exchange.plan import BucketPlan
from ..exchange.segment_state import SegmentState
from .node import Node


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

    def reduce(
        self, buffer: Tensor, scale: Tensor | None = None, inv_scale: Tensor | None = None
    ) -> None:
        """Replace this rank's gradients in `buffer` by their mean over all nodes' ranks."""
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
            piece, whole = self._pieces[name], torch.zeros(self._sizes[name])
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
            return torch.zeros(self._sizes[name])
        owed = states[name].share(self.plan.ranks).clone()
        if name in self._pieces:
            piece = self._pieces[name]
            owed[piece.low : piece.high] = 0
        return owed
