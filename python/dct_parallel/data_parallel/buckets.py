"""DDP's buckets and their parameters, whose states move with them from bucket to bucket."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from dct_kernels import checks

from ..exchange import selection
from ..exchange.bucket import Bucket
from ..exchange.codec import Settings
from ..exchange.plan import BucketPlan
from ..exchange.segment_state import SegmentState
from . import layout
from .node_bucket import NodeBucket
from .topology import Topology


class Buckets:
    """The buckets of one DDP, made when DDP first sends them, and states not in a bucket yet.

    Args:
        names: {parameter: name} of the parameters that DDP averages.
        settings: of the user.
        transport: as given by the user, or None.
        topology: of the ranks to average over, opened.
        device: of the gradients.
    """

    def __init__(
        self,
        names: dict[Parameter, str],
        settings: Settings,
        transport: str | None,
        topology: Topology,
        device: torch.device,
    ) -> None:
        self._names, self._device = names, device
        self._settings, self._transport = settings, transport
        self._node, self._group = topology.node, topology.between
        self._layouts: dict[int, tuple[list[Parameter], BucketPlan]] = {}
        self._buckets: dict[int, Bucket] = {}
        self._parked: dict[str, SegmentState] = {}

    def plan(self, index: int, bucket: dist.GradBucket) -> BucketPlan:
        """The plan of DDP's bucket: made once, and again if it holds different parameters.

        Raises:
            ValueError: the hook belongs to a different model, or the gradient is sparse.
        """
        parameters = cast(list[Parameter], bucket.parameters())  # "tensors", by torch's stubs
        known, plan = self._layouts.get(index, ([], None))
        if plan is None or not _same(parameters, known):
            plan = self._new_plan(bucket, parameters)
            self._layouts[index] = parameters, plan
        return plan

    def bucket(self, index: int, plan: BucketPlan, step: int) -> Bucket:
        """The bucket of this plan, to be sent now; a new one, from its parameters' states, if the
        layout has changed.
        """
        known = self._buckets.get(index)
        if known is not None and known.plan is plan:
            return known
        # Buckets before this one are unchanged, and may be in use. So this and later ones hold the
        # same parameters as before, in a different order.
        for later in [i for i in self._buckets if i >= index]:
            self._parked |= self._buckets.pop(later).states()
        sizes = {self._names[p]: p.numel() for p in self._layouts[index][0]}
        states = {name: self._parked.pop(name) for name in sizes if name in self._parked}
        in_node = self._node.size > 1
        make = partial(NodeBucket, self._node, sizes) if in_node else Bucket
        made = self._buckets[index] = make(plan, self._group, self._device, step, states)
        return made

    def in_order(self) -> list[Bucket]:
        """All of them; none before compression starts, and after a load."""
        return [bucket for _, bucket in sorted(self._buckets.items())]

    def plans(self) -> list[BucketPlan]:
        """The plans of all buckets; until they are known, of one that holds all parameters."""
        if self._buckets:
            return [bucket.plan for bucket in self.in_order()]
        return [self._plan_of(self._names)]

    def reason(self) -> str:
        """Why buckets take the transports of `plans`."""
        return selection.reason(self._transport, self.plans())

    def states(self) -> dict[str, SegmentState]:
        """{name: a copy of its parameter's state}, of all parameters."""
        known = dict(self._parked)
        for bucket in self._buckets.values():
            known |= bucket.states()
        # A loaded state may have owners though buckets have none. All parameters do, or none.
        owners = selection.keeps_owners(self._transport, self._settings, self._group.size())
        owners = owners or any(state.owner is not None for state in known.values())
        states = {}
        for parameter, name in self._names.items():
            state = known.get(name, SegmentState(torch.zeros(parameter.numel())))
            state = state.with_owner() if owners else state
            states[name] = state.map(partial(layout.to_logical, parameter=parameter))
        return {name: state.map(torch.clone) for name, state in states.items()}

    def load(self, states: dict[str, SegmentState]) -> None:
        """Start from these, once there are buckets."""
        self._buckets.clear()
        self._parked = {
            name: states[name].map(partial(layout.to_physical, parameter=parameter))
            for parameter, name in self._names.items()
            if name in states
        }

    def _new_plan(self, bucket: dist.GradBucket, parameters: Sequence[Parameter]) -> BucketPlan:
        if any(parameter not in self._names for parameter in parameters):
            rule = "made from the DDP that the hook is registered with"
            checks.fail("dct_hook", "state", rule, "a bucket of a different model")
        if bucket.buffer().layout != torch.strided:
            got = "a sparse one: build embeddings with sparse=False"
            checks.fail("dct_hook", "gradient", "dense", got)
        return self._plan_of(parameters)

    def node_bytes(self) -> int:
        """Bytes sent per rank inside its node and step."""
        layouts = [parameters for parameters, _ in self._layouts.values()] or [list(self._names)]
        return sum(
            self._node.wire_bytes(sum(p.numel() for p in parameters), parameters[0].itemsize)
            for parameters in layouts
        )

    def _plan_of(self, parameters: Iterable[Parameter]) -> BucketPlan:
        names, sizes = zip(*[(self._names[p], p.numel()) for p in parameters], strict=True)
        pieces = self._node.slices(sizes)
        ranks, own = self._group.size(), tuple(piece.high - piece.low for piece in pieces)
        # By the longest part, because all ranks of a node use the same transport.
        longest = -(-sum(sizes) // self._node.size)
        return BucketPlan(
            tuple(names[piece.index] for piece in pieces),
            own,
            self._settings,
            selection.transport_for(self._transport, self._settings, longest, ranks),
            ranks,
        )


def _same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(a is b for a, b in zip(ours, theirs, strict=True))
