"""The parameters and buckets of a DDP module. A parameter keeps its state in a new bucket.

DDP's buckets hold dense parameters in memory order, which differs from index order for formats such
as channels_last. Residuals are in memory order, like the bucket. Checkpoints are in index order.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from dct_kernels import checks

from .._torch import expects_sparse_gradients, reduced_parameters
from ..exchange.bucket import Bucket, SegmentState
from ..exchange.ledger import StepLedger
from ..exchange.plan import BucketPlan, log_plan, plan_bucket, unwrapped
from ..exchange.settings import Settings
from .executors import Reduction
from .node import DenseMean, NodeBucket, Topology


class Buckets:
    """The buckets of one DDP module, and the states of parameters that are in no bucket yet.

    A bucket is created when DDP first passes it to the hook.

    Args:
        names: {parameter: name} of the parameters that DDP averages.
        settings: the user's settings.
        topology: an open topology of the ranks to average over.
    """

    def __init__(self, names: dict[Parameter, str], settings: Settings, topology: Topology) -> None:
        self._names, self._device = names, device_of(names)
        self._settings = settings
        self._node, self._group = topology.node, topology.between
        # Keys are DDP's indices. The key of a saved bucket is its number minus the number of saved
        # buckets, so that a bucket of DDP does not replace it in the same step.
        self._layouts: dict[int, tuple[list[Parameter], BucketPlan]] = {}
        self._buckets: dict[int, Bucket] = {}
        self._saved = 0  # number of saved buckets
        self._parked: dict[str, SegmentState] = {}
        # _loaded: the layouts were loaded, and no step has used them. _resumes: this step does.
        self._loaded = self._resumes = False
        self._dense = DenseMean(topology)

    def begin(self) -> None:
        """Begin a step."""
        self._resumes, self._loaded = self._loaded, False

    def reduction(self, bucket: dist.GradBucket, ledger: StepLedger) -> Reduction:
        """Return what reduces DDP's bucket in the current step, and record it in the ledger.

        The first step after a load uses the buckets of the saved run, if DDP's bucket consists of
        whole saved buckets. By default, DDP starts with all parameters in one bucket, and later
        rebuilds its buckets in the order in which the gradients arrived. With
        `find_unused_parameters=True` and without a static graph, DDP starts with buckets of
        limited size and does not rebuild them.
        """
        index = bucket.index()
        parameters = cast(list[Parameter], bucket.parameters())  # "tensors", by torch's stubs
        if index not in self._layouts or not _same(parameters, self._layouts[index][0]):
            if self._resumes and (parts := self._saved_parts(parameters)):
                reductions = [(part, self._reduction(key, ledger)) for key, part in parts.items()]
                return _SavedBuckets(parameters, reductions)
            if any(parameter not in self._names for parameter in parameters):
                rule = "made from the DDP that the hook is registered with"
                checks.fail("dct_hook", "state", rule, "a bucket of a different model")
            self._replace(index, parameters)
            self._layouts[index] = parameters, self._plan_of(parameters)
        return self._reduction(index, ledger)

    def _saved_parts(self, parameters: Sequence[Parameter]) -> dict[int, list[Parameter]]:
        """{key: parameters} of the saved buckets that together contain these parameters.

        Empty if there are none, or if a single one contains the parameters in the same order.
        """
        members = set(parameters)
        parts = {key: part for key, (part, _) in self._layouts.items() if members.issuperset(part)}
        whole = sum(map(len, parts.values())) == len(parameters)
        return {} if not whole or any(_same(part, parameters) for part in parts.values()) else parts

    def _replace(self, index: int, parameters: Sequence[Parameter]) -> None:
        """Park the states of the buckets that had this index or any of these parameters.

        No such bucket is in use, because a step passes each index and each parameter once.
        """
        members = set(parameters)
        for key, (others, _) in list(self._layouts.items()):
            if key == index or not members.isdisjoint(others):
                del self._layouts[key]
                if (bucket := self._buckets.pop(key, None)) is not None:
                    self._parked |= bucket.states()

    def _reduction(self, key: int, ledger: StepLedger) -> Reduction:
        """What reduces the saved or current bucket with this key."""
        compressed = ledger.current.compressed
        if compressed is None:
            return self._dense
        if key not in self._buckets:
            self._buckets[key] = self._new_bucket(*self._layouts[key], compressed)
        what = f"bucket {key}" if key >= 0 else f"saved bucket {key + self._saved}"
        ledger.record(what, self._buckets[key])
        return self._buckets[key]

    def _new_bucket(self, parameters: list[Parameter], plan: BucketPlan, step: int) -> Bucket:
        sizes = {self._names[p]: p.numel() for p in parameters}
        states = {name: self._parked.pop(name) for name in sizes if name in self._parked}
        log_plan("DCTState", plan, self._device)
        if self._node.size == 1:
            return Bucket(plan, self._group, self._device, step, states)
        return NodeBucket(self._node, sizes, plan, self._group, self._device, step, states)

    def in_order(self) -> list[Bucket]:
        """All buckets. The list is empty before compression starts and directly after a load."""
        return [bucket for _, bucket in sorted(self._buckets.items())]

    def plans(self) -> list[BucketPlan]:
        """The plans of all buckets, or of one bucket with all parameters if no bucket exists."""
        if self._buckets:
            return [bucket.plan for bucket in self.in_order()]
        return [self._plan_of(self._names)]

    def states(self) -> dict[str, SegmentState]:
        """{name: a copy of the parameter's state} for all parameters."""
        known = dict(self._parked)
        for bucket in self._buckets.values():
            known |= bucket.states()
        states = {}
        for parameter, name in self._names.items():
            zeros = torch.zeros(parameter.numel(), dtype=torch.float32, device="cpu")
            state = known.get(name, SegmentState(zeros))
            states[name] = state.map(partial(to_logical, parameter=parameter))
        return {name: state.map(torch.clone) for name, state in states.items()}

    def names(self) -> list[list[str]]:
        """The names of the parameters of each known bucket."""
        layouts = [parameters for _, (parameters, _) in sorted(self._layouts.items())]
        return [[self._names[p] for p in parameters] for parameters in layouts]

    def load(self, states: dict[str, SegmentState], names: Sequence[Sequence[str]]) -> None:
        """Use these states for the next buckets. `names` lists the buckets of the saved run.

        Raises:
            ValueError: `names` has an unknown parameter or a duplicate. Nothing has changed.
        """
        flat = [name for bucket in names for name in bucket]
        if len(set(flat)) < len(flat) or set(flat) - set(self._names.values()):
            rule = "lists of parameters of this model, each at most once"
            checks.fail("load_state_dict", "buckets", rule, ", ".join(flat))
        self._buckets.clear()
        parameters = {name: parameter for parameter, name in self._names.items()}
        self._loaded, saved = True, [[parameters[name] for name in bucket] for bucket in names]
        self._saved = len(saved)
        numbered = enumerate(saved, -len(saved))
        self._layouts = {key: (bucket, self._plan_of(bucket)) for key, bucket in numbered}
        self._parked = {
            name: states[name].map(partial(to_physical, parameter=parameter))
            for parameter, name in self._names.items()
            if name in states
        }

    def node_bytes(self) -> int:
        """Bytes that this rank sends inside its node per step."""
        layouts = [parameters for parameters, _ in self._layouts.values()] or [list(self._names)]
        return sum(
            self._node.wire_bytes(sum(p.numel() for p in parameters), parameters[0].itemsize)
            for parameters in layouts
        )

    def _plan_of(self, parameters: Iterable[Parameter]) -> BucketPlan:
        names, sizes = zip(*[(self._names[p], p.numel()) for p in parameters], strict=True)
        pieces = self._node.slices(sizes)
        part, lengths = [names[p.index] for p in pieces], [p.high - p.low for p in pieces]
        # The length of the longest part, so that all ranks of a node choose the same transport.
        longest = -(-sum(sizes) // self._node.size)
        return plan_bucket(part, lengths, self._settings, self._group.size(), longest)


class _SavedBuckets:
    """Buckets of a saved run, which together contain the parameters of one DDP bucket.

    Args:
        order: the parameters of DDP's bucket.
        reductions: for each saved bucket, its parameters and what reduces them.
    """

    def __init__(
        self, order: Sequence[Tensor], reductions: Sequence[tuple[Sequence[Tensor], Reduction]]
    ) -> None:
        self._order, self._reductions = order, reductions

    def start(self, buffer: Tensor, inv_scale: Tensor | None = None) -> None:
        """Start nothing, because buckets that are reduced one by one need less memory."""
        self._inv_scale = inv_scale

    def finish(self, out: Tensor, scale: Tensor | None = None) -> None:
        """Replace the gradients of all parameters in `out` by their mean."""
        pieces = dict(zip(self._order, out.split([p.numel() for p in self._order]), strict=True))
        for parameters, reduction in self._reductions:
            flat = torch.cat([pieces[p] for p in parameters])
            reduction.start(flat, self._inv_scale)
            reduction.finish(flat, scale)
            parts = flat.split([p.numel() for p in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                pieces[parameter].copy_(part)


def _same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(a is b for a, b in zip(ours, theirs, strict=True))


def named_parameters(ddp: DistributedDataParallel) -> dict[Parameter, str]:
    """Return {parameter: name} for the parameters that DDP averages, as in the inner module."""
    if not isinstance(ddp, DistributedDataParallel):
        rule = "a DistributedDataParallel"
        if hasattr(ddp, "reshard"):  # an FSDPModule; importing that class takes a second
            rule += " (for a model that fully_shard was applied to, use dct_fully_shard_hook)"
        elif isinstance(ddp, nn.Module):
            rule += " (wrap the module in one first)"
        checks.fail("DCTState", "ddp", rule, checks.shown(ddp), TypeError)
    if expects_sparse_gradients(ddp):
        rule = "dense (build embeddings with sparse=False)"
        checks.fail("DCTState", "gradients of ddp", rule, "sparse ones")
    reduced = reduced_parameters(ddp)  # not by name: DDP may ignore one name of a tied weight
    named = ddp.module.named_parameters()
    names = {parameter: unwrapped(name) for name, parameter in named if parameter in reduced}
    for parameter, name in names.items():
        checks.require_dtype("DCTState", f"parameter {name}", parameter.dtype, checks.FLOATS)
    device = device_of(names)
    if device.type not in ("cpu", "cuda"):
        checks.fail("DCTState", "ddp", "on the CPU or on CUDA", device)
    return names


def device_of(names: dict[Parameter, str]) -> torch.device:
    """The device of the parameters. A DDP module has at least one parameter."""
    return next(iter(names)).device


def to_logical(flat: Tensor, parameter: Tensor) -> Tensor:
    """Reorder `flat` [numel] from the order in a bucket to the parameter's index order."""
    if not _differs(parameter):
        return flat
    return flat.as_strided(parameter.shape, parameter.stride()).flatten()


def to_physical(flat: Tensor, parameter: Tensor) -> Tensor:
    """The reverse of `to_logical`."""
    if not _differs(parameter):
        return flat
    moved = torch.empty_like(flat)
    moved.as_strided(parameter.shape, parameter.stride()).copy_(flat.view(parameter.shape))
    return moved


def _differs(parameter: Tensor) -> bool:
    """Whether DDP stores the elements in an order other than index order."""
    if parameter.is_contiguous():
        return False
    return torch.empty_like(parameter, device="meta").stride() == parameter.stride()
