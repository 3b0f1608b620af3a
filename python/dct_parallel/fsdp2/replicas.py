"""dct_fully_shard_hook: averages the gradients of FSDP2 shards between replicas in every step.

FSDP reduces each module's gradient over the ranks that share the model's shards, and calls the hook
with the gradient of this rank's shard. The hook averages this gradient over the ranks that hold the
same shard in other replicas. The host reads the results of a step at the end of the next step.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh

from dct_kernels import checks

from .. import groups
from .._torch import NO_PASS, after_backward, backward_pass, fsdp_hook, fsdp_in_backward, span
from ..collectives import dense_mean
from ..exchange.bucket import Bucket, SegmentState, parameter_stats
from ..exchange.checkpoint import Entry, Run, Sharded, States, changeable
from ..exchange.ledger import StepLedger
from ..exchange.optimizers import LossScale, OptimizerChecks, Optimizers, loss_scale_of
from ..exchange.plan import describe, keeps_owners, log_plan, plan_bucket, plan_table
from ..exchange.settings import Settings
from ..mesh import require_mesh

if TYPE_CHECKING:
    from .units import Piece, Unit

OP = "dct_fully_shard_hook"  # in errors


@checks.names_keywords
def dct_fully_shard_hook(
    model: nn.Module,
    *,
    density: float | None = None,
    format: str | torch.dtype | None = None,
    transport: str | None = None,
    mesh: DeviceMesh,
    grad_scaler: GradScaler | None = None,
    optimizer: Optimizers | None = None,
    start_step: int = 2,
    refresh_every: int = 1,
) -> "FullyShardState":
    """Average the gradients of FSDP2 shards over replicas with compression (hybrid sharding).

        mesh = init_device_mesh("cuda", (nodes, 8), mesh_dim_names=("replicate", "shard"))
        for block in model.blocks:
            fully_shard(block, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        state = dct_fully_shard_hook(model, mesh=mesh, format="int4")  # AdamW

    Call it on every rank, after moving the model to its device and applying `fully_shard` to all
    modules on the shard dimension only. FSDP reduces gradients densely over the shard dimension.
    Then the hook averages each rank's shards over the replicate dimension like `DCTState` (arXiv
    2010.08899), with one message per wrapped module. With AdamW pass `format="int4"`, and with SGD
    a `density`. The mean is bitwise the same on every replica, and overwrites FSDP's reduced
    gradients. Replicas must be equal at the start, because FSDP does not broadcast parameters. Save
    the state's `state_dict()` in the checkpoint. Memory: see docs/guide/fsdp2.md.

    Args:
        model: a module. All its trainable parameters are in units of `fully_shard`.
        density: fraction of each rank's shard of a module to send per step; see `DCTState`.
        transport: the transport between replicas; see `DCTState`.
        mesh: a mesh of all ranks with dimensions "replicate" and "shard".
        format, grad_scaler, optimizer, start_step, refresh_every: see `DCTState`.

    Returns:
        The state: `plan`, `stats`, `parameter_stats`, `state_dict`, `load_state_dict`, `close`.

    Raises:
        ValueError, TypeError: an argument is out of range, ranks differ, or a module has several
            parameter groups or is wrapped differently (with a mesh of two dimensions, torch itself
            averages over replicas).
        RuntimeError: another rank raised an error, or did not call this in time.
    """
    from .units import units_of  # FSDP2 takes a second to import

    with groups.sharing_errors(OP, groups.require_group(OP, None)):
        settings = Settings.checked(OP, density, format, transport, refresh_every)
        checks.require_int(OP, "start_step", start_step, 0, 2**63 - 1)
        require_mesh(OP, mesh, ("replicate", "shard"))
        if mesh.size() != dist.get_world_size():
            checks.fail(OP, "mesh", f"all {dist.get_world_size()} ranks", mesh.size(), verb="have")
        units = _pieces_by_unit(model, units_of(OP, model), mesh)
        parameters = [piece.parameter for pieces in units.values() for piece in pieces]
        loss_scale = loss_scale_of(OP, grad_scaler, optimizer, parameters)
        for unit in units:
            if fsdp_hook(unit.group) not in (None, _closed):
                rule = f"no all-reduce hook on module {unit.name}"
                checks.fail(OP, "model", rule, "one", verb="have")
    return FullyShardState(units, mesh, settings, loss_scale, start_step)


def _pieces_by_unit(
    model: nn.Module, units: "list[Unit]", mesh: DeviceMesh
) -> "dict[Unit, tuple[Piece, ...]]":
    """Check the units. Return the pieces of units with parameters that require grad."""
    found = {unit: pieces for unit in units if (pieces := unit.pieces(mesh))}
    covered = {piece.parameter for pieces in found.values() for piece in pieces}
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if loose := [name for name, p in trained if p not in covered]:
        checks.fail(OP, "every parameter", "sharded by fully_shard", ", ".join(loose))
    if not found:
        checks.fail(OP, "model", "parameters that require grad", "none", verb="have")
    return found


def _closed(flat: Tensor) -> None:
    """The all-reduce hook of a closed state. Without it, replicas would diverge silently."""
    raise RuntimeError(f"dct::{OP}: state must be open, got a closed one")


class FullyShardState:
    """The state that `dct_fully_shard_hook` returns: residuals and process groups.

    After this rank has received a damaged payload, or an exchange has failed, every method raises a
    RuntimeError. Then load a checkpoint into a new state.
    """

    def __init__(
        self,
        units: "dict[Unit, tuple[Piece, ...]]",
        mesh: DeviceMesh,
        settings: Settings,
        loss_scale: LossScale | None,
        start_step: int,
    ) -> None:
        self.settings, self.start_step = settings, start_step
        self._units, self._pieces = list(units), list(units.values())
        self._device = self._units[0].device
        self._replica = mesh.get_local_rank("replicate")
        self._group = mesh["replicate"].get_group()
        self._shards = mesh["shard"].size()
        self._open, self._in_step = True, False
        self._pass = NO_PASS  # the backward pass that has a callback queued for its end
        # A unit, its pieces and its bucket have the same number. _order: the numbers of the units
        # of this step, in the order of their exchanges. _require_same: raises an error if the order
        # of the last step differs between ranks.
        self._order: list[int] = []
        self._require_same: Callable[[], None] | None = None

        world = groups.require_group(OP, None)
        names = {piece.parameter: piece.name for pieces in self._pieces for piece in pieces}
        values = {"model": describe(names), "modules": ", ".join(unit.name for unit in units)}
        values |= {"mesh": str(mesh.mesh.tolist()), **settings.to_compare()}
        values |= {"start_step": str(start_step), "grad_scaler": "given" if loss_scale else "none"}
        self._agreement = groups.Agreement(OP, world, self._device, values)
        self._optimizers = OptimizerChecks(OP, names, settings.density, loss_scale)
        self._ledger = StepLedger(OP, start_step, loss_scale, self._optimizers)
        timeout = groups.timeout_of(world, self._device)
        self._after_step = groups.separate_group(world, self._agreement.run_id, timeout)
        self._end_group = groups.destroyer(self, self._after_step)
        self._buckets = [self._bucket(pieces, 0, {}) for pieces in self._pieces]
        for index, unit in enumerate(self._units):
            unit.module.set_all_reduce_hook(partial(self._reduce, index))

    def _bucket(self, pieces: "tuple[Piece, ...]", packed: int, states: States) -> Bucket:
        names, sizes = [piece.name for piece in pieces], [piece.local.numel() for piece in pieces]
        numel = sum(piece.padded for piece in pieces)  # so that all shards have one transport
        plan = plan_bucket(names, sizes, self.settings, self._group.size(), numel)
        log_plan(OP, plan, self._device)
        return Bucket(plan, self._group, self._device, packed, states)

    @property
    def step(self) -> int:
        """The number of steps taken."""
        return self._ledger.step

    def close(self) -> None:
        """Destroy the process group of this state. The hooks raise afterwards. Idempotent.

        The state is closed even if this method raises an error.
        """
        if self._open:
            self._open = False
            for unit in self._units:
                unit.module.set_all_reduce_hook(_closed)
            self._end_group()
            self._optimizers.close()
        self._ledger.finish()

    def plan(self) -> str:
        """Return a table of the bytes per rank and module in a compressed step.

        A bucket is a module that fully_shard was applied to. Sizes are for this rank's shards.
        """
        self._ledger.read()
        return plan_table([bucket.plan for bucket in self._buckets], self._device)

    def stats(self) -> dict[str, float | int | None]:
        """Return means over the last 100 steps, and the bytes per step; see `DCTState.stats`.

        `wire_bytes` counts the bytes that this rank sends to other replicas in a compressed step.
        It excludes FSDP's messages inside a shard group, and the 16 bytes per step (and on the CPU
        also per module) that all ranks reduce to compare the order of modules.
        """
        self._ledger.finish()
        return self._ledger.stats([bucket.plan for bucket in self._buckets])

    def parameter_stats(self) -> dict[str, dict[str, float]]:
        """Return {parameter: figures of the last step}; see `DCTState.parameter_stats`."""
        self._ledger.finish()
        return parameter_stats(self._buckets)

    def take_back(self) -> None:
        """Return the entries of the last step to the residuals, for a step that is not applied.

        See `DCTState.take_back`. The call is collective over all ranks of the mesh. If several
        backward passes were exchanged, only the last one is taken back.

        Raises:
            ValueError: ranks have taken different steps.
            RuntimeError: a rank did not call this method within the timeout of the process group.
        """
        self._ledger.read()
        self._agreement.check_step("take_back", self.step)
        self._finish_last_step()
        self._ledger.take_back()

    def state_dict(self) -> dict[str, Any]:
        """Return copies of this rank's shard of the residuals, by replica and parameter name.

        Call it on every rank between steps, after the optimizer's step and the scaler's update. The
        tensors are DTensors that are sharded like the parameters. Use torch.distributed.checkpoint,
        which takes the state itself as {"dct": state}, or torch.save with one file per rank.
        """
        self._finish_last_step()
        owners = keeps_owners(self.settings, self._group.size())
        states = {name: s for bucket in self._buckets for name, s in bucket.states().items()}
        for name, state in states.items():
            if owners and state.owner is None:
                states[name] = SegmentState(state.residual, torch.zeros_like(state.residual))
        sizes = {"world_size": self._group.size() * self._shards, "shards": self._shards}
        return self._run().save(states, self._agreement.run_id, self.step, **sizes)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume each replica from its own `state_dict`. Call it on every rank before any step.

        torch.distributed.checkpoint reshards residuals from any number of shards. In the next step,
        ranks compare their run and step. If this call raises an error, the state is unchanged.

        Raises:
            ValueError: the dict has a different version, density, number of replicas, replica,
                shard or model; or a value is missing, not finite, or has a wrong type or shape.
            TypeError: `state` is not a state dict.
        """
        self._ledger.read()
        self._resume(*self._run().find(state))

    def load_merged(self, folder: str | os.PathLike[str], key: str = "dct") -> None:
        """Resume from states of any number of replicas and shards, and of either transport.

        Every replica starts from the mean of the saved residuals, plus the residuals of the owners.
        So the pending updates of the model are unchanged, except for float32 rounding. Call it on
        every rank. It reads one replica's shard at a time. Source: this project.

        Args:
            folder: written by `torch.distributed.checkpoint`. Loading unpickles files, so read only
                folders that you trust.
            key: the name of the state in the folder, as in {"dct": state}; dots separate nested
                keys.

        Raises:
            ValueError: the state or a replica is missing. See also `load_state_dict`.
            RuntimeError: another rank raised an error. Nothing has changed on any rank.
        """
        self._ledger.read()
        world = groups.require_group("load_merged", None)
        timeout = groups.timeout_of(world, self._device)
        self._resume(*self._run().find_mean(folder, key, world, timeout))

    def _run(self) -> Run:
        """The description of this run in checkpoints."""
        same = {
            "density": self.settings.density,
            "replicas": self._group.size(),
            "reduction": ", ".join(dict.fromkeys(unit.reduction for unit in self._units)),
        }
        parameters = {
            piece.name: Sharded(piece, bucket.codec.step)
            for bucket, pieces in zip(self._buckets, self._pieces, strict=True)
            for piece in pieces
        }
        others = changeable(self.settings, self._group.size(), start_step=self.start_step)
        return Run("replica", self._replica, others, same, parameters)

    def _resume(self, entry: Entry, states: States) -> None:
        self._run().report_changes(entry)
        self._agreement.resume(entry["step"], entry)
        self._ledger.restart(entry["step"])
        self._in_step, self._order, self._require_same = False, [], None
        for index, pieces in enumerate(self._pieces):
            selected = {piece.name: states[piece.name] for piece in pieces}
            packed = max(entry["parameters"][name]["packed"] for name in selected)
            self._buckets[index] = self._bucket(pieces, packed, selected)

    # The methods below begin, perform and end a step.

    def _reduce(self, index: int, flat: Tensor) -> None:
        """Replace the gradient of a unit's shard by its mean over replicas."""
        self._require(index, flat)
        if not self._in_step or index in self._order:
            self._begin_step()
        if not flat.is_cuda:  # gloo aborts the process if messages of two ranks differ in size
            groups.require_same_order(OP, [self.step, index], self._after_step)
        self._order.append(index)
        self._pass = after_backward(self._pass, self._end_step)
        if flat.is_cuda:  # FSDP allocated it on a different stream, and frees it after this call
            flat.record_stream(torch.cuda.current_stream(flat.device))
        step, bucket = self._ledger.current, self._buckets[index]
        parts = flat.split([piece.padded for piece in self._pieces[index]])
        parts = [part[:size] for part, size in zip(parts, bucket.plan.sizes, strict=True)]
        is_padded = bucket.plan.numel < flat.numel()
        entries = torch.cat(parts) if is_padded else flat
        if step.compressed is None:
            with span("dct::exchange_dense"):
                entries.copy_(dense_mean(entries, torch.bfloat16, self._group))
        else:
            self._ledger.record(f"bucket {index}", bucket)
            bucket.reduce(entries, step.scale, step.inv_scale)
        if is_padded:
            torch._foreach_copy_(parts, list(entries.split(bucket.plan.sizes)))

    def _require(self, index: int, flat: Tensor) -> None:
        """Raise if `flat` is not the gradient of all pieces, or if all-reduce is turned off."""
        unit, numel = self._units[index], sum(piece.padded for piece in self._pieces[index])
        if not unit.group.all_reduce_grads:
            rule = "accumulated with set_requires_gradient_sync(False)"
            checks.fail(OP, "gradients", rule, "set_requires_all_reduce(False)")
        if flat.numel() != numel:
            rule = f"{numel} elements, of all parameters of module {unit.name} that required grad "
            rule += "when the hook was made (for unused ones, call "
            rule += "model.set_reduce_scatter_unused_params(True))"
            checks.fail(OP, "gradient", rule, flat.numel(), verb="have")

    def _begin_step(self) -> None:
        self._agreement.check(OP)
        self._ledger.begin()
        self._compare_order()  # if the last step did not end with its backward pass
        self._in_step, self._pass = True, NO_PASS

    def _end_step(self, nested: bool) -> None:
        if nested or not self._in_step:  # called twice if passes are nested
            return
        # Reentrant checkpointing nests backward passes, so this may be the end of a nested pass.
        self._in_step = any(fsdp_in_backward(unit.module) for unit in self._units)
        if not self._in_step:
            self._ledger.end()  # if it raises, the comparison of the other ranks fails
            self._compare_order()

    def _compare_order(self) -> None:
        """Start to compare the units of the step, after reading the last comparison. Collective.

        Ranks have started the last comparison one step ago, so the host hardly waits.
        """
        if self._order and groups.exists(self._after_step):
            self._read_comparison()
            self._require_same = groups.compare_order(OP, self._order, self._after_step)
        self._order = []

    def _read_comparison(self) -> None:
        require_same, self._require_same = self._require_same, None
        if require_same is not None:
            require_same()

    def _finish_last_step(self) -> None:
        """Read the results of the last step and compare its units on all ranks. Collective.

        Inside a backward pass, the step continues, and its units are compared later.
        """
        self._ledger.read()
        self._in_step &= backward_pass() != NO_PASS
        if not self._in_step:
            self._compare_order()
        self._read_comparison()
        self._ledger.finish()
