"""Replicas of TorchRec's two-dimensional parallelism, averaged by thresholded deltas."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.model_parallel import DMPCollection

from dct_kernels import checks
from dct_parallel.collectives import all_gather, dense_mean
from dct_parallel.compressor import Compressor

_OP = "replica_sync"


def replica_sync(dmp: DMPCollection, density: float = 0.01) -> "ReplicaDeltas":
    """Let `dmp.sync()` average weights by their largest changes, and optimizer state as it is.

    DCT (arXiv 2010.08899) across replicas, our reconstruction: the largest changes since the last
    sync are sent, as bfloat16; the rest leaves the weights and stays in a residual (error
    feedback). After each sync replicas are bitwise equal. This call sets them, in place, to the
    weights of the first replica. Compression and the order of its sums are deterministic.

    A sync takes some passes over this rank's tables, and the host waits in it. Memory: two more
    copies of the tables in float32, the weights of the last sync and the residual. With one replica
    a sync changes nothing. Collective, on every rank, before training.

    Args:
        dmp: sharding_strategy DEFAULT or PER_MODULE; gets an all-reduce hook for its `sync()`.
        density: fraction of each table's entries (of this rank's shard) to send, in (0, 1].

    Returns:
        A `ReplicaDeltas`, with `flush`, `state_dict` and `load_state_dict`.

    Raises:
        ValueError, TypeError: an argument is out of its range, weights are not float32, the slot of
            `custom_all_reduce` is taken, or `dmp` does not use it: use_sharded_relay,
            FULLY_SHARDED, and tables whose ids are hashed (MP-ZCH), which need a sum; the text
            names it.

    >>> replicas = replica_sync(dmp, density=0.01)
    >>> dmp.sync()  # every few steps, as without
    >>> replicas.flush()  # before evaluation: nothing is pending
    """
    checks.require_type(_OP, "dmp", dmp, DMPCollection, "a DMPCollection")
    checks.require_density(_OP, density)
    _require_hook(dmp)
    deltas = ReplicaDeltas(dmp, density)
    dmp.set_all_reduce_hook(deltas)
    return deltas


class ReplicaDeltas:
    """The all-reduce hook that `replica_sync` gives to a DMPCollection. Not made directly.

    DMPCollection calls it with tensors of one kind. It goes into torch.distributed.checkpoint
    beside the model, at the same number of ranks. Save right after `dmp.sync()`: TorchRec's
    checkpoint has the weights of one replica, and between two syncs the others differ.
    """

    def __init__(self, dmp: DMPCollection, density: float) -> None:
        self._weights: dict[tuple[int, ...], _Weights] = {}
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}  # of optimizer state
        for ctx in dmp._ctxs:
            for tensors in ctx.weights_by_dtype.values():
                self._weights[_key(tensors)] = _Weights(tensors, ctx.replica_pg, density)
            for tensors in ctx.optimizer_tensors_by_dtype.values():
                self._groups[_key(tensors)] = ctx.replica_pg

    @torch.no_grad()
    def __call__(self, *arguments: Any) -> None:
        """Average in place; `arguments` end with the tensors. TorchRec 1.9 gives a group before.

        Raises:
            ValueError: the tensors are not those that `dmp` had when this was made.
            RuntimeError: a replica is gone, or its payload was damaged. Load a checkpoint then.
        """
        tensors = arguments[-1]
        key = _key(tensors)
        if key in self._weights:
            self._weights[key].sync(everything=False)
        elif key in self._groups:
            for tensor in tensors:
                tensor.copy_(dense_mean(tensor, tensor.dtype, self._groups[key]))
        else:
            checks.fail(
                _OP, "tensors", "the ones that dmp had when this was made", "different ones"
            )

    @torch.no_grad()
    def flush(self) -> None:
        """A sync that sends all changes in float32, so that nothing is pending."""
        for weights in self._weights.values():
            weights.sync(everything=True)

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals, by its number; not copied."""
        residuals = {str(i): weights.residual for i, weights in enumerate(self._weights.values())}
        return {"ranks": {str(dist.get_rank()): residuals}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from this rank's own `state_dict()`, once the weights of the model are loaded.

        Raises:
            ValueError: it is of a different rank or different tables; nothing has changed then.
        """
        rank = str(dist.get_rank())
        here, saved = self.state_dict()["ranks"][rank], state["ranks"].get(rank, {})
        sizes, got = ({key: len(t) for key, t in of.items()} for of in (here, saved))
        if sizes != got:
            checks.fail(
                _OP, "state", f"rank {rank}'s, with residuals of {sizes}", got or "another's"
            )
        for key, weights in zip(here, self._weights.values(), strict=True):
            weights.restart(saved[key])


class _Weights:
    """This rank's shards of one dtype, averaged with their replicas.

    Args:
        tensors: float32, of one sync, always the same.
        group: of the replicas.
    """

    def __init__(self, tensors: Sequence[Tensor], group: dist.ProcessGroup, density: float) -> None:
        self._tensors, self._group = [tensor.detach() for tensor in tensors], group
        for tensor in self._tensors:
            checks.require_dtype(_OP, "weights of dmp", tensor.dtype, (torch.float32,))
            dist.broadcast(tensor, group=group, group_src=0)
        self._base = self._flat()
        bounds = list(accumulate((tensor.numel() for tensor in self._tensors), initial=0))
        device = self._base.device
        self._compressor = Compressor(len(self._base), bounds, density, device=device)

    def sync(self, everything: bool) -> None:
        """Set the weights to the base plus the mean of all messages."""
        if self._group.size() == 1:
            return
        delta = self._flat() - self._base
        if everything:
            delta += self.residual
            mean = dense_mean(delta, delta.dtype, self._group)
            self.residual.zero_()
        else:
            mean = self._mean_of_largest(delta)
        self._base += mean
        parts = self._base.split([tensor.numel() for tensor in self._tensors])
        for tensor, part in zip(self._tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))

    @property
    def residual(self) -> Tensor:
        return self._compressor.residual

    def restart(self, residual: Tensor) -> None:
        """From the weights as they are, and this residual."""
        self._base = self._flat()
        self.residual.copy_(residual)

    def _mean_of_largest(self, delta: Tensor) -> Tensor:
        payload = self._compressor.pack(delta)
        payloads = payload.new_empty(self._group.size(), len(payload))
        all_gather(payloads, payload, self._group)
        mean = torch.empty_like(delta)
        status = self._compressor.unpack(payloads, mean).tolist()
        if damaged := {replica: code for replica, code in enumerate(status) if code}:
            got = f"status {damaged} by replica: go back to a checkpoint"
            checks.fail(_OP, "every payload", "intact", got, RuntimeError)
        return mean

    def _flat(self) -> Tensor:
        return torch.cat([tensor.flatten() for tensor in self._tensors])


def _key(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(map(id, tensors))


def _require_hook(dmp: DMPCollection) -> None:
    """Raise unless `dmp.sync()` would call a hook, and has none yet."""
    taken = getattr(dmp, "_custom_all_reduce", None) or getattr(dmp, "_all_reduce_hook", None)
    if taken is not None:
        got = getattr(taken, "__qualname__", type(taken).__name__)
        checks.fail(_OP, "dmp", "one without custom_all_reduce", got)
    if getattr(dmp, "_use_sharded_relay", False):
        checks.fail(_OP, "use_sharded_relay", "False: it averages past any hook", True)
    for ctx in dmp._ctxs:
        if ctx.sharding_strategy.name == "FULLY_SHARDED":
            rule = "DEFAULT or PER_MODULE, because only they call a hook"
            checks.fail(_OP, "sharding_strategy", rule, ctx.sharding_strategy.name)
        if ctx.hash_zch_modules:
            names = ", ".join(table for _, table in ctx.hash_zch_modules)
            rule = "without hashed ids (MP-ZCH), whose sync needs a sum instead of a mean"
            checks.fail(_OP, "tables", rule, names)
