"""Replicas of TorchRec's two-dimensional parallelism, averaged by compressed changes."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.model_parallel import DMPCollection

from dct_kernels import checks
from dct_parallel.collectives import dense_mean
from dct_parallel.exchange import checkpoint, quantized
from dct_parallel.exchange.bucket import Bucket, SegmentState
from dct_parallel.exchange.checkpoint import Flat
from dct_parallel.exchange.ledger import StepLedger
from dct_parallel.exchange.plan import plan_bucket
from dct_parallel.exchange.settings import Settings
from dct_parallel.formats import require_format

from ._torchrec import all_reduce_hook, contexts, uses_relay

_OP = "replica_sync"
_NAME = "weights"  # of the one segment of a bucket


@checks.names_keywords
def replica_sync(
    dmp: DMPCollection,
    *,
    density: float | None = None,
    format: str | torch.dtype = "bfloat16",
    transport: str | None = None,
) -> "ReplicaDeltas":
    """Let `dmp.sync()` average weights by compressed changes, and optimizer state as it is.

    DCT (arXiv 2010.08899) across replicas, our reconstruction: the largest changes since the last
    sync are sent, or all of them in few bits; the rest leaves the weights and stays in a residual
    (error feedback). After each sync replicas are bitwise equal. This call sets them, in place, to
    the weights of the first replica. Compression and the order of its sums are deterministic.

    A sync takes some passes over this rank's tables, and the host waits in it. Memory: two more
    copies of the tables in float32, the weights of the last sync and the residual. With one replica
    a sync changes nothing. Collective, on every rank, before training (docs/guide/torchrec.md).

    Args:
        dmp: sharding_strategy DEFAULT or PER_MODULE; gets an all-reduce hook for its `sync()`.
        density: fraction of the entries of this rank's tables to send, in (0, 1]; default 0.01, and
            1 in few bits.
        format: see `DCTState`.
        transport: see `DCTState`.

    Returns:
        A `ReplicaDeltas`, with `flush`, `state_dict` and `load_state_dict`.

    Raises:
        ValueError, TypeError: an argument is out of its range, weights are not float32, the slot of
            `custom_all_reduce` is taken, or `dmp` does not use it: use_sharded_relay,
            FULLY_SHARDED, and tables whose ids are hashed (MP-ZCH), which need a sum; the text
            names it. Or replicas differ in a setting; on all of them.

    >>> replicas = replica_sync(dmp, density=0.01)
    >>> dmp.sync()  # every few steps, as without
    >>> replicas.flush()  # before evaluation: nothing is pending
    """
    checks.require_type(_OP, "dmp", dmp, DMPCollection, "a DMPCollection")
    format = require_format(_OP, "format", format, quantized.FORMATS)
    if density is None and format not in quantized.QUANTIZED_FORMATS:
        density = 0.01
    settings = Settings.checked(_OP, density, format, transport)
    _require_hook(dmp)
    deltas = ReplicaDeltas(dmp, settings)
    dmp.set_all_reduce_hook(deltas)
    return deltas


class ReplicaDeltas:
    """The all-reduce hook that `replica_sync` gives to a DMPCollection. Not made directly.

    DMPCollection calls it with tensors of one kind. It goes into torch.distributed.checkpoint
    beside the model, at the same number of ranks. Save right after `dmp.sync()`: TorchRec's
    checkpoint has the weights of one replica, and between two syncs the others differ.

    Every method raises a RuntimeError once a payload was damaged, which names the replica's rank:
    load a checkpoint into a new model then.
    """

    def __init__(self, dmp: DMPCollection, settings: Settings) -> None:
        self._weights: dict[tuple[int, ...], _Weights] = {}
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}  # of optimizer state
        for ctx in contexts(dmp):
            for tensors in ctx.weights_by_dtype.values():
                weights = _Weights(tensors, ctx.replica_pg, settings)
                self._weights[_key(tensors)] = weights
            for tensors in ctx.optimizer_tensors_by_dtype.values():
                self._groups[_key(tensors)] = ctx.replica_pg

    @torch.no_grad()
    def __call__(self, *arguments: Any) -> None:
        """Average in place; `arguments` end with the tensors. TorchRec 1.9 gives a group before.

        Raises:
            ValueError: the tensors are not those that `dmp` had when this was made.
            RuntimeError: a replica is gone, or its payload was damaged.
        """
        self._require_intact()
        tensors, key = arguments[-1], _key(arguments[-1])
        if key in self._weights:
            self._weights[key].sync(everything=False)
        elif key in self._groups:
            for tensor in tensors:
                tensor.copy_(dense_mean(tensor, tensor.dtype, self._groups[key]))
        else:
            checks.fail(_OP, "tensors", "those of dmp when this was made", "different ones")

    @torch.no_grad()
    def flush(self) -> None:
        """A sync that sends all changes in float32, so that nothing is pending."""
        self._require_intact()
        for weights in self._weights.values():
            weights.sync(everything=True)

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and syncs, by its number. Copies, on the CPU."""
        self._require_intact()
        own = {str(i): weights.state() for i, weights in enumerate(self._weights.values())}
        return {"ranks": {str(dist.get_rank()): own}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from this rank's own `state_dict()`, once the weights of the model are loaded.

        Bit for bit. Replicas compare what they loaded in the next sync.

        Raises:
            ValueError, TypeError: it is of a different rank, different tables, or a different
                number of replicas or transport, or damaged; nothing has changed then.
        """
        self._require_intact()
        rank = str(dist.get_rank())
        parts = {str(i): weights for i, weights in enumerate(self._weights.values())}
        by_name = checkpoint.BY_NAME
        own = checkpoint.checked(_OP, state, {"ranks": by_name})["ranks"].get(rank)
        saved = checkpoint.checked(_OP, own, dict.fromkeys(parts, by_name), f" of rank {rank}")
        sound = {weights: weights.checked(saved[key]) for key, weights in parts.items()}
        for weights, found in sound.items():
            weights.restart(*found)

    def _require_intact(self) -> None:
        for weights in self._weights.values():
            weights.ledger.require_intact()


class _Weights:
    """This rank's shards of one dtype, averaged with their replicas.

    Args:
        tensors: float32, of one sync, always the same.
        group: of the replicas.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        group: dist.ProcessGroup,
        settings: Settings,
    ) -> None:
        self._tensors, self._group = [tensor.detach() for tensor in tensors], group
        for tensor in self._tensors:
            checks.require_dtype(_OP, "weights of dmp", tensor.dtype, (torch.float32,))
        numel, ranks = sum(tensor.numel() for tensor in self._tensors), group.size()
        self._plan = plan_bucket([_NAME], [numel], settings, ranks)
        self._saved_as = Flat(numel)
        self._layout = f"{numel} elements by {self._plan.transport} between {ranks} replicas"
        told, device = {"layout": self._layout}, self._tensors[0].device
        self.ledger = StepLedger(_OP, group, device, settings, told, step_name="sync")
        for tensor in self._tensors:
            dist.broadcast(tensor, group=group, group_src=0)
        self._go_on_from({})

    def _go_on_from(self, states: dict[str, SegmentState]) -> None:
        self._base = self._flat()
        self._bucket = Bucket(self._plan, self._group, self._base.device, self.ledger.step, states)

    def sync(self, everything: bool) -> None:
        """Set the weights to the base plus the mean of all messages."""
        if self._group.size() == 1:
            return
        mean = self._flat() - self._base
        if everything:
            self.ledger.compare(_OP)  # after a load
            self._bucket.add_pending(mean)
            mean = dense_mean(mean, mean.dtype, self._group)
            torch._foreach_zero_(self._bucket.residuals())
        else:
            self.ledger.begin(_OP)
            self.ledger.sent[0] = self._bucket
            self._bucket.reduce(mean)
            self.ledger.finish()
        self._base += mean
        parts = self._base.split([tensor.numel() for tensor in self._tensors])
        for tensor, part in zip(self._tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))

    def state(self) -> dict[str, Any]:
        told = {"layout": self._layout, "run_id": self.ledger.run_id, "step": self.ledger.step}
        return told | self._saved_as.saved(self._bucket.states()[_NAME])

    def checked(self, saved: object) -> tuple[dict[str, Any], SegmentState]:
        """The contents of a `state`; raises unless it is sound, of these tables and replicas."""
        layout = checkpoint.Field(self._layout, lambda found: found == self._layout)
        table = {"layout": layout, "run_id": checkpoint.TEXT, "step": checkpoint.integer(0)}
        numbers = checkpoint.checked(_OP, saved, table)
        return numbers, self._saved_as.state(_OP, saved, numbers)

    def restart(self, numbers: Mapping[str, Any], state: SegmentState) -> None:
        """From the weights as they are, and a checked `state`."""
        self.ledger.load({**numbers, "world_size": self._group.size()})
        self._go_on_from({_NAME: state})

    def _flat(self) -> Tensor:
        return torch.cat([tensor.flatten() for tensor in self._tensors])


def _key(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(map(id, tensors))


def _require_hook(dmp: DMPCollection) -> None:
    """Raise unless `dmp.sync()` would call a hook, and has none yet."""
    if (taken := all_reduce_hook(dmp)) is not None:
        got = getattr(taken, "__qualname__", type(taken).__name__)
        checks.fail(_OP, "dmp", "one without custom_all_reduce", got)
    if uses_relay(dmp):
        checks.fail(_OP, "use_sharded_relay", "False: it averages past any hook", True)
    for ctx in contexts(dmp):
        if ctx.sharding_strategy.name == "FULLY_SHARDED":
            rule = "DEFAULT or PER_MODULE, because only they call a hook"
            checks.fail(_OP, "sharding_strategy", rule, ctx.sharding_strategy.name)
        if ctx.hash_zch_modules:
            names = ", ".join(table for _, table in ctx.hash_zch_modules)
            rule = "without hashed ids (MP-ZCH), whose sync needs a sum instead of a mean"
            checks.fail(_OP, "tables", rule, names)
