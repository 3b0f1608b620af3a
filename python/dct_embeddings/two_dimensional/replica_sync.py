"""Replicas of embedding tables, averaged every few steps."""

from itertools import accumulate
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor

from dct_kernels import checks
from dct_parallel.agreement import refusing

from ..groups import require_same_in_mesh
from ..row_wise_adagrad import RowWiseAdagrad
from .averages import Average, MeanOfLargestDeltas, MeanOfRoundedDeltas
from .embedding_bags import ShardedEmbeddingBags

_OP = "ReplicaSync"
_averaged: WeakSet[ShardedEmbeddingBags] = WeakSet()  # bags that have a ReplicaSync


class ReplicaSync:
    """Averages the tables of all replicas, and their row-wise AdaGrad state, every `every` steps.

    The rows that some replica's optimizer changed since the last sync take part; other rows cost
    neither bytes nor memory passes. Afterwards replicas are bitwise equal in
    weights and accumulators. In a mesh of one row a sync changes no bit, whatever the settings. A
    sync may come at any time: while gradients are accumulated, or between a forward pass and its
    step.

    - By default rows are averaged as they are, by an all-reduce.
    - With `dtype`, the changes since the last sync are rounded to it and sent; accumulators as they
      are. Rounding errors are lost.
    - With `density`, DCT (arXiv 2010.08899): the largest entries of the changes, with a threshold
      per shard, as bfloat16. Weights become those of the last sync plus the mean of all messages;
      the rest leaves the weights and stays in the residual (error feedback). A row with a residual
      counts as changed, so it takes part in every sync until `flush()`. Accumulators are not
      thresholded: their gains are sent, for rows changed since the last sync. Compressing changes
      across replicas, not gradients, is our reconstruction.

    Between syncs replicas differ, and with a density changes are pending. Call `flush()` before
    evaluation, before a checkpoint, and before a checkpoint is loaded into a running job. After a
    flush a ReplicaSync has nothing to save, and the ranks of one replica have all of bags and
    optimizer.

    Each step of the optimizer gathers the rows that it changes for the first time since the last
    sync, and the host waits for their number; dense gradients cost one more pass over the gradient.
    A sync mutates the weight of bags and the accumulators of the optimizer. Deterministic on the
    CPU.

    Args:
        bags: whose weight is averaged. One ReplicaSync for a model's life, made before training,
            once saved states are loaded. A copy of bags (copy.deepcopy, torch.save,
            torch.optim.swa_utils.AveragedModel) has none.
        optimizer: the one that trains the weight, and nothing else may change that:
            torch.optim.SGD without momentum and weight decay, RowWiseAdagrad or
            MomentumScaledRowWiseAdagrad. A hook on its step notes the rows that have a gradient; a
            copy of the optimizer does not have the hook.
        every: steps from one sync to the next.
        dtype: torch.float16 or torch.bfloat16, of the changes; default uncompressed.
        density: instead of a dtype, fraction of each shard's changed entries to send at a sync, in
            (0, 1]; for float32 weights.

    Raises:
        ValueError, TypeError: an argument is out of its range; the text names it.
        ValueError: ranks of the mesh differ in a setting or the kind of optimizer; on all of them.
        TypeError: by the optimizer's step, if it has been given momentum or weight decay since.
        RuntimeError: an argument is out of its range on a different rank, as the text says.
    """

    def __init__(
        self,
        bags: ShardedEmbeddingBags,
        optimizer: torch.optim.Optimizer,
        every: int = 1,
        *,
        dtype: torch.dtype | None = None,
        density: float | None = None,
    ) -> None:
        checks.require_type(_OP, "bags", bags, ShardedEmbeddingBags, "ShardedEmbeddingBags")
        with refusing(_OP, *bags.mesh.get_all_groups()):
            checks.require_int(_OP, "every", every, 1, 2**63 - 1)
            _require_format(dtype, density, bags.weight)
            _require_optimizer(optimizer, bags.weight)
            if bags in _averaged:  # the residual of the other would be lost
                checks.fail(_OP, "bags", "one ReplicaSync only", "a second", verb="have")
        told = {"every": every, "dtype": str(dtype), "density": density}
        require_same_in_mesh(_OP, bags.mesh, told | {"optimizer": type(optimizer).__name__})
        self._bags, self._optimizer, self._every = bags, optimizer, every
        self._average = _average(bags, dtype, density)
        self._steps = 0
        optimizer.register_step_pre_hook(self._before_step)
        _averaged.add(bags)

    def __reduce__(self) -> NoReturn:
        """Neither copied nor pickled: a copy would average the original's bags, or nobody's."""
        rule = "be copied or pickled (make a new one for a copy of bags)"
        checks.fail(_OP, "a ReplicaSync", rule, "a copy or a pickle", TypeError, verb="not")

    def step(self) -> None:
        """Call it after every step of the optimizer; syncs after every `every`-th."""
        self._steps += 1
        if self._steps == self._every:
            self.sync()

    def sync(self) -> None:
        """Average now; every rank of the mesh calls this, after the same step.

        Raises:
            RuntimeError: a replica is gone, or its payload was damaged. Load a checkpoint then.
        """
        self._sync(everything=False)

    def flush(self) -> None:
        """A sync that sends all pending changes uncompressed, so that nothing is pending."""
        self._sync(everything=True)

    @torch.no_grad()
    def _sync(self, everything: bool) -> None:
        rows = self._average.sync(self._tensors(), everything)
        if isinstance(self._optimizer, RowWiseAdagrad):
            self._optimizer.averaged(self._bags.weight, rows)
        self._steps = 0

    # Not at a lookup: its rows could be changed after the sync that forgets them.
    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Note the rows that a step changes; if it has a closure, after calling that.

        A pre-hook of the optimizer's step, which returns new arguments for it, or None.
        """
        _require_rule(optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._note()
            return None

        def noting() -> Tensor:
            loss: Tensor = closure()
            self._note()
            return loss

        return args[:1], kwargs | {"closure": noting}

    @torch.no_grad()
    def _note(self) -> None:
        weight = self._bags.weight
        if weight.grad is not None:
            self._average.touch(_rows_of(weight.grad), self._tensors())

    def _tensors(self) -> list[Tensor]:
        """The tensors to average: the weight, and state of its optimizer, if any."""
        weight = self._bags.weight
        if isinstance(self._optimizer, RowWiseAdagrad):
            return [weight, self._optimizer.to_average(weight)]
        return [weight]


def _average(
    bags: ShardedEmbeddingBags, dtype: torch.dtype | None, density: float | None
) -> Average:
    group = bags.mesh.get_group("replicate")
    weight = bags.weight.detach()
    if group.size() > 1 and dtype is not None:
        return MeanOfRoundedDeltas(weight, group, dtype)
    if group.size() > 1 and density is not None:
        bounds = [0, *accumulate(len(rows) for rows in bags.shards().values())]
        return MeanOfLargestDeltas(weight, group, density, bounds)
    return Average(weight, group)


def _require_format(dtype: torch.dtype | None, density: float | None, weight: Tensor) -> None:
    if density is not None:
        checks.require_density(_OP, density)
        if dtype is not None:
            checks.fail(_OP, "density", f"None with dtype {dtype}", density)
        checks.require_dtype(_OP, "weight of bags, with a density,", weight.dtype, (torch.float32,))
    if dtype is not None:
        checks.require_dtype(_OP, "dtype", dtype, (torch.float16, torch.bfloat16))


def _rows_of(grad: Tensor) -> Tensor:
    """The rows that are not all zero, int32 [n]; for a sparse one its indices, maybe repeated."""
    rows = grad._indices()[0] if grad.is_sparse else grad.any(1).nonzero().squeeze(1)
    return rows.int()


def _require_optimizer(optimizer: torch.optim.Optimizer, weight: Tensor) -> None:
    _require_rule(optimizer)
    if not any(weight is p for group in optimizer.param_groups for p in group["params"]):
        checks.fail(_OP, "optimizer", "the weight of bags", "one without it", verb="train")


def _require_rule(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, RowWiseAdagrad):
        return
    got = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SGD):
        # Either changes rows that have no gradient.
        found = [(n, g[n]) for g in optimizer.param_groups for n in ("momentum", "weight_decay")]
        if not any(value for _, value in found):
            return
        got += " with " + ", ".join(f"{name} {value}" for name, value in found if value)
    rule = "plain SGD, RowWiseAdagrad or MomentumScaledRowWiseAdagrad"
    checks.fail(_OP, "optimizer", rule, got, TypeError)
