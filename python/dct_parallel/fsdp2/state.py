"""The exchange between FSDP2's reduce-scatter and the optimizer, in every step.

FSDP reduces each module's gradient over the ranks that share a model's shards, and calls the hook
with this rank's shard. It is packed, exchanged with the ranks that hold the same shard in other
replicas, and unpacked in place. The host reads the results of a step at the end of the next one.
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
from ..exchange.first_step import FirstStep
from ..exchange.ledger import StepLedger
from ..exchange.loss_scale import LossScale
from ..exchange.plan import (
    BucketPlan,
    describe,
    keeps_owners,
    plan_bucket,
    plan_table,
)
from ..exchange.settings import Settings
from .hook import OP
from .units import Unit


def agree(order: Sequence[int], group: dist.ProcessGroup) -> None:
    """Compare what ranks exchanged; blocks until all have called it.

    Args:
        order: numbers of the units that it exchanged, to be the same everywhere.
        group: gloo on any device: the host waits, no stream does.

    Raises:
        RuntimeError: ranks exchanged different units, or in a different order: on all of them.
    """
    digest = zlib.crc32(repr(list(order)).encode())
    said = torch.tensor([digest, -digest], dtype=torch.int64, device="cpu")
    dist.all_reduce(said, dist.ReduceOp.MAX, group=group)
    highest, lowest = said.tolist()
    if highest != -lowest:
        raise RuntimeError(
            f"dct::{OP}: every rank must go backward through the same modules in the same order, "
            "got different ones on some"
        )


class FullyShardState:
    """The state of the hooks: residuals and where to send payloads.

    Made by `dct_fully_shard_hook`, whose documentation it shares.
    """

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
        self._open, self._in_step = True, False  # whether a backward pass goes on
        self._pass = NO_PASS  # the backward pass whose end is awaited
        self._order: list[int] = []  # units of this step
        self._last_order: list[int] = []  # of the last step, until ranks have compared it

        world = groups.require_group(OP, None)
        to_compare = {
            "model": describe({piece.parameter: piece.name for piece in self._pieces}),
            "modules": ", ".join(unit.name for unit in units),
            "mesh": str(mesh.mesh.tolist()),
        }
        self._ledger = StepLedger(
            OP, world, self._device, settings, to_compare, loss_scale, start_step
        )
        parameters = [piece.parameter for piece in self._pieces]
        self._ledger.first_step = FirstStep(OP, parameters, settings, loss_scale)
        timeout = groups.timeout_of(world, self._device)
        self._after_step = groups.separate_group(world, self._ledger.run_id, timeout)
        self._end_group = groups.ending(self, self._after_step)
        self._buckets = [self._bucket(unit, 0, {}) for unit in units]
        for index, unit in enumerate(units):
            unit.hook(partial(self._reduce, index))

    def _bucket(self, unit: Unit, packed: int, states: dict[str, SegmentState]) -> Bucket:
        names = [piece.name for piece in unit.pieces]
        sizes = [piece.padded for piece in unit.pieces]
        plan = plan_bucket(names, sizes, self.settings, self._group.size())
        return Bucket(plan, self._group, self._device, packed, states)

    @property
    def step(self) -> int:
        """Steps taken."""
        return self._ledger.step

    @property
    def _plans(self) -> list[BucketPlan]:
        return [bucket.plan for bucket in self._buckets]

    def close(self) -> None:
        """End the process group of this state, which takes no further step. Idempotent.

        Raises:
            RuntimeError: this rank received a damaged payload. The state is closed all the same.
        """
        if self._open:
            self._open = False
            for unit in self._units:
                unit.close()
            self._end_group()
            self._ledger.end_first_step()
        self._ledger.finish()

    def plan(self) -> str:
        """The bytes per rank and module in a compressed step, as a table.

        A bucket is a module that was wrapped by itself; sizes are a shard's.

        Raises:
            RuntimeError: this rank received a damaged payload.
        """
        self._ledger.require_intact()
        return plan_table(self._plans, self._device)

    def stats(self) -> dict[str, float | int | None]:
        """Means of the last 100 steps on this rank, and the bytes of a step; see `DCTState.stats`.

        `wire_bytes`: bytes sent per rank to other replicas in a compressed step; None before any.
        Besides, FSDP sends its own messages inside a shard group, and all ranks reduce 16 bytes.

        Raises:
            RuntimeError: this rank received a damaged payload.
        """
        self._ledger.finish()
        return self._ledger.stats(self._plans)

    def parameter_stats(self) -> dict[str, dict[str, float]]:
        """{parameter: figures of its last step on this rank}; see `DCTState.parameter_stats`.

        Raises:
            RuntimeError: this rank received a damaged payload.
        """
        self._ledger.finish()
        return parameter_stats(self._buckets)

    def take_back(self) -> None:
        """Return the entries of the last step to the residuals, for a step that is not applied.

        See `DCTState.take_back`. Collective, over all ranks of the mesh, unless an exchange failed.
        If several backward passes were exchanged, only the last one is taken back.

        Raises:
            ValueError: ranks have taken different steps.
            RuntimeError: this rank received a damaged payload, or a rank did not call this within
                the timeout of all ranks. Nothing was taken back.
        """
        if not self._ledger.compare_step("take_back"):
            self._in_step, self._order, self._last_order = False, [], []  # others may be gone
        self._finish_last_step()
        self._ledger.take_back()

    def state_dict(self) -> dict[str, Any]:
        """This rank's shard of residuals, by replica and parameter name. Copies.

        Called on every rank, between steps: after the optimizer's step (and the scaler's update).
        Its tensors are DTensors, cut as the parameters are: for torch.distributed.checkpoint, which
        takes the state itself, {"dct": state}, or for torch.save, one file per rank.

        Raises:
            RuntimeError: this rank received a damaged payload. Or an exchange failed, as in
                `DCTState.state_dict`.
        """
        self._ledger.require_exchanged("state_dict")
        self._finish_last_step()
        owners = keeps_owners(self.settings, self._group.size())
        states = {name: s for bucket in self._buckets for name, s in bucket.states().items()}
        for name, own in states.items():
            if owners and own.owner is None:
                states[name] = SegmentState(own.residual, torch.zeros_like(own.residual))
        return self._run().save(
            states,
            run_id=self._ledger.run_id,
            step=self.step,
            world_size=self._group.size() * self._shards,
            shards=self._shards,
            transport="reduce_scatter" if owners else "all_gather",
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict`, each replica from its own; on every rank, before any steps.

        torch.distributed.checkpoint reshards residuals from any number of shards. The next step
        compares run and step between ranks. A refused state changes nothing.

        Raises:
            ValueError: made with a different version, density or number of replicas, by a different
                replica or shard, or for a different model; or something in it is missing, of a
                wrong type or shape or not finite.
            TypeError: not a state dict.
            RuntimeError: this state received a damaged payload: load into a new one.
        """
        self._ledger.require_intact()
        self._resume(*self._run().find(state))

    def load_merged(self, folder: str | os.PathLike[str], key: str = "dct") -> None:
        """Resume from states of any number of replicas and shards, and of either transport.

        Every replica starts from the mean of their residuals. A step applies the mean over replicas
        of their messages, so the pending updates of the model stay the same, to float32 rounding
        (summed in float64). Residuals of owners (transport "reduce_scatter") are added to every
        replica. Every rank calls it, and reads one replica's shard at a time. Our reconstruction:
        the paper does not change the number of ranks.

        Args:
            folder: written by `torch.distributed.checkpoint`, which unpickles it: only read one
                that you trust.
            key: the name the state was saved under, {"dct": state}; dots go deeper.

        Raises:
            ValueError: there is no such state, or a replica's is missing; or as `load_state_dict`.
            RuntimeError: a different rank raised. Nothing has changed on any rank.
        """
        self._ledger.require_intact()
        world = groups.require_group("load_merged", None)
        timeout = groups.timeout_of(world, self._device)
        self._resume(*self._run().find_mean(folder, key, world, timeout))

    def _run(self) -> Run:
        """This replica, for checkpoints."""
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
        self._ledger.load(entry)
        self._in_step, self._order, self._last_order = False, [], []
        saved = entry["parameters"]
        for index, unit in enumerate(self._units):
            own = {piece.name: states[piece.name] for piece in unit.pieces}
            packed = max(saved[name]["packed"] for name in own)
            self._buckets[index] = self._bucket(unit, packed, own)

    # In the backward pass:

    def _reduce(self, index: int, flat: Tensor) -> None:
        """Replace the gradient of a unit's shard by its mean over replicas."""
        self._units[index].require(flat)
        if not self._in_step or index in self._order:
            self._begin_step()
        self._order.append(index)
        self._await_end()
        if flat.is_cuda:  # FSDP calls this on a different stream than that of the memory
            flat.record_stream(torch.cuda.current_stream(flat.device))
        if self._ledger.packed >= 0:
            self._ledger.sent[index] = self._buckets[index]
            exchange = partial(self._buckets[index].reduce, flat, *self._ledger.scales)
        else:
            exchange = partial(self._reduce_densely, flat)
        self._ledger.watch(exchange)()

    def _reduce_densely(self, flat: Tensor) -> None:
        with span("dct::exchange_dense"):
            flat.copy_(dense_mean(flat, torch.bfloat16, self._group))

    def _begin_step(self) -> None:
        self._ledger.begin(OP)
        self._end_order()  # if the end of the last step was not seen
        self._in_step, self._pass = True, NO_PASS

    def _await_end(self) -> None:
        """Call `_end_step` at the end of the backward pass under way, if that is not nested."""
        backward = backward_pass()
        if backward != self._pass:
            self._pass = backward
            # FSDP may reduce gradients in a callback at the end of the backward pass. A callback
            # that is queued there comes last.
            at_end_of_backward(lambda nested: at_end_of_backward(self._end_step))

    def _end_step(self, nested: bool) -> None:
        if nested or not self._in_step:  # called twice in a pass with others nested in it
            return
        # Reentrant checkpointing nests backward passes: this may be the end of an inner one.
        self._in_step = any(unit.in_backward for unit in self._units)
        if not self._in_step:
            self._end_order()
            self._ledger.end()

    def _end_order(self) -> None:
        """Compare the units of the step before, and keep this step's for later. Collective."""
        self._in_step = False
        if self._order:
            self._compare_last_step()
            self._last_order, self._order = self._order, []

    def _compare_last_step(self) -> None:
        """Compare the units of the last step. Collective, unless the groups were destroyed.

        Raises:
            RuntimeError: this rank received a damaged payload, in the last step or before; then the
                other ranks wait here.
        """
        self._ledger.read()
        self._ledger.require_intact()
        if self._last_order and groups.exists(self._after_step):
            order, self._last_order = self._last_order, []
            agree(order, self._after_step)

    def _finish_last_step(self) -> None:
        """Read the results of the last step on every rank, and compare its units. Collective.

        Raises:
            RuntimeError: this rank received a damaged payload, in this step or before.
        """
        self._ledger.look()
        self._end_order()
        self._compare_last_step()
        self._ledger.finish()
