"""Averages replicas of TorchRec's two-dimensional parallelism with compression."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
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
from dct_parallel.groups import Agreement
from dct_parallel.load_hooks import LoadWatcher

from ._torchrec import all_reduce_hook, contexts, uses_relay

_OP = "replica_sync"
_NAME = "weights"  # the name of a bucket's only segment


@checks.names_keywords
def replica_sync(
    dmp: DMPCollection,
    *,
    density: float | None = None,
    format: str | torch.dtype = "bfloat16",
    transport: str | None = None,
) -> "ReplicaDeltas":
    """Compress the weight changes that `dmp.sync()` averages over replicas.

    A sync sends the largest changes since the last sync, or all changes in a quantized format.
    Unsent changes are removed from the weights and kept in a residual (error feedback). Optimizer
    states are averaged uncompressed. After each sync, replicas are bitwise equal. `replica_sync`
    copies the first replica's weights to all replicas in place. Compression and the order of its
    sums are deterministic. With one replica a sync changes nothing.

    A sync takes a few passes over this rank's tables, and the host waits for it. Memory: two
    additional copies of the tables in float32, the weights of the last sync and the residual.
    Collective: call it on every rank before training. See docs/guide/torchrec.md. Source: this
    project, with the compression of DCT (arXiv 2010.08899).

    Args:
        dmp: a DMPCollection with sharding_strategy DEFAULT or PER_MODULE. This call sets
            the all-reduce hook that `dmp.sync()` uses.
        density: fraction of the entries of this rank's tables to send, in (0, 1]; default 0.01, or
            1 with quantized formats.
        format, transport: see `DCTState`.

    Returns:
        A `ReplicaDeltas`, with `flush`, `state_dict` and `load_state_dict`.

    Raises:
        ValueError, TypeError: an argument is out of range, weights are not float32,
            `custom_all_reduce` is already set, or `dmp` calls no hook (use_sharded_relay,
            FULLY_SHARDED, tables with hashed ids). All replicas raise if a setting differs.

    >>> replicas = replica_sync(dmp, density=0.01)
    >>> dmp.sync()  # every few steps, as before
    >>> replicas.flush()  # before evaluation, so that nothing is pending
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
    """The all-reduce hook that `replica_sync` creates for a DMPCollection.

    Save it with the model in torch.distributed.checkpoint, and load it with the same number of
    ranks. Save directly after `dmp.sync()`: TorchRec's checkpoint contains the weights of one
    replica, and replicas differ between syncs.

    After `load_state_dict` of `dmp`, on every rank, the next sync sends only the changes after the
    load.

    After a damaged payload, every method raises a RuntimeError with the rank of the sender. Then
    load a checkpoint into a new model.
    """

    def __init__(self, dmp: DMPCollection, settings: Settings) -> None:
        self._weights: dict[tuple[int, ...], _Weights] = {}
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}  # for optimizer states
        for ctx in contexts(dmp):
            for tensors in ctx.weights_by_dtype.values():
                weights = _Weights(tensors, ctx.replica_pg, settings)
                weights.watch_loads(dmp)
                self._weights[_key(tensors)] = weights
            for tensors in ctx.optimizer_tensors_by_dtype.values():
                self._groups[_key(tensors)] = ctx.replica_pg

    @torch.no_grad()
    def __call__(self, *arguments: Any) -> None:
        """Average the tensors in the last argument in place. TorchRec 1.9 passes a group before it.

        Raises:
            ValueError: the tensors differ from those of `dmp` when this hook was created.
            RuntimeError: a replica is gone, or its payload was damaged.
        """
        self._read_results()
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
        """Sync all changes in float32, so that nothing is pending."""
        self._read_results()
        for weights in self._weights.values():
            weights.sync(everything=True)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals and number of syncs, as copies on the CPU."""
        self._read_results()
        entry = {str(i): weights.state() for i, weights in enumerate(self._weights.values())}
        return {"ranks": {str(dist.get_rank()): entry}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from this rank's `state_dict()`, bit for bit, after loading the model's weights.

        In the next sync, replicas compare the states that they have loaded.

        Raises:
            ValueError, TypeError: the state is damaged, or it is for a different rank, different
                tables, or a different number of replicas or transport. Nothing has changed.
        """
        self._read_results()
        rank = str(dist.get_rank())
        parts = {str(i): weights for i, weights in enumerate(self._weights.values())}
        by_name = checkpoint.BY_NAME
        entry = checkpoint.checked(_OP, state, {"ranks": by_name})["ranks"].get(rank)
        saved = checkpoint.checked(_OP, entry, dict.fromkeys(parts, by_name), f" of rank {rank}")
        found = {weights: weights.checked(saved[key]) for key, weights in parts.items()}
        for weights, state_of_weights in found.items():
            weights.resume(*state_of_weights)

    def _read_results(self) -> None:
        for weights in self._weights.values():
            weights.ledger.read()


class _Weights(LoadWatcher):
    """This rank's shards of one dtype, which are averaged with their replicas.

    Args:
        tensors: the float32 tensors of a sync, the same in every sync.
        group: the process group of the replicas.
    """

    def __init__(
        self, tensors: Sequence[Tensor], group: dist.ProcessGroup, settings: Settings
    ) -> None:
        self._tensors, self._group = [tensor.detach() for tensor in tensors], group
        for tensor in self._tensors:
            checks.require_dtype(_OP, "weights of dmp", tensor.dtype, (torch.float32,))
        numel, ranks = sum(tensor.numel() for tensor in self._tensors), group.size()
        self._plan = plan_bucket([_NAME], [numel], settings, ranks)
        self._saved_as = Flat(numel)
        self._layout = f"{numel} elements by {self._plan.transport} between {ranks} replicas"
        values = {"layout": self._layout, **settings.to_compare()}
        self._agreement = Agreement(_OP, group, self._tensors[0].device, values)
        self.ledger = StepLedger(_OP, unit="sync")
        for tensor in self._tensors:
            dist.broadcast(tensor, group=group, group_src=0)
        self._reset({})

    def _reset(self, states: dict[str, SegmentState]) -> None:
        self._base, self._loaded = self._flat(), False  # whether a part of the base was loaded
        self._bucket = Bucket(self._plan, self._group, self._base.device, self.ledger.step, states)

    @torch.no_grad()
    def after_load(self, parameter: Parameter) -> None:
        """Continue from a table that was loaded, without its changes before."""
        first, low = parameter.data_ptr(), 0
        for tensor in self._tensors:
            high = low + tensor.numel()
            if first <= tensor.data_ptr() < first + parameter.nbytes:  # the same memory
                self._base[low:high] = tensor.flatten()
                self._bucket.drop_range(low, high)
                self._loaded = True
            low = high

    def sync(self, everything: bool) -> None:
        """Set the weights to those of the last sync plus the mean of all replicas' messages."""
        if self._group.size() == 1:
            return
        if self._loaded:
            self._agreement.resume(self.ledger.step, base=[self._base])
            self._loaded = False
        self._agreement.check(_OP)  # after a load, replicas compare their states
        mean = self._flat() - self._base
        if everything:
            self._bucket.add_pending(mean)
            mean = dense_mean(mean, mean.dtype, self._group)
            torch._foreach_zero_(self._bucket.residuals())
        else:
            self.ledger.begin()
            self.ledger.record("bucket 0", self._bucket)
            self._bucket.reduce(mean)
            self.ledger.finish()
        self._base += mean
        parts = self._base.split([tensor.numel() for tensor in self._tensors])
        for tensor, part in zip(self._tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))

    def state(self) -> dict[str, Any]:
        numbers = {"layout": self._layout, "run_id": self._agreement.run_id}
        saved = self._saved_as.saved(self._bucket.states()[_NAME])
        return {**numbers, "step": self.ledger.step, **saved}

    def checked(self, saved: object) -> tuple[dict[str, Any], SegmentState]:
        """Return the contents of `saved`. Raise unless they match these tables and replicas."""
        layout = checkpoint.Field(self._layout, lambda found: found == self._layout)
        table = {"layout": layout, "run_id": checkpoint.TEXT, "step": checkpoint.integer(0)}
        numbers = checkpoint.checked(_OP, saved, table)
        return numbers, self._saved_as.state(_OP, saved, numbers)

    def resume(self, numbers: Mapping[str, Any], state: SegmentState) -> None:
        """Resume from the current weights and the results of `checked`."""
        self.ledger.restart(numbers["step"])
        self._reset({_NAME: state})
        entry = {**numbers, "world_size": self._group.size()}
        self._agreement.resume(numbers["step"], entry, [self._base])

    def _flat(self) -> Tensor:
        return torch.cat([tensor.flatten() for tensor in self._tensors])


def _key(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(map(id, tensors))


def _require_hook(dmp: DMPCollection) -> None:
    """Raise if `dmp.sync()` does not support an all-reduce hook, or if one is already set."""
    if (hook := all_reduce_hook(dmp)) is not None:
        got = getattr(hook, "__qualname__", type(hook).__name__)
        checks.fail(_OP, "dmp", "one without custom_all_reduce", got)
    if uses_relay(dmp):
        checks.fail(_OP, "use_sharded_relay", "False, because it bypasses hooks", True)
    for ctx in contexts(dmp):
        if ctx.sharding_strategy.name == "FULLY_SHARDED":
            rule = "DEFAULT or PER_MODULE, because only they call a hook"
            checks.fail(_OP, "sharding_strategy", rule, ctx.sharding_strategy.name)
        if ctx.hash_zch_modules:
            names = ", ".join(table for _, table in ctx.hash_zch_modules)
            rule = "without hashed ids (MP-ZCH), whose sync needs a sum instead of a mean"
            checks.fail(_OP, "tables", rule, names)
