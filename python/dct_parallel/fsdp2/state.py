"""The state of `dct_fully_shard_hook`: averages gradients between replicas in every step.

FSDP reduces each module's gradient over the ranks that share the model's shards, and calls the hook
with the gradient of this rank's shard. The hook averages this gradient over the ranks that hold the
same shard in other replicas. The host reads the results of a step at the end of the next step.
"""

import os
import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import groups
from .._torch import NO_PASS, at_end_of_backward, backward_pass, span
from ..collectives import dense_mean
from ..exchange.bucket import Bucket, SegmentState, parameter_stats
from ..exchange.checkpoint import Entry, Run, Sharded, States
from ..exchange.ledger import StepLedger
from ..exchange.optimizers import LossScale, OptimizerChecks
from ..exchange.plan import BucketPlan, describe, keeps_owners, log_plan, plan_bucket, plan_table
from ..exchange.settings import Settings
from .hook import OP
from .units import Unit


def require_same_order(order: Sequence[int], group: dist.ProcessGroup) -> None:
    """Compare which units the ranks exchanged. Blocks until all ranks have called it.

    Args:
        order: the numbers of the units that this rank exchanged.
        group: a gloo group, also if gradients are on CUDA, so that only the host waits.

    Raises:
        RuntimeError: ranks exchanged different units or a different order. Every rank raises.
    """
    digest = zlib.crc32(repr(list(order)).encode())
    bounds = torch.tensor([digest, -digest], dtype=torch.int64, device="cpu")
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
    highest, lowest = bounds.tolist()
    if highest != -lowest:
        raise RuntimeError(
            f"dct::{OP}: every rank must go backward through the same modules in the same order, "
            "got different ones on some"
        )


class FullyShardState:
    """The state that `dct_fully_shard_hook` returns: residuals and process groups."""

    def __init__(
        self,
        units: list[Unit],
        mesh: DeviceMesh,
        settings: Settings,
        loss_scale: LossScale | None,
        start_step: int,
    ) -> None:
        self.settings, self.start_step = settings, start_step
        self._units, self._device = units, units[0].device
        self._pieces = [piece for unit in units for piece in unit.pieces]
        self._replica = mesh.get_local_rank("replicate")
        self._group = mesh["replicate"].get_group()
        self._shards = mesh["shard"].size()
        self._open, self._in_step = True, False
        self._pass = NO_PASS  # the backward pass that has a callback queued for its end
        self._order: list[int] = []  # the numbers of this step's units
        self._last_order: list[int] = []  # the numbers of the last step's units, until compared

        world = groups.require_group(OP, None)
        to_compare = {
            "model": describe({piece.parameter: piece.name for piece in self._pieces}),
            "modules": ", ".join(unit.name for unit in units),
            "mesh": str(mesh.mesh.tolist()),
        }
        to_compare |= {**settings.to_compare(), "start_step": str(start_step)}
        to_compare["grad_scaler"] = "given" if loss_scale else "none"
        self._agreement = groups.Agreement(OP, world, self._device, to_compare)
        parameters = [piece.parameter for piece in self._pieces]
        self._optimizers = OptimizerChecks(OP, parameters, settings, loss_scale)
        self._ledger = StepLedger(OP, start_step, loss_scale, self._optimizers)
        timeout = groups.timeout_of(world, self._device)
        self._after_step = groups.separate_group(world, self._agreement.run_id, timeout)
        self._end_group = groups.destroyer(self, self._after_step)
        self._buckets = [self._bucket(unit, 0, {}) for unit in units]
        for index, unit in enumerate(units):
            unit.hook(partial(self._reduce, index))

    def _bucket(self, unit: Unit, packed: int, states: dict[str, SegmentState]) -> Bucket:
        names = [piece.name for piece in unit.pieces]
        sizes = [piece.padded for piece in unit.pieces]
        plan = plan_bucket(names, sizes, self.settings, self._group.size())
        log_plan(OP, plan, self._device)
        return Bucket(plan, self._group, self._device, packed, states)

    @property
    def step(self) -> int:
        """The number of steps taken."""
        return self._ledger.step

    @property
    def _plans(self) -> list[BucketPlan]:
        return [bucket.plan for bucket in self._buckets]

    def close(self) -> None:
        """Destroy the process group of this state. The hooks raise afterwards. Idempotent.

        Raises:
            RuntimeError: this rank received a damaged payload. The state is closed nevertheless.
        """
        if self._open:
            self._open = False
            for unit in self._units:
                unit.close()
            self._end_group()
            self._optimizers.close()
        self._ledger.finish()

    def plan(self) -> str:
        """Return a table of the bytes per rank and module in a compressed step.

        A bucket is a module that fully_shard was applied to. Sizes are per shard.

        Raises:
            RuntimeError: this rank received a damaged payload.
        """
        self._ledger.require_intact()
        return plan_table(self._plans, self._device)

    def stats(self) -> dict[str, float | int | None]:
        """Return means over the last 100 steps, and the bytes per step; see `DCTState.stats`.

        `wire_bytes` counts the bytes that each rank sends to other replicas in a compressed step.
        It excludes FSDP's messages inside a shard group, and 16 bytes that all ranks reduce.

        Raises:
            RuntimeError: this rank received a damaged payload.
        """
        self._ledger.finish()
        return self._ledger.stats(self._plans)

    def parameter_stats(self) -> dict[str, dict[str, float]]:
        """Return {parameter: figures of the last step}; see `DCTState.parameter_stats`.

        Raises:
            RuntimeError: this rank received a damaged payload.
        """
        self._ledger.finish()
        return parameter_stats(self._buckets)

    def take_back(self) -> None:
        """Return the entries of the last step to the residuals, for a step that is not applied.

        See `DCTState.take_back`. The call is collective over all ranks of the mesh. If several
        backward passes were exchanged, only the last one is taken back.

        Raises:
            ValueError: ranks have taken different steps.
            RuntimeError: this rank received a damaged payload, or a rank did not call this method
                within the timeout of the process group. Nothing was taken back.
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

        Raises:
            RuntimeError: this rank received a damaged payload, or an exchange failed; see
                `DCTState.state_dict`.
        """
        self._finish_last_step()
        owners = keeps_owners(self.settings, self._group.size())
        states = {name: s for bucket in self._buckets for name, s in bucket.states().items()}
        for name, state in states.items():
            if owners and state.owner is None:
                states[name] = SegmentState(state.residual, torch.zeros_like(state.residual))
        return self._run().save(
            states,
            run_id=self._agreement.run_id,
            step=self.step,
            world_size=self._group.size() * self._shards,
            shards=self._shards,
            transport="reduce_scatter" if owners else "all_gather",
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume each replica from its own `state_dict`. Call it on every rank before any step.

        torch.distributed.checkpoint reshards residuals from any number of shards. In the next step,
        ranks compare their run and step. If this call raises an error, the state is unchanged.

        Raises:
            ValueError: the dict has a different version, density, number of replicas, replica,
                shard or model; or a value is missing, not finite, or has a wrong type or shape.
            TypeError: `state` is not a state dict.
            RuntimeError: this state received a damaged payload. Load into a new state.
        """
        self._ledger.require_intact()
        self._resume(*self._run().find(state))

    def load_merged(self, folder: str | os.PathLike[str], key: str = "dct") -> None:
        """Resume from states of any number of replicas and shards, and of either transport.

        Every replica starts from the mean of the saved residuals. A step applies the mean of the
        replicas' messages, so the pending updates of the model are unchanged, except for float32
        rounding. Owners' residuals (transport "reduce_scatter") are added to every replica. Call it
        on every rank. It reads one replica's shard at a time. Source: this project, because the DCT
        paper (arXiv 2010.08899) does not change the number of ranks.

        Args:
            folder: written by `torch.distributed.checkpoint`. Loading unpickles files, so read only
                folders that you trust.
            key: the name of the state in the folder, as in {"dct": state}; dots separate nested
                keys.

        Raises:
            ValueError: the state or a replica is missing. See also `load_state_dict`.
            RuntimeError: another rank raised an error. Nothing has changed on any rank.
        """
        self._ledger.require_intact()
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
            for bucket, unit in zip(self._buckets, self._units, strict=True)
            for piece in unit.pieces
        }
        return Run("replica", self._replica, self.settings.format, same, parameters)

    def _resume(self, entry: Entry, states: States) -> None:
        self._agreement.resume(entry["step"], entry)
        self._ledger.restart(entry["step"])
        self._in_step, self._order, self._last_order = False, [], []
        saved = entry["parameters"]
        for index, unit in enumerate(self._units):
            selected = {piece.name: states[piece.name] for piece in unit.pieces}
            packed = max(saved[name]["packed"] for name in selected)
            self._buckets[index] = self._bucket(unit, packed, selected)

    # The methods below begin, perform and end a step.

    def _reduce(self, index: int, flat: Tensor) -> None:
        """Replace the gradient of a unit's shard by its mean over replicas."""
        self._units[index].require(flat)
        if not self._in_step or index in self._order:
            self._begin_step()
        self._order.append(index)
        self._await_end()
        if flat.is_cuda:  # FSDP allocated it on a different stream
            flat.record_stream(torch.cuda.current_stream(flat.device))
        step, bucket = self._ledger.current, self._buckets[index]
        if step.compressed is not None:
            self._ledger.record(f"bucket {index}", bucket)
            bucket.reduce(flat, step.scale, step.inv_scale)
            return
        with span("dct::exchange_dense"):
            flat.copy_(dense_mean(flat, torch.bfloat16, self._group))

    def _begin_step(self) -> None:
        self._agreement.check(OP)
        self._ledger.begin()
        self._end_order()  # if the last step did not end with its backward pass
        self._in_step, self._pass = True, NO_PASS

    def _await_end(self) -> None:
        """Call `_end_step` at the end of the current backward pass."""
        backward = backward_pass()
        if backward != self._pass:
            self._pass = backward
            # FSDP may reduce gradients in a callback at the end of the backward pass. A callback
            # that is queued inside a callback runs after all others.
            at_end_of_backward(lambda nested: at_end_of_backward(self._end_step))

    def _end_step(self, nested: bool) -> None:
        if nested or not self._in_step:  # called twice if passes are nested
            return
        # Reentrant checkpointing nests backward passes, so this may be the end of a nested pass.
        self._in_step = any(unit.in_backward for unit in self._units)
        if not self._in_step:
            self._ledger.end()  # if it raises, the other ranks block in `_end_order`
            self._end_order()

    def _end_order(self) -> None:
        """Compare the units of the previous step, and store the units of this step. Collective."""
        self._in_step = False
        if self._order:
            self._compare_last_step()
            self._last_order, self._order = self._order, []

    def _compare_last_step(self) -> None:
        """Compare the units of the last step. Collective unless the groups were destroyed.

        Raises:
            RuntimeError: ranks exchanged different units.
        """
        if self._last_order and groups.exists(self._after_step):
            order, self._last_order = self._last_order, []
            require_same_order(order, self._after_step)

    def _finish_last_step(self) -> None:
        """Read the results of the last step and compare its units on all ranks. Collective.

        Raises:
            RuntimeError: this rank received a damaged payload.
        """
        self._ledger.read()
        self._end_order()
        self._compare_last_step()
        self._ledger.finish()
