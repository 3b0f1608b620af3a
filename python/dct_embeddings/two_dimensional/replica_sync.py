"""Averages replicas of embedding tables every few steps."""

from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor

from dct_kernels import checks
from dct_parallel.exchange.settings import FORMATS, Settings
from dct_parallel.formats import require_format
from dct_parallel.groups import bit_sums, sharing_errors

from ..groups import mesh_groups, require_same_in_mesh
from ..row_wise_adagrad import RowWiseAdagrad
from .averages import Average, MeanOfChanges
from .embedding_bags import ShardedEmbeddingBags

_OP = "ReplicaSync"
_averaged: WeakSet[ShardedEmbeddingBags] = WeakSet()  # bags that have a ReplicaSync


class ReplicaSync:
    """Averages the tables of all replicas, and row-wise AdaGrad states, every `every` steps.

    A sync averages the rows that the optimizer of any replica has changed since the last sync.
    After a sync, all replicas are bitwise equal, but compressed changes may be pending. Call
    `flush()` before evaluation and before saving a checkpoint. After a flush, this object has no
    state to save. `load_state_dict` of the bags drops the changes since the last sync, so call it
    on every rank, with the same rows in all replicas. With a single replica, a sync changes no
    weights. Results are deterministic on the CPU. See docs/guide/embeddings.md.

    Args:
        bags: the bags to average. Create one ReplicaSync for them, before training and after
            loading saved states. A copy of the bags (copy.deepcopy, torch.save, AveragedModel) is
            not averaged.
        optimizer: the only optimizer of the bags' weight: torch.optim.SGD without momentum and
            weight decay, RowWiseAdagrad or MomentumScaledRowWiseAdagrad. A step hook collects the
            rows that have a gradient. A copy of the optimizer does not have the hook.
        every: number of steps between syncs.
        density: fraction of the entries of changed rows to send per sync, in (0, 1]. The largest
            entries are sent. 1: all entries, with a residual. None: all entries, with a residual
            only in quantized formats.
        format: a name or a torch dtype. "float32" sends whole rows if density is None. "bfloat16"
            sends rounded changes. "int8", "int4" and "ternary" send quantized changes.
        transport: the transport of sparse or quantized changes; see `DCTState`.

    Raises:
        ValueError, TypeError: an argument is out of range.
        ValueError: ranks of the mesh differ in a setting or optimizer type, or replicas differ in
            the state of a RowWiseAdagrad. Every rank raises.
        TypeError: momentum or weight decay was set later. The optimizer's step raises this error.
        RuntimeError: an argument is out of range on another rank.
    """

    @checks.names_keywords
    def __init__(
        self,
        bags: ShardedEmbeddingBags,
        *,
        optimizer: torch.optim.Optimizer,
        every: int = 1,
        density: float | None = None,
        format: str | torch.dtype = "float32",
        transport: str | None = None,
    ) -> None:
        with sharing_errors(_OP, *mesh_groups(getattr(bags, "mesh", None))):
            checks.require_type(_OP, "bags", bags, ShardedEmbeddingBags, "ShardedEmbeddingBags")
            checks.require_int(_OP, "every", every, 1, 2**63 - 1)
            format = require_format(_OP, "format", format, FORMATS)
            settings = Settings.checked(_OP, density, format, transport)
            compresses = density is not None or settings.every_entry
            if compresses:
                arg = "weight of bags, with a density or a quantized format,"
                checks.require_dtype(_OP, arg, bags.weight.dtype, (torch.float32,))
            _require_optimizer(optimizer, bags.weight)
            if bags in _averaged:  # the residual of the first one would be lost
                checks.fail(_OP, "bags", "one ReplicaSync only", "a second", verb="have")
        to_compare = {"every": every, "density": density, "format": settings.format}
        to_compare |= {"transport": transport, "optimizer": type(optimizer).__name__}
        of_shard = {}
        if isinstance(optimizer, RowWiseAdagrad):
            of_shard["state of optimizer"] = bit_sums(optimizer.state[bags.weight].values())
        require_same_in_mesh(_OP, bags.mesh, to_compare, of_shard)
        self._bags, self._optimizer, self._every = bags, optimizer, every
        group, weight = bags.mesh.get_group("replicate"), bags.weight.detach()
        self._average = Average(weight, group)
        if group.size() > 1 and (compresses or settings.format == "bfloat16"):
            self._average = changes = MeanOfChanges(weight, group, settings if compresses else None)
            changes.watch_loads(bags)
        self._steps = 0
        optimizer.register_step_pre_hook(self._before_step)
        _averaged.add(bags)

    def __reduce__(self) -> NoReturn:
        """Raise, because a copy or a pickle would average the bags of the original."""
        rule = "not be copied or pickled (make a new one for a copy of bags)"
        raise TypeError(f"dct::{_OP}: a ReplicaSync must {rule}, got a copy or a pickle")

    def step(self) -> None:
        """Sync in every `every`-th call. Call it after each step of the optimizer."""
        self._steps += 1
        if self._steps == self._every:
            self.sync()

    def sync(self) -> None:
        """Average the tables now. Every rank of the mesh must call this after the same step.

        Raises:
            ValueError: the first sync after a load, and replicas have loaded different weights.
            RuntimeError: a replica is missing, or a payload was damaged in this or an earlier call.
                Load a checkpoint.
        """
        self._sync(everything=False)

    def flush(self) -> None:
        """Sync all pending changes uncompressed."""
        self._sync(everything=True)

    @torch.no_grad()
    def _sync(self, everything: bool) -> None:
        if self._bags.loaded is not None:
            of_shard = {"weight of the loaded state": self._bags.loaded}
            require_same_in_mesh(_OP, self._bags.mesh, {}, of_shard)
            self._bags.loaded = None
        weight, optimizer = self._bags.weight, self._optimizer
        state = optimizer.to_average(weight) if isinstance(optimizer, RowWiseAdagrad) else None
        rows = self._average.sync(weight, state, everything)
        if isinstance(optimizer, RowWiseAdagrad):
            optimizer.averaged(weight, rows)
        self._steps = 0

    # Rows are not collected at a lookup, because a sync may come between the lookup and the step.
    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """A step pre-hook that collects the rows that the step will change.

        If there is a closure, returns new arguments with a closure that collects the rows.
        """
        _require_rule(optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._collect_rows()
            return None

        def closure_and_collect() -> Tensor:
            loss: Tensor = closure()
            self._collect_rows()
            return loss

        return args[:1], kwargs | {"closure": closure_and_collect}

    @torch.no_grad()
    def _collect_rows(self) -> None:
        weight, grad = self._bags.weight, self._bags.weight.grad
        if grad is not None:  # the indices of a sparse gradient, or the nonzero rows of a dense one
            rows = grad._indices()[0] if grad.is_sparse else grad.any(1).nonzero().squeeze(1)
            self._average.touched.add(rows.int(), weight)


def _require_optimizer(optimizer: torch.optim.Optimizer, weight: Tensor) -> None:
    _require_rule(optimizer)
    if not any(weight is p for group in optimizer.param_groups for p in group["params"]):
        checks.fail(_OP, "optimizer", "the weight of bags", "one without it", verb="train")


def _require_rule(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, RowWiseAdagrad):
        return
    got = checks.shown(optimizer)
    if isinstance(optimizer, torch.optim.SGD):
        # Momentum and weight decay also change rows without a gradient.
        found = [(n, g[n]) for g in optimizer.param_groups for n in ("momentum", "weight_decay")]
        if not any(value for _, value in found):
            return
        got += " with " + ", ".join(f"{name} {value}" for name, value in found if value)
    rule = "plain SGD, RowWiseAdagrad or MomentumScaledRowWiseAdagrad"
    checks.fail(_OP, "optimizer", rule, got, TypeError)
