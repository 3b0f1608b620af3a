"""DDP's buckets, and whose parameters they hold: what belongs to a parameter moves along."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from dct_kernels import checks

from ..executors import Executor
from . import checkpoint, memory_order
from .bf16 import Bf16Bucket
from .bucket import AnyBucket, Bucket, PartBucket, Report
from .bucket_plan import BucketPlan, Settings
from .choice import Choice
from .node_bucket import NodeBucket
from .ranks import Ranks


class Buckets:
    """The buckets of one DDP, made as they come, and the states that wait for theirs.

    Args:
        names: {parameter: name} of what DDP averages.
        settings: what the user chose.
        choice: of each bucket's transport.
        ranks: to average over, opened.
        device: of the gradients.
    """

    def __init__(
        self,
        names: dict[Parameter, str],
        settings: Settings,
        choice: Choice,
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        self._names = names
        self._settings = settings
        self._choice = choice
        self._node, self._group = ranks.node, ranks.between
        self._device = device
        self._layouts: dict[int, tuple[list[Parameter], BucketPlan]] = {}
        self._buckets: dict[int, AnyBucket] = {}
        self._parked: dict[str, checkpoint.SegmentState] = {}
        self._sent: list[int] = []  # in this step, and not taken back

    def begin_step(self) -> None:
        """What was sent by now is applied, or was taken back."""
        self._sent.clear()

    def plan(self, index: int, bucket: dist.GradBucket) -> BucketPlan:
        """What DDP's bucket sends: found once, and anew when it holds other parameters.

        Raises:
            ValueError: the hook belongs to another model, or the gradient is sparse.
        """
        parameters = cast(list[Parameter], bucket.parameters())  # "tensors", by torch's stubs
        known, plan = self._layouts.get(index, ([], None))
        if plan is None or not _same(parameters, known):
            plan = self._new_plan(bucket, parameters)
            self._layouts[index] = parameters, plan
        return plan

    def bucket(self, index: int, plan: BucketPlan, step: int) -> AnyBucket:
        """The bucket of this plan, to be sent now: made anew, from its parameters' states, on a new
        layout.
        """
        self._sent.append(index)
        known = self._buckets.get(index)
        if known is not None and known.plan is plan:
            return known
        # Buckets before this one are as they were, and may be at work. So this and later ones hold
        # the same parameters as before, dealt out differently.
        for later in [i for i in self._buckets if i >= index]:
            self._parked |= self._buckets.pop(later).states()
        sizes = {self._names[p]: p.numel() for p in self._layouts[index][0]}
        states = {name: self._parked.pop(name) for name in sizes if name in self._parked}
        kind = Bucket if plan.ranges else Bf16Bucket
        make: Callable[[dict[str, checkpoint.SegmentState]], PartBucket]
        make = partial(kind, plan, self._group, self._device, step)
        single = self._node.size == 1
        made: AnyBucket
        made = make(states) if single else NodeBucket(self._node, make, sizes, states)
        self._buckets[index] = made
        return made

    def holds(self, index: int, plan: BucketPlan) -> bool:
        """Whether this bucket was of this plan in the last compressed step."""
        return index in self._buckets and self._buckets[index].plan is plan

    def in_order(self) -> list[AnyBucket]:
        """All of them; none before compression starts, and after a load."""
        return [bucket for _, bucket in sorted(self._buckets.items())]

    def take_back(self) -> None:
        """Return what was sent in this step to the residuals; called again, nothing."""
        while self._sent:
            self._buckets[self._sent.pop()].take_back()

    def take_reports(self) -> dict[int, Report]:
        """{index: report} of what the last step left to be known, once."""
        taken = {index: bucket.take_report() for index, bucket in self._buckets.items()}
        return {index: report for index, report in taken.items() if report is not None}

    def tell_damage(self, executor: Executor) -> None:
        """Take part in the others' step so far that they learn of the damage, and wait for it."""
        said = [executor.submit(bucket.tell_damage) for bucket in self.in_order()]
        with contextlib.suppress(RuntimeError):  # of peers that are gone
            for word in said:
                word.wait()
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()

    def plans(self) -> list[BucketPlan]:
        """Of all buckets; as long as they are not known, of one that holds everything."""
        if self._buckets:
            return [bucket.plan for bucket in self.in_order()]
        return [self._plan_of(self._names)]

    def bytes_of_another(self) -> int | None:
        """About what each bucket beyond the one of `plans` adds; None once all are known."""
        if self._buckets:
            return None
        (assumed,) = self.plans()
        least = dataclasses.replace(assumed, names=("",), sizes=(1,))
        return least.wire_bytes

    def states(self) -> dict[str, checkpoint.SegmentState]:
        """{name: copies of what its parameter must carry}; all parameters are there."""
        parts = ("residual", checkpoint.OWED) if self._choice.keeps_owners else ("residual",)
        states = {
            name: {part: torch.zeros(parameter.numel()) for part in parts}
            for parameter, name in self._names.items()
        }
        for name, state in self._parked.items():
            states[name] |= {part: value.clone() for part, value in state.items()}
        for bucket in self._buckets.values():
            for name, state in bucket.states().items():
                states[name] |= state
        return self._reordered(states, memory_order.leave)

    def load(self, states: dict[str, checkpoint.SegmentState]) -> None:
        """Start from these, as soon as buckets come."""
        self._buckets.clear()
        self._sent.clear()
        self._parked = self._reordered(states, memory_order.enter)

    def _reordered(
        self,
        states: dict[str, checkpoint.SegmentState],
        reorder: Callable[[Tensor, Parameter], Tensor],
    ) -> dict[str, checkpoint.SegmentState]:
        """The same states, where what is as long as its parameter is in the other order."""
        reordered = dict(states)
        for parameter, name in self._names.items():
            state = states.get(name, {})
            reordered[name] = {part: reorder(value, parameter) for part, value in state.items()}
        return {name: reordered[name] for name in states}

    def _new_plan(self, bucket: dist.GradBucket, parameters: Sequence[Parameter]) -> BucketPlan:
        if any(parameter not in self._names for parameter in parameters):
            rule = "made from the DDP that the hook is registered with"
            checks.fail("dct_hook", "state", rule, "a bucket with parameters of another model")
        if bucket.buffer().layout != torch.strided:
            got = "a sparse one: build embeddings with sparse=False"
            checks.fail("dct_hook", "gradient", "dense", got)
        return self._plan_of(parameters)

    def node_bytes(self) -> int:
        """Bytes that a rank sends inside its node in a step."""
        layouts = [parameters for parameters, _ in self._layouts.values()] or [list(self._names)]
        return sum(
            self._node.wire_bytes(sum(p.numel() for p in parameters), parameters[0].itemsize)
            for parameters in layouts
        )

    def _plan_of(self, parameters: Iterable[Parameter]) -> BucketPlan:
        names, sizes = zip(*[(self._names[p], p.numel()) for p in parameters], strict=True)
        pieces = self._node.slices(sizes)
        return self._choice.plan(
            tuple(names[piece.index] for piece in pieces),
            tuple(piece.high - piece.low for piece in pieces),
            self._settings,
            self._group.size(),
        )


def _same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(a is b for a, b in zip(ours, theirs, strict=True))
