"""One bucket of DDP's on a cluster: each rank of a node exchanges a part with other nodes."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..collectives import all_gather
from ..exchange.bucket import Bucket
from ..exchange.readback import Readback
from ..exchange.results import ExchangeResult, Verdict, join
from ..exchange.segment_state import SegmentState
from .node import Node


class NodeBucket:
    """One bucket, as `Bucket`: inside the node summed and gathered whole, between nodes a part.

    The node's residual is the sum of its ranks' states. Each rank keeps its own part; residuals in
    a state for other ranks' parts go to these ranks once, before the first gradient.

    Every rank of the node learns of damage and overflow on any of its ranks.

    Args:
        node: this rank's.
        make: the bucket of a part, from the states of the parameters in it.
        sizes: {name: numel} of the bucket's parameters, in its order.
        states: {name: what `states` gave} to start from; missing names start from zero.
    """

    def __init__(
        self,
        node: Node,
        make: Callable[[dict[str, SegmentState]], Bucket],
        sizes: dict[str, int],
        states: dict[str, SegmentState],
    ) -> None:
        self._node = node
        self._sizes = sizes
        names = list(sizes)
        self._pieces = {names[piece.index]: piece for piece in node.slices(list(sizes.values()))}
        own = {name: self._cut(name, states[name]) for name in self._pieces if name in states}
        self._inner = make(own)
        self.plan = self._inner.plan
        self._others: Tensor | None = torch.cat([self._of_others(name, states) for name in names])
        self._readback = Readback()
        self._fresh = False

    def reduce(
        self, buffer: Tensor, scale: Tensor | None = None, inv_scale: Tensor | None = None
    ) -> None:
        """Replace this rank's gradients in `buffer` by their mean over all nodes' ranks."""
        numel = self.plan.numel
        if self._others is not None:
            owed = self._node.sum_part(self._others.to(buffer.device))
            self._inner.codec.residual += owed[:numel]
            self._others = None
        part = self._node.mean_part(buffer)
        self._inner.reduce(part[:numel], scale, inv_scale)
        self._node.gather(part, buffer)
        own = self._inner.fault_flags()
        flags = own.new_empty(self._node.size * own.numel())
        assert self._node.group is not None  # else there is no NodeBucket
        all_gather(flags, own, self._node.group)
        self._readback.post(flags)
        self._fresh = True

    def announce_damage(self) -> None:
        """Take part in a `reduce` of other nodes; all ranks of this one know, and do the same."""
        self._inner.announce_damage()

    def take_result(self) -> ExchangeResult | None:
        """How the last `reduce` went, once, on any rank of the node."""
        if not self._fresh:
            return None
        self._fresh = False
        own = self._inner.take_result()
        assert own is not None  # of the same `reduce`
        (flags,) = self._readback.wait()
        verdicts = [own.verdict]
        for rank, (damaged, told, non_finite) in zip(
            self._node.ranks, flags.view(self._node.size, -1).tolist(), strict=True
        ):
            if rank != self._node.ranks[self._node.rank]:
                words = [f"a damaged one on rank {rank} of this node"] * damaged
                verdicts.append(Verdict(words, [told - 1] * bool(told), bool(non_finite)))
        return own._replace(verdict=join(verdicts))

    def take_back(self) -> None:
        """Return the entries of the last `reduce` to the residual, for a step not applied."""
        self._inner.take_back()

    def states(self) -> dict[str, SegmentState]:
        """{name: copies, as long as the parameter}, 0 outside of this rank's part."""

        def placed(name: str, part: Tensor) -> Tensor:
            piece, whole = self._pieces[name], torch.zeros(self._sizes[name])
            whole[piece.low : piece.high] = part
            return whole

        states = self._inner.states().items()
        return {name: state.map(partial(placed, name)) for name, state in states}

    def parameter_stats(self) -> dict[str, dict[str, float]]:
        """{name: see `DCTState.parameter_stats`} for this rank's part."""
        return self._inner.parameter_stats()

    def silent(self) -> list[str]:
        """As of a `Bucket`, for this rank's part."""
        return self._inner.silent()

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
