"""What happens between FSDP2's reduce-scatter and the optimizer, in every step.

FSDP reduces each module's gradient over the ranks that share a model's shards, and calls the hook
with what is this rank's. It is packed, exchanged with the ranks that hold the same shard in other
replicas, and unpacked in place. What came of it is looked at before the next step.
"""

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import record_function

from dct_kernels import __version__

from .. import groups
from ..collectives import dense_mean
from ..data_parallel import model
from ..data_parallel.bucket import Bucket
from ..data_parallel.bucket_plan import BucketPlan, Settings, plan_table, step_bytes
from ..data_parallel.checkpoint import SegmentState
from ..data_parallel.choice import TRANSPORTS
from ..data_parallel.damage import Damage
from ..data_parallel.history import History
from ..data_parallel.loss_scale import LossScale
from ..data_parallel.run import Run
from ..data_parallel.transports import Receipt
from . import checkpoint
from .units import Unit
from .verdict import OP, reach


class FullyShardState:
    """What the hooks need between steps: residuals and where to send payloads.

    Made by `dct_fully_shard_hook`, which says what it does.
    """

    def __init__(
        self,
        units: list[Unit],
        mesh: DeviceMesh,
        settings: Settings,
        transport: str,
        grad_scaler: GradScaler | None,
        start_step: int,
    ) -> None:
        self.settings = settings
        self.start_step = start_step
        self.step = 0
        self._units = units
        self._pieces = [piece for unit in units for piece in unit.pieces]
        self._device = units[0].device
        self._transport = transport
        self._replica = mesh.get_local_rank("replicate")
        self._group = mesh["replicate"].get_group()
        self._shards = mesh["shard"].size()
        self._loss_scale = LossScale(grad_scaler)
        self._damage = Damage(OP)
        self._history = History()
        self._open = True

        self._in_step = False  # a backward pass goes on
        self._order: list[int] = []  # units of the last step, until that is finished
        self._sent: list[int] = []  # those that were compressed, until taken back
        self._damaged = self._overflowed = False  # what this rank saw in it

        world = groups.require_group(OP, None)
        self._run = Run(
            OP,
            world,
            self._device,
            {
                "version": __version__,
                "model": model.describe({piece.parameter: piece.name for piece in self._pieces}),
                "modules": ", ".join(unit.name for unit in units),
                "mesh": str(mesh.mesh.tolist()),
                **settings.as_told(),
                "transport": transport,
                "start_step": start_step,
                "grad_scaler": "none" if self._loss_scale.scaler is None else "given",
            },
        )
        timeout = groups.timeout_of(world, self._device)
        self._verdicts = groups.separate_group(world, self._run.id, timeout)
        self._buckets = [self._bucket(unit, 0, {}) for unit in units]
        for index, unit in enumerate(units):
            unit.hook(partial(self._reduce, index))

    def _bucket(self, unit: Unit, packed: int, states: dict[str, SegmentState]) -> Bucket:
        names = tuple(piece.name for piece in unit.pieces)
        sizes = tuple(piece.padded for piece in unit.pieces)
        ranks, transport = self._group.size(), TRANSPORTS[self._transport]
        plan = BucketPlan(names, sizes, self.settings, transport, ranks)
        return Bucket(plan, self._group, self._device, packed, states)

    def close(self) -> None:
        """End the process group of this state; called again, nothing. It takes no further step.

        Raises:
            RuntimeError: a payload was damaged, as far as this rank knows. All is closed by then.
        """
        if self._open:
            self._open = False
            for unit in self._units:
                unit.close()
            groups.end_group(self._verdicts)
            self._look()
            self._damage.require_none()

    def plan(self) -> str:
        """What a rank sends for its part of each parameter in a compressed step, as a table.

        A bucket is a module that was wrapped by itself; sizes are a shard's.
        """
        return plan_table([bucket.plan for bucket in self._buckets], "as asked", self._device)

    def stats(self) -> dict[str, float | int | list[str] | None]:
        """How the last 100 steps went on this rank, and what a step costs; see `DCTState.stats`.

        `wire_bytes` is what a rank sends to other replicas in a compressed step. Beside that are
        FSDP's own messages inside a shard group, and 32 bytes that all ranks reduce.

        Raises:
            RuntimeError: a payload was damaged, as far as this rank knows.
        """
        self._look()
        self._damage.require_none()
        held = {piece.name for piece in self._pieces if piece.local.numel()}  # not filling alone
        return {
            "step": self.step,
            "density": self._history.density,
            "overflow": self._history.overflow,
            "wire_bytes": step_bytes([bucket.plan for bucket in self._buckets]),
            "silent": [
                name for bucket in self._buckets for name in bucket.silent() if name in held
            ],
        }

    def parameter_stats(self) -> dict[str, dict[str, float]]:
        """{parameter: figures of its last step on this rank}; see `DCTState.parameter_stats`.

        Raises:
            RuntimeError: a payload was damaged, as far as this rank knows.
        """
        self._look()
        self._damage.require_none()
        stats: dict[str, dict[str, float]] = {}
        for bucket in self._buckets:
            stats |= bucket.parameter_stats()
        return stats

    def take_back(self) -> None:
        """Undo what the last step did to the residuals, for a step that is not applied; see
        `DCTState.take_back`. On every rank, also of other shards: all of them wait here.

        Of several backward passes that were exchanged, the last one's.

        Raises:
            RuntimeError: a payload was damaged, on any rank.
        """
        self._finish_last_step()
        self._return_sent()

    def state_dict(self) -> dict[str, Any]:
        """This rank's shard of residuals, by replica and parameter name. Copies.

        Called on every rank, between steps: after the optimizer's step (and the scaler's update).
        Its tensors are DTensors, cut as the parameters are: for torch.distributed.checkpoint, which
        takes the state itself, {"dct": state}, or for torch.save, a file a rank.

        Raises:
            RuntimeError: a payload was damaged, on any rank.
        """
        self._finish_last_step()
        return checkpoint.make(self._replica, self._entry())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`, each replica from its own; on every rank, before any steps.

        From torch.distributed.checkpoint it may be of another number of shards: residuals are cut
        anew. The next step compares what was loaded. A state that is refused changes nothing.

        Raises:
            ValueError: made with another version, density, transport or number of replicas, by
                another replica or shard, or for another model; or something in it is missing, of
                another type or shape or not finite.
            TypeError: no state dict.
        """
        entry = checkpoint.find(state, self._replica, self._entry(), self._pieces)
        self._go_on(entry, self._segments(entry))

    def load_merged(self, folder: str | os.PathLike[str], key: str = "dct") -> None:
        """Go on from what another number of replicas left, of any number of shards.

        Every replica starts from the mean of their residuals: as a step applies the mean of what
        replicas send, as much is owed to the model as before, to float32 rounding (summed in
        float64). What owners of ranges owe (transport "shard") is added to every replica. Every
        rank calls it, and reads one replica's shard at a time. Our reconstruction: the paper does
        not change the number of ranks.

        Args:
            folder: that `torch.distributed.checkpoint` wrote.
            key: the name the state was saved under, {"dct": state}; dots go deeper.

        Raises:
            ValueError: there is no such state, or a replica's is missing; or as `load_state_dict`.
        """
        entries: list[checkpoint.Entry] = []

        def each() -> Iterator[dict[str, SegmentState]]:
            for entry in checkpoint.read(folder, key, self._entry(), self._pieces):
                entries.append(entry)
                yield self._segments(entry)

        mean = checkpoint.mean(each())
        self._go_on(entries[-1], mean)

    def _entry(self) -> checkpoint.Entry:
        """What goes into a checkpoint now."""
        parameters = {}
        for bucket, unit in zip(self._buckets, self._units, strict=True):
            states, packed = bucket.states(), bucket.compressor.step
            for piece in unit.pieces:
                parameters[piece.name] = checkpoint.spread(
                    piece, states[piece.name], self._transport, packed
                )
        return checkpoint.Entry(
            run_id=self._run.id,
            world_size=self._group.size() * self._shards,
            replicas=self._group.size(),
            shards=self._shards,
            step=self.step,
            density=self.settings.density,
            transport=self._transport,
            reduction=", ".join(dict.fromkeys(unit.reduction for unit in self._units)),
            parameters=parameters,
        )

    def _segments(self, entry: checkpoint.Entry) -> dict[str, SegmentState]:
        parameters = entry["parameters"]
        return {p.name: checkpoint.gather_up(p, parameters[p.name]) for p in self._pieces}

    def _go_on(self, entry: checkpoint.Entry, segments: dict[str, SegmentState]) -> None:
        self._run.load(entry)
        self._damage = Damage(OP)
        self._history = History()
        self._loss_scale.saw(overflow=False)
        self._in_step, self._order, self._damaged, self._overflowed = False, [], False, False
        self._sent = []
        self.step = entry["step"]
        parameters = entry["parameters"]
        for index, unit in enumerate(self._units):
            own = {piece.name: segments[piece.name] for piece in unit.pieces}
            packed = max(int(parameters[name]["packed"]) for name in own)
            self._buckets[index] = self._bucket(unit, packed, own)

    # In the backward pass:

    def _reduce(self, index: int, flat: Tensor) -> None:
        """Replace the gradient of a unit's shard by its mean over replicas."""
        self._units[index].require(flat)
        if not self._in_step or index in self._order:
            self._begin_step()
        self._order.append(index)
        if flat.is_cuda:  # FSDP calls this on another stream than the memory is of
            flat.record_stream(torch.cuda.current_stream(flat.device))
        if self.step <= self.start_step:
            with record_function("dct::exchange_dense"):
                mean = partial(dense_mean, flat, torch.bfloat16, self._group)
                flat.copy_(self._run.carry_out(mean))
        else:
            self._sent.append(index)
            scale = self._loss_scale.value, self._loss_scale.inverse
            self._run.carry_out(partial(self._buckets[index].reduce, flat, *scale))

    def _begin_step(self) -> None:
        self._finish_last_step()
        self._sent = []
        self._run.begin_step(self.step)
        self._loss_scale.begin()
        self.step += 1
        self._in_step = True
        # As FSDP does, which may reduce gradients there: the last to be queued by then come first.
        queue = Variable._execution_engine.queue_callback
        queue(lambda: queue(self._end_step))

    def _end_step(self) -> None:
        # Reentrant checkpointing goes backward within a backward pass: this may be the end of that.
        self._in_step = any(unit.in_backward for unit in self._units)

    # Between steps:

    def _look(self) -> None:
        """Learn how the last step went on this rank."""
        with record_function("dct::wait"):
            taken = {index: bucket.take_report() for index, bucket in enumerate(self._buckets)}
        reports = {index: report for index, report in taken.items() if report is not None}
        if not reports:
            return
        receipts = {index: report.receipt for index, report in reports.items()}
        self._damaged = any(r.damaged or r.told for r in receipts.values())
        self._overflowed = any(r.non_finite for r in receipts.values())
        self._damage.look(self.step - 1, receipts)
        self._history.look(reports.values())

    def _finish_last_step(self) -> None:
        """Learn how it went on every rank; all of them come here, after as many steps.

        Raises:
            RuntimeError: a payload was damaged on some rank: on all of them.
        """
        self._look()
        self._in_step = False
        if self._order:
            order, self._order = self._order, []
            seen = self._damaged, self._overflowed
            told = self._run.carry_out(partial(reach, *seen, order, self._verdicts))
            if told.damaged is not None and not self._damaged:
                received = Receipt([], [told.damaged], told.overflowed, [], 0, 0)
                self._damage.look(self.step - 1, {0: received})
            self._damaged = self._overflowed = False
            self._loss_scale.saw(told.overflowed)
            if self._loss_scale.skipped():
                self._return_sent()
        self._damage.require_none()

    def _return_sent(self) -> None:
        while self._sent:
            self._buckets[self._sent.pop()].take_back()
