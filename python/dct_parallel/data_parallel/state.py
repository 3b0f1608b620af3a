"""DCT for torch's DistributedDataParallel: a state and a communication hook.

    state = DCTState(ddp, density=0.005)
    ddp.register_comm_hook(state, dct_hook)

In a step every bucket is packed, exchanged and unpacked beside the backward pass, in bucket order
on every rank. One element more in the dense part tells every rank whether any of them received a
damaged payload; nobody looks at it before the next step, whose first hook raises it everywhere.
"""

from functools import partial

import torch
import torch.distributed as dist

# DDP's constructor imports it. Its functions' defaults hold the default group, if there is one by
# then, until Python ends, and a thread of gloo that still finishes its work aborts the process.
import torch.distributed.nn.functional
from torch import Tensor
from torch.amp import GradScaler
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from dct_kernels import checks

from ..collectives import dense_mean
from ..compressor import check_settings
from ..executors import executor_for
from . import checkpoint
from .bucket import Bucket, describe_damage
from .bucket_plan import BucketPlan, Settings, plan_table, step_bytes
from .history import History
from .transports import resolve_transport


class DCTState:
    """What `dct_hook` needs between steps: residuals, thresholds and where to send payloads.

    Construct it on every rank of the group (it makes a process group of its own), register it once,
    and keep `state_dict()` in the checkpoint of every rank: residuals differ between ranks.

    The first `start_step` steps average the gradients densely in bfloat16; DDP rebuilds its buckets
    in that time. Then parameters of 1,024 elements and more are compressed, smaller ones averaged
    densely in `value_dtype` (at density 1 all are compressed). State belongs to parameters, by
    name: should the buckets change later, it moves along. Memory: 4 bytes per parameter, and each
    bucket's payload once per rank.

    Args:
        ddp: the model the hook is registered with; dense gradients, on one CPU or CUDA device.
        density: fraction of each parameter's entries sent per step, in (0, 1].
        refresh_every: steps between samples of the thresholds (also at 0, 1, 2, 4, ... 512).
        value_dtype: of the values sent, torch.bfloat16 or torch.float32.
        transport: "gather", or "auto" to let `plan` say.
        process_group: ranks to average over; default those of `ddp`. Dense inside a node and DCT
            between nodes: give the group of one rank per node, average inside first.
        grad_scaler: the GradScaler that scales the loss, if one does. Residuals are kept in
            unscaled units, and what was packed for a step that the scaler skipped is taken back.
        start_step: steps before compression starts.
        policy: of the thresholds between samples, "tracked" or "fixed"; see `Compressor`.

    Limits: with find_unused_parameters, DDP drops the result for a parameter that no rank used in a
    step, and with it what the residual sent. One optimizer per GradScaler, as a skipped step is
    taken back for all parameters. Uneven inputs (`ddp.join`) are not supported.

    Raises:
        ValueError, TypeError: an argument is out of its range; the text names it.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        density: float = 0.005,
        refresh_every: int = 1000,
        value_dtype: torch.dtype = torch.bfloat16,
        transport: str = "auto",
        process_group: dist.ProcessGroup | None = None,
        grad_scaler: GradScaler | None = None,
        start_step: int = 2,
        policy: str = "tracked",
    ) -> None:
        if not isinstance(ddp, DistributedDataParallel):
            got = type(ddp).__name__
            checks.fail("DCTState", "ddp", "a DistributedDataParallel", got, TypeError)
        if grad_scaler is not None and not isinstance(grad_scaler, GradScaler):
            got = type(grad_scaler).__name__
            checks.fail("DCTState", "grad_scaler", "a torch.amp.GradScaler", got, TypeError)
        check_settings("DCTState", density, refresh_every, policy, value_dtype)
        checks.require_int("DCTState", "start_step", start_step, 0, 2**63 - 1)
        self.settings = Settings(
            density, refresh_every, policy, value_dtype, resolve_transport(transport)
        )
        self._transport_reason = "auto: the only one so far" if transport == "auto" else "as asked"
        self._names = {
            parameter: name
            for name, parameter in ddp.module.named_parameters()
            if parameter.requires_grad and name not in ddp.parameters_to_ignore
        }
        self._device = next(iter(self._names)).device
        if self._device.type not in ("cpu", "cuda"):
            checks.fail("DCTState", "ddp", "on the CPU or on CUDA", self._device)
        # Of its own: collectives of the executor never interleave with those of the main thread.
        group = ddp.process_group if process_group is None else process_group
        self._group = dist.new_group(
            dist.get_process_group_ranks(group),
            backend=dist.get_backend(group),
            use_local_synchronization=True,
            group_desc="dct",
        )
        self._executor = executor_for(self._device)
        self._grad_scaler = grad_scaler
        self._scale: Tensor | None = None
        self._inv_scale: Tensor | None = None

        self.step = 0
        self.start_step = start_step
        self._next_index = 0
        self._buckets: dict[int, Bucket] = {}
        self._parked: dict[str, dict[str, Tensor]] = {}  # states waiting for their bucket
        self._failure: str | None = None
        self._history = History()

    def plan(self) -> str:
        """What is sent for each parameter in a compressed step, as a table.

        Until compression has started DDP's buckets are not known and one is assumed; each further
        one adds about a hundred bytes.
        """
        plans = self._plans()
        return plan_table(plans, self._group.size(), self._transport_reason)

    def stats(self) -> dict[str, float | int | None]:
        """How the last 100 steps went, and what a step costs. Waits for the last step.

        `step`: steps taken; `density`: entries sent over entries compressed, a mean over steps and
        ranks (None before compression starts); `overflow`: fraction of payloads, of all ranks, that
        were too small for what passed; `wire_bytes`: what this rank sends in a compressed step.
        """
        self._finish_last_step()
        return {
            "step": self.step,
            "density": self._history.density,
            "overflow": self._history.overflow,
            "wire_bytes": step_bytes(self._plans(), self._group.size()),
        }

    def state_dict(self) -> dict:
        """This rank's residuals and thresholds by parameter name, and the step. Copies.

        Call it between steps: after the optimizer's step, before the next backward pass.
        """
        self._finish_last_step()
        parameters = dict(self._parked)
        for bucket in self._buckets.values():
            parameters |= bucket.states()
        return checkpoint.make(self.step, self.settings.density, parameters)

    def load_state_dict(self, state: dict) -> None:
        """Go on from a `state_dict`, each rank from its own.

        For another number of ranks give every rank the mean of the old ranks' residuals (and of
        their thresholds and references): that keeps what is still to be applied.

        Raises:
            ValueError: made with another version or density, or for another model.
        """
        sizes = {name: parameter.numel() for parameter, name in self._names.items()}
        compressed = {n: size for n, size in sizes.items() if not self.settings.is_dense(size)}
        checkpoint.check(state, self.settings.density, compressed)
        self._failure = None
        self.step = state["step"]
        self._buckets.clear()
        self._parked = dict(state["parameters"])

    def _plans(self) -> list[BucketPlan]:
        if self._buckets:
            return [bucket.plan for _, bucket in sorted(self._buckets.items())]
        sizes = tuple(parameter.numel() for parameter in self._names)
        return [BucketPlan(tuple(self._names.values()), sizes, self.settings)]

    def _reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
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
        bucket.reduce(buffer, self._scale, self._inv_scale)
        return buffer

    # On the thread of the backward pass:

    def _begin_step(self) -> None:
        self._finish_last_step()
        self._scale = self._inv_scale = None
        if self._grad_scaler is not None:
            self._scale = self._grad_scaler._scale  # on the device; get_scale() would synchronise
        if self._scale is not None:
            self._inv_scale = self._scale.reciprocal()

    def _finish_last_step(self) -> None:
        """Learn how the last step went; raise on every rank if a payload of it was damaged."""
        if self._failure is not None:
            raise RuntimeError(self._failure)
        taken = {index: bucket.take_report() for index, bucket in self._buckets.items()}
        reports = {index: report for index, report in taken.items() if report is not None}
        if not reports:
            return
        if any(report.damaged_anywhere for report in reports.values()):
            self._failure = describe_damage(self.step - 1, reports)
            raise RuntimeError(self._failure)
        if self._grad_scaler is not None and any(r.non_finite for r in reports.values()):
            for bucket in self._buckets.values():
                bucket.take_back()
        compressed = sum(bucket.plan.compressed_numel for bucket in self._buckets.values())
        packed = sum(report.packed for report in reports.values())
        payloads = sum(report.payloads for report in reports.values())
        self._history.add(
            density=packed / max(compressed * self._group.size(), 1),
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
