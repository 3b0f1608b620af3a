"""DCT for torch's DistributedDataParallel: a state and a communication hook.

    state = DCTState(ddp, density=0.005)
    ddp.register_comm_hook(state, dct_hook)

In a step every bucket is packed, exchanged and unpacked beside the backward pass, in bucket order
on every rank, with one collective each. What came of it is looked at before the next step.
"""

import contextlib
import dataclasses
import os
from functools import partial

import torch
import torch.distributed as dist

# DDP's constructor imports it. Its functions' defaults hold the default group, if there is one by
# then, until Python ends, and a thread of gloo that still finishes its work aborts the process.
import torch.distributed.nn.functional
from torch import Tensor
from torch.amp import GradScaler
from torch.futures import Future
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from dct_kernels import __version__, checks

from .. import groups
from ..collectives import dense_mean
from ..compressor import check_settings
from ..executors import StreamExecutor, ThreadExecutor, executor_for
from . import checkpoint, model
from .bucket import Bucket
from .bucket_plan import BucketPlan, Settings, plan_table, step_bytes
from .buckets import Buckets
from .choice import Choice
from .damage import Damage
from .history import History
from .link import Link
from .loss_scale import LossScale
from .run import Run


class DCTState:
    """What `dct_hook` needs between steps: residuals, thresholds and where to send payloads.

    Construct it on every rank of the group, register it once, and keep `state_dict()` in the
    checkpoint of every rank: residuals differ between ranks. `close()` ends the thread and the
    process group that it made; a process may exit without.

    The first `start_step` steps average the gradients densely in bfloat16; DDP rebuilds its buckets
    in that time. Then parameters of 256 elements and more are compressed; of smaller ones, which
    travel in the same payload, everything is sent. State belongs to parameters, by name: should the
    buckets change later, it moves along. Memory: 4 bytes per parameter, and each bucket's payload
    once per rank; with "shard" 8 / P bytes more, and three payloads in all.

    What has to be the same on all ranks is compared when the state is bound to its DDP, and at the
    first step after that or a load: every rank raises, naming all values. Waits for other ranks end
    at the group's timeout.

    Args:
        ddp: the model the hook is registered with; dense gradients, on one CPU or CUDA device.
            None where there is none yet: `bind` it later, or let the first step find it.
        density: fraction of each parameter's entries sent per step, in (0, 1].
        refresh_every: steps between samples of the thresholds (also at 0, 1, 2, 4, ... 512).
        value_dtype: of the values sent, torch.bfloat16 or torch.float32.
        transport: how payloads reach the other ranks. "gather": one all-gather, whose bytes grow
            with the ranks. "shard": each rank sums and compresses again one range of every bucket;
            bytes do not grow with the ranks, as long as a bucket has a block of 16,384 elements for
            each. "auto": of gather, shard and a plain all-reduce in bfloat16, for every bucket the
            fastest by its formula on the `link`; gather where none is known.
        process_group: ranks to average over, this one among them; default those of `ddp`.
        grad_scaler: the GradScaler that scales the loss, if one does; a disabled one counts as
            none. Residuals are kept in unscaled units, and what was packed for a step that the
            scaler skipped is taken back.
        start_step: steps before compression.
        policy: of the thresholds between samples, "tracked" or "fixed"; see `Compressor`.
        link: for "auto": "probe" to measure it when the state is bound, with 18 MiB a rank on 2
            ranks and 45 on 4, or the file that `dct-bench link` wrote for this number of ranks and
            one rate. All ranks go by the first one's. A probe may choose anew after a restart.

    Gradients may be accumulated over several backward passes, under `ddp.no_sync()` or without (of
    a step that a scaler skips, entries that overflowed are lost then, and the first of a bucket).
    Uneven inputs (`ddp.join()`) are supported. A copy (deepcopy, pickle) takes residuals along and
    is bound to no DDP.

    A payload that is damaged on its way is found by the rank that receives it. Damage of step t
    raises there at the first hook of step t + 1, which still tells the others; on them it raises at
    the first hook of step t + 2 at the latest. (If DDP deals its buckets anew between t and t + 1,
    as after its first step, they end with the connection or the timeout.) `state_dict()`,
    `stats()`, `parameter_stats()` and `close()` of a rank that knows of damage raise as well. So
    damage of the very last step is raised by the first of them, on the rank that received it; the
    others do not learn of it. Weights of a damaged step differ between ranks: go back to a
    checkpoint.

    Limits: with find_unused_parameters, DDP drops the result for a parameter that no rank used in a
    step, and with it what the residual sent. One optimizer per GradScaler, as a skipped step is
    taken back for all parameters.

    Raises:
        ValueError, TypeError: an argument is out of its range, a parameter cannot be compressed, or
            ranks differ; the text names it.
        RuntimeError: some rank does not construct its state within the group's timeout.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel | None = None,
        density: float = 0.005,
        refresh_every: int = 1000,
        value_dtype: torch.dtype = torch.bfloat16,
        transport: str = "auto",
        process_group: dist.ProcessGroup | None = None,
        grad_scaler: GradScaler | None = None,
        start_step: int = 2,
        policy: str = "tracked",
        link: Link | str | os.PathLike | None = None,
    ) -> None:
        check_settings("DCTState", density, refresh_every, policy, value_dtype)
        checks.require_int("DCTState", "start_step", start_step, 0, 2**63 - 1)
        self.settings = Settings(density, refresh_every, policy, value_dtype)
        self._choice = Choice(transport, link)
        self._process_group = process_group
        self._loss_scale = LossScale(grad_scaler)

        self.step = 0
        self.start_step = start_step
        self._next_index = 0
        self._damage = Damage()
        self._history = History()

        # Known once bound to a DDP:
        self._names: dict[Parameter, str] = {}
        self._group: dist.ProcessGroup | None = None
        self._buckets: Buckets | None = None
        self._executor: ThreadExecutor | StreamExecutor | None = None
        self._to_load: dict | None = None  # by a copy of a state
        if ddp is not None:
            self.bind(ddp)

    def bind(self, ddp: DistributedDataParallel) -> None:
        """Attach a state that was made without its DDP; on every rank, like the constructor."""
        names = model.named_parameters(ddp)
        if self._names:
            checks.fail("DCTState", "state", "of one DDP", "a second")
        self._device = model.device_of(names)
        given = ddp.process_group if self._process_group is None else self._process_group
        given = groups.require_group("DCTState", given)
        self._run = Run(
            "DCTState",
            given,
            self._device,
            {
                "version": __version__,
                "model": model.describe(names),
                **self.settings.as_told(),
                "transport": self._choice.name,
                "link": self._choice.kind,
                "start_step": self.start_step,
                "grad_scaler": "none" if self._loss_scale.scaler is None else "given",
            },
        )
        self._rank, self._world_size = dist.get_rank(), given.size()
        # On the CPU one of its own, as collectives of the executor's thread must not interleave
        # with those of the main thread. On CUDA both issue theirs from one thread, in order.
        self._owns_group = self._device.type == "cpu"
        self._group = groups.separate_group(given) if self._owns_group else given
        self._choice.settle(self._run, self._group, self._device, self.settings)
        self._buckets = Buckets(names, self.settings, self._choice, self._group, self._device)
        self._executor = executor_for(self._device)
        self._names = names  # bound
        if self._to_load is not None:
            self.load_state_dict(self._to_load)

    def close(self) -> None:
        """End the thread and the process group of this state; called again, nothing.

        It takes no further step. What tells of the last ones still answers. Waits for the last.

        Raises:
            RuntimeError: a payload was damaged. All is closed by then.
        """
        if self._executor is not None:
            self._executor.close()
            self._executor = None
            if self._owns_group:
                groups.end_group(self._group)
            self._finish_last_step()

    def plan(self) -> str:
        """What is sent for each parameter in a compressed step, as a table.

        Until compression has started DDP's buckets are not known and one is assumed; each further
        one adds about a hundred bytes.
        """
        self._require_bound("plan")
        plans = self._buckets.plans()
        return plan_table(plans, self._choice.reason(plans))

    def stats(self) -> dict[str, float | int | None]:
        """How the last 100 steps went, and what a step costs. Waits for the last step.

        `step`: steps taken; `density`: entries that this rank sent of the parameters that are
        compressed, over their elements, a mean over steps (None before any is);
        `overflow`: fraction of payloads, of all ranks, that were too small for what passed;
        `wire_bytes`: what a rank sends in a compressed step. Messages have a fixed size, so that is
        the same on every rank and in every step.

        Raises:
            RuntimeError: a payload was damaged.
        """
        self._require_bound("stats")
        self._finish_last_step()
        return {
            "step": self.step,
            "density": self._history.density,
            "overflow": self._history.overflow,
            "wire_bytes": step_bytes(self._buckets.plans()),
        }

    def parameter_stats(self) -> dict[str, dict[str, float | int]]:
        """{parameter: figures of the last step on this rank}, for any logger. Waits for that step.

        `density`: entries sent over elements; `threshold`: for the next step; `threshold_age`:
        steps since it was sampled, or since this parameter's state came here (the start, a load,
        new buckets); `overflow`: fraction of what passed that there was no room for;
        `residual_norm`: Euclidean, of what is still to be sent, in unscaled units. Empty before
        compression starts, and after a load until the next step.

        Raises:
            RuntimeError: a payload was damaged.
        """
        self._require_bound("parameter_stats")
        self._finish_last_step()
        stats = {}
        for bucket in self._buckets.in_order():
            stats |= bucket.parameter_stats()
        return stats

    def state_dict(self) -> dict:
        """This rank's residuals and thresholds by parameter name, the step, and the last steps'
        statistics. Copies, on the CPU.

        Call it between steps: after the optimizer's step (and the scaler's update), before the next
        backward pass. For `torch.save`, one file a rank. torch.distributed.checkpoint takes the
        state itself, {"dct": state} (deeper in a dict, only what this returns), and calls this on
        loading as well, for the shapes: all parameters are in it from the start.

        Raises:
            ValueError: the state is not bound to a DDP yet.
            RuntimeError: a payload was damaged.
        """
        self._require_bound("state_dict")
        self._finish_last_step()
        entry = checkpoint.Entry(
            run_id=self._run.id,
            world_size=self._world_size,
            step=self.step,
            density=self.settings.density,
            recent=self._history.state(),
            parameters=self._buckets.states(),
        )
        return checkpoint.make(self._rank, entry)

    def load_state_dict(self, state: dict) -> None:
        """Go on from a `state_dict`, each rank from its own, or all from one of `merge_states`.

        Every rank loads, before any of them takes a step. The next step compares what was loaded.

        Raises:
            ValueError: made with another version, density or number of ranks, by another rank, or
                for another model; or this state is not bound to a DDP yet.
        """
        self._require_bound("load_state_dict")
        sizes = {name: parameter.numel() for parameter, name in self._names.items()}
        entry = checkpoint.find(state, self._rank, self._world_size, self.settings, sizes)
        if any("base" in saved for saved in entry["parameters"].values()):
            checks.fail("load_state_dict", "state", "a DCTState's", "a DCTAverager's")
        self._run.load(entry)
        self._damage = Damage()
        self._loss_scale.saw(overflow=False)
        self._next_index = 0
        self.step = entry["step"]
        self._history.load(entry.get("recent"))  # which early states leave out
        self._buckets.load(entry["parameters"])

    def __getstate__(self) -> dict:
        """Settings and residuals: neither DDP nor process group nor thread can be copied."""
        made = {
            **dataclasses.asdict(self.settings),
            "transport": self._choice.name,
            "link": self._choice.given,
            "grad_scaler": self._loss_scale.scaler,
            "start_step": self.start_step,
        }
        return {"made": made, "state": self.state_dict() if self._names else self._to_load}

    def __setstate__(self, copied: dict) -> None:
        self.__init__(**copied["made"])
        self._to_load = copied["state"]

    def _require_bound(self, op: str) -> None:
        if not self._names:
            checks.fail(op, "state", "bound to its DDP (bind, or the first step)", "none")

    def _reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        if not isinstance(bucket, dist.GradBucket):
            got = f"{type(bucket).__name__}, as with torch._dynamo's optimize_ddp='python_reducer'"
            checks.fail("dct_hook", "bucket", "a torch.distributed.GradBucket", got, TypeError)
        if not self._names:
            self.bind(model.ddp_of(bucket.parameters()[0]))
        if self._executor is None:
            checks.fail("dct_hook", "state", "open", "one that was closed")
        index, buffer = bucket.index(), bucket.buffer()
        if index not in (0, self._next_index):
            checks.fail("dct_hook", "bucket", f"number {self._next_index}, in order", index)
        plan = self._buckets.plan(index, bucket)
        if index == 0:
            self._finish_last_step(plan)
            self._run.begin_step(self.step)
            self._loss_scale.begin()
        if self.step < self.start_step:
            job = partial(self._reduce_dense, buffer)
        else:
            compressed = self._buckets.bucket(index, plan, self.step - self.start_step)
            job = partial(self._reduce_compressed, compressed, buffer)
        result = self._executor.submit(job)
        self._next_index = index + 1
        if bucket.is_last():
            self._next_index = 0
            self.step += 1
        return result

    # On the executor:

    def _reduce_dense(self, buffer: Tensor) -> Tensor:
        with record_function("dct::exchange_dense"):
            return buffer.copy_(dense_mean(buffer, torch.bfloat16, self._group))

    def _reduce_compressed(self, bucket: Bucket, buffer: Tensor) -> Tensor:
        bucket.reduce(buffer, self._loss_scale.value, self._loss_scale.inverse)
        return buffer

    # On the thread of the backward pass:

    def _finish_last_step(self, first: BucketPlan | None = None) -> None:
        """Learn how the last step went; raise if a payload was damaged.

        Args:
            first: what is sent for the first bucket of the next step, where that begins. Then the
                others can be told, unless buckets have changed: theirs are not known here.
        """
        self._look_at_last_step()
        if first is not None and self._damage.take_untold() and self._buckets.holds(0, first):
            self._tell_damage()
        self._damage.require_none()
        if self._loss_scale.skipped():
            for bucket in self._buckets.in_order():
                bucket.take_back()

    def _tell_damage(self) -> None:
        """Take part in the others' step so far that they learn of the damage, and wait for it."""
        said = [self._executor.submit(bucket.tell_damage) for bucket in self._buckets.in_order()]
        with contextlib.suppress(RuntimeError):  # of peers that are gone
            for word in said:
                word.wait()
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()

    def _look_at_last_step(self) -> None:
        with record_function("dct::wait"):
            reports = self._buckets.take_reports()
        if not reports:
            return
        receipts = {index: report.receipt for index, report in reports.items()}
        self._damage.look(self.step - 1, receipts)
        self._loss_scale.saw(overflow=any(r.non_finite for r in receipts.values()))
        payloads = sum(receipt.payloads for receipt in receipts.values())
        if payloads:
            compressed = sum(report.compressed for report in reports.values())
            sent = sum(report.compressed_sent for report in reports.values())
            late = sum(receipt.overflowed for receipt in receipts.values())
            self._history.add(density=sent / max(compressed, 1), overflow=late / payloads)


def dct_hook(state: DCTState, bucket: dist.GradBucket) -> Future[Tensor]:
    """DDP communication hook: the mean of the gradients over the ranks, compressed.

    Register with `ddp.register_comm_hook(state, dct_hook)`. The mean is written into the bucket,
    bitwise the same on every rank. What did not pass the threshold waits in the state's residual.

    Raises:
        RuntimeError: a payload was damaged on its way to this rank in the step before, or to
            another in the one before that. The weights took that step without the damaged parts: go
            back to a checkpoint.
    """
    return state._reduce(bucket)
