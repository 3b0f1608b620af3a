"""DCT for torch's DistributedDataParallel: a state and a communication hook.

    state = DCTState(ddp, density=0.005)
    ddp.register_comm_hook(state, dct_hook)

In a step every bucket is packed, exchanged and unpacked beside the backward pass, in bucket order
on every rank. One element more in the dense part tells every rank whether any of them received a
damaged payload; nobody looks at it before the next step, whose first hook raises it everywhere.
"""

import uuid
from datetime import timedelta
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

from dct_kernels import __version__, checks

from .. import groups
from ..agreement import Agreement, require_same
from ..collectives import dense_mean
from ..compressor import check_settings
from ..executors import StreamExecutor, ThreadExecutor, executor_for
from . import checkpoint, model
from .bucket import Bucket, describe_damage
from .bucket_plan import BucketPlan, Settings, plan_table, step_bytes
from .history import History
from .loss_scale import LossScale
from .transports import resolve_transport

LOAD_PATIENCE = timedelta(seconds=5)  # between a rank's first hook after a load and others' loads


class DCTState:
    """What `dct_hook` needs between steps: residuals, thresholds and where to send payloads.

    Construct it on every rank of the group, register it once, and keep `state_dict()` in the
    checkpoint of every rank: residuals differ between ranks. `close()` ends the thread and the
    process group that it made; a process may exit without.

    The first `start_step` steps average the gradients densely in bfloat16; DDP rebuilds its buckets
    in that time. Then parameters of 1,024 elements and more are compressed, smaller ones averaged
    densely in `value_dtype` (at density 1 all are compressed). State belongs to parameters, by
    name: should the buckets change later, it moves along. Memory: 4 bytes per parameter, and each
    bucket's payload once per rank.

    What has to be the same on all ranks is compared when the state is bound to its DDP, and at the
    first step after that or a load: every rank raises, naming all values. Waits for other ranks end
    at the group's timeout.

    Args:
        ddp: the model the hook is registered with; dense gradients, on one CPU or CUDA device.
            None where there is none yet: `bind` it later, or let the first step find it.
        density: fraction of each parameter's entries sent per step, in (0, 1].
        refresh_every: steps between samples of the thresholds (also at 0, 1, 2, 4, ... 512).
        value_dtype: of the values sent, torch.bfloat16 or torch.float32.
        transport: "gather", or "auto" to let `plan` say.
        process_group: ranks to average over, this one among them; default those of `ddp`.
        grad_scaler: the GradScaler that scales the loss, if one does; a disabled one counts as
            none. Residuals are kept in unscaled units, and what was packed for a step that the
            scaler skipped is taken back.
        start_step: steps before compression.
        policy: of the thresholds between samples, "tracked" or "fixed"; see `Compressor`.

    Gradients may be accumulated over several backward passes, under `ddp.no_sync()` or without (of
    a step that a scaler skips, entries that overflowed are lost then, and the first of a bucket).
    Uneven inputs (`ddp.join()`) are supported. A copy (deepcopy, pickle) takes residuals along and
    is bound to no DDP.

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
    ) -> None:
        check_settings("DCTState", density, refresh_every, policy, value_dtype)
        checks.require_int("DCTState", "start_step", start_step, 0, 2**63 - 1)
        self.settings = Settings(
            density, refresh_every, policy, value_dtype, resolve_transport(transport)
        )
        self._transport_reason = "auto: the only one so far" if transport == "auto" else "as asked"
        self._process_group = process_group
        self._loss_scale = LossScale(grad_scaler)

        self.step = 0
        self.start_step = start_step
        self._next_index = 0
        self._buckets: dict[int, Bucket] = {}
        self._parked: dict[str, checkpoint.SegmentState] = {}  # states waiting for their bucket
        self._failure: str | None = None
        self._history = History()

        # Known once bound to a DDP:
        self._names: dict[Parameter, str] = {}
        self._group: dist.ProcessGroup | None = None
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
        self._agreement = Agreement(given, self._device)
        told = self._agreement.exchange(
            "DCTState",
            {
                "version": __version__,
                "model": model.describe(names),
                "density": float(self.settings.density),
                "refresh_every": self.settings.refresh_every,
                "value_dtype": str(self.settings.value_dtype).removeprefix("torch."),
                "transport": self.settings.transport.name,
                "policy": self.settings.policy,
                "start_step": self.start_step,
                "grad_scaler": "none" if self._loss_scale.scaler is None else "given",
                "run_id": uuid.uuid4().hex,
            },
        )
        self._run_id = next(iter(told.values()))["run_id"]  # the first rank's, until one is loaded
        for values in told.values():
            del values["run_id"]
        require_same("DCTState", told)

        self._checkpoint = "none"
        self._start_compared = False  # whether ranks know that they go on from the same step
        self._patience = None
        self._rank, self._world_size = dist.get_rank(), given.size()
        # On the CPU one of its own, as collectives of the executor's thread must not interleave
        # with those of the main thread. On CUDA both issue theirs from one thread, in order.
        self._owns_group = self._device.type == "cpu"
        self._group = groups.separate_group(given) if self._owns_group else given
        self._executor = executor_for(self._device)
        self._names = names  # bound
        if self._to_load is not None:
            self.load_state_dict(self._to_load)

    def close(self) -> None:
        """End the thread and the process group of this state; called again, nothing.

        It takes no further step. `state_dict()`, `stats()` and `plan()` still answer.
        """
        if self._executor is not None:
            self._executor.close()
            self._executor = None
            if self._owns_group:
                groups.end_group(self._group)

    def plan(self) -> str:
        """What is sent for each parameter in a compressed step, as a table.

        Until compression has started DDP's buckets are not known and one is assumed; each further
        one adds about a hundred bytes.
        """
        self._require_bound("plan")
        return plan_table(self._plans(), self._world_size, self._transport_reason)

    def stats(self) -> dict[str, float | int | None]:
        """How the last 100 steps went, and what a step costs. Waits for the last step.

        `step`: steps taken; `density`: entries sent over entries compressed, a mean over steps and
        ranks (None before compression starts); `overflow`: fraction of payloads, of all ranks, that
        were too small for what passed; `wire_bytes`: what this rank sends in a compressed step.
        """
        self._require_bound("stats")
        self._finish_last_step()
        return {
            "step": self.step,
            "density": self._history.density,
            "overflow": self._history.overflow,
            "wire_bytes": step_bytes(self._plans(), self._world_size),
        }

    def state_dict(self) -> dict:
        """This rank's residuals and thresholds by parameter name, and the step. Copies, on the CPU.

        Call it between steps: after the optimizer's step (and the scaler's update), before the next
        backward pass. For `torch.save`, one file a rank. torch.distributed.checkpoint takes the
        state itself, {"dct": state} (deeper in a dict, only what this returns), and calls this on
        loading as well, for the shapes: all parameters are in it from the start.

        Raises:
            ValueError: the state is not bound to a DDP yet.
            RuntimeError: a payload of the last step was damaged, see `dct_hook`.
        """
        self._require_bound("state_dict")
        self._finish_last_step()
        parameters = {name: checkpoint.fresh(n) for name, n in self._compressed_sizes().items()}
        for name, state in self._parked.items():
            parameters[name] = {part: value.clone() for part, value in state.items()}
        for bucket in self._buckets.values():
            parameters |= bucket.states()
        entry = checkpoint.Entry(
            run_id=self._run_id,
            world_size=self._world_size,
            step=self.step,
            density=self.settings.density,
            parameters=parameters,
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
        sizes, density = self._compressed_sizes(), self.settings.density
        entry = checkpoint.find(state, self._rank, self._world_size, density, sizes)
        if self._start_compared:  # others may train on, and never look here
            self._patience = LOAD_PATIENCE
        self._start_compared = False
        self._checkpoint = f"one of {entry['world_size']} ranks"
        self._run_id = entry["run_id"]
        self._failure = None
        self._loss_scale.saw(overflow=False)
        self._next_index = 0
        self.step = entry["step"]
        self._buckets.clear()
        self._parked = dict(entry["parameters"])

    def __getstate__(self) -> dict:
        """Settings and residuals: neither DDP nor process group nor thread can be copied."""
        made = {
            "density": self.settings.density,
            "refresh_every": self.settings.refresh_every,
            "value_dtype": self.settings.value_dtype,
            "transport": self.settings.transport.name,
            "grad_scaler": self._loss_scale.scaler,
            "start_step": self.start_step,
            "policy": self.settings.policy,
        }
        return {"made": made, "state": self.state_dict() if self._names else self._to_load}

    def __setstate__(self, copied: dict) -> None:
        self.__init__(**copied["made"])
        self._to_load = copied["state"]

    def _require_bound(self, op: str) -> None:
        if not self._names:
            checks.fail(op, "state", "bound to its DDP (bind, or the first step)", "none")

    def _compressed_sizes(self) -> dict[str, int]:
        """{name: numel} of the parameters that are compressed."""
        sizes = {name: parameter.numel() for parameter, name in self._names.items()}
        return {name: n for name, n in sizes.items() if not self.settings.is_dense(n)}

    def _plans(self) -> list[BucketPlan]:
        if self._buckets:
            return [bucket.plan for _, bucket in sorted(self._buckets.items())]
        sizes = tuple(parameter.numel() for parameter in self._names)
        return [BucketPlan(tuple(self._names.values()), sizes, self.settings)]

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
        if index == 0:
            self._begin_step()
        plan = self._layout(bucket)
        if self.step < self.start_step:
            job = partial(self._reduce_dense, buffer)
        else:
            job = partial(self._reduce_compressed, self._bucket(index, plan), buffer)
        result = self._executor.submit(job)
        self._next_index = index + 1
        if bucket.is_last():
            self._next_index = 0
            self.step += 1
        return result

    # On the executor:

    def _reduce_dense(self, buffer: Tensor) -> Tensor:
        return buffer.copy_(dense_mean(buffer, torch.bfloat16, self._group))

    def _reduce_compressed(self, bucket: Bucket, buffer: Tensor) -> Tensor:
        bucket.reduce(buffer, self._loss_scale.value, self._loss_scale.inverse)
        return buffer

    # On the thread of the backward pass:

    def _begin_step(self) -> None:
        self._finish_last_step()
        if not self._start_compared:
            self._compare_start()
        self._loss_scale.begin()

    def _compare_start(self) -> None:
        """Raise on every rank if they do not go on from the same step of the same run."""
        start = {"checkpoint": self._checkpoint, "run_id": self._run_id, "step": self.step}
        told = self._agreement.exchange("load_state_dict", start, self._patience)
        require_same("load_state_dict", told)
        self._start_compared = True

    def _finish_last_step(self) -> None:
        """Learn how the last step went; raise on every rank if a payload of it was damaged."""
        if self._failure is not None:
            raise RuntimeError(self._failure)
        self._read_reports()
        if self._loss_scale.skipped():
            for bucket in self._buckets.values():
                bucket.take_back()

    def _read_reports(self) -> None:
        taken = {index: bucket.take_report() for index, bucket in self._buckets.items()}
        reports = {index: report for index, report in taken.items() if report is not None}
        if not reports:
            return
        if any(report.damaged_anywhere for report in reports.values()):
            self._failure = describe_damage(self.step - 1, reports)
            raise RuntimeError(self._failure)
        self._loss_scale.saw(overflow=any(report.non_finite for report in reports.values()))
        compressed = sum(bucket.plan.compressed_numel for bucket in self._buckets.values())
        packed = sum(report.packed for report in reports.values())
        payloads = sum(report.payloads for report in reports.values())
        self._history.add(
            density=packed / max(compressed * self._world_size, 1),
            overflow=sum(report.overflowed for report in reports.values()) / max(payloads, 1),
        )

    def _layout(self, bucket: dist.GradBucket) -> BucketPlan:
        parameters = bucket.parameters()
        if any(parameter not in self._names for parameter in parameters):
            rule = "made from the DDP that the hook is registered with"
            checks.fail("dct_hook", "state", rule, "a bucket with parameters of another model")
        if bucket.buffer().layout != torch.strided:
            got = "a sparse one: build embeddings with sparse=False"
            checks.fail("dct_hook", "gradient", "dense", got)
        names = tuple(self._names[parameter] for parameter in parameters)
        return BucketPlan(names, tuple(p.numel() for p in parameters), self.settings)

    def _bucket(self, index: int, plan: BucketPlan) -> Bucket:
        """The bucket of this plan: made anew, from its parameters' states, on a new layout."""
        known = self._buckets.get(index)
        if known is not None and known.plan == plan:
            return known
        # Buckets before this one are as they were, and may be at work. So this and later ones hold
        # the same parameters as before, dealt out differently.
        for later in [i for i in self._buckets if i >= index]:
            self._parked |= self._buckets.pop(later).states()
        states = {name: self._parked.pop(name) for name in plan.names if name in self._parked}
        made = Bucket(plan, self._group, self._device, self.step - self.start_step, states)
        self._buckets[index] = made
        return made


def dct_hook(state: DCTState, bucket: dist.GradBucket) -> Future[Tensor]:
    """DDP communication hook: the mean of the gradients over the ranks, compressed.

    Register with `ddp.register_comm_hook(state, dct_hook)`. The mean is written into the bucket,
    bitwise the same on every rank. What did not pass the threshold waits in the state's residual.

    Raises:
        RuntimeError: a payload of the last step was damaged on its way to some rank. Every rank
            raises. The weights took that step without the damaged parts: go back to a checkpoint.
    """
    return state._reduce(bucket)
