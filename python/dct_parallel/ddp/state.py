"""DCT for torch's DistributedDataParallel: a state and a communication hook.

    state = DCTState(ddp, density=0.005)
    ddp.register_comm_hook(state, dct_hook)

In a step every bucket is packed, exchanged and unpacked during the backward pass, in the same order
on every rank. The host reads the results of a step (damage, overflow) at the end of the next one.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

# DDP's constructor imports it. Its functions' defaults hold the default group, if there is one by
# then, until Python ends, and a thread of gloo that still finishes its work aborts the process.
import torch.distributed.nn.functional
from torch import Tensor
from torch.amp import GradScaler
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from dct_kernels import checks

from .._torch import NO_PASS, at_end_of_backward, backward_pass, comm_hooks, current_node
from ..compressor import warn_of_eager
from ..exchange.bucket import Complete, Start, parameter_stats, run_now
from ..exchange.checkpoint import Flat, Run
from ..exchange.first_step import FirstStep
from ..exchange.ledger import StepLedger
from ..exchange.loss_scale import Optimizers, loss_scale_of
from ..exchange.plan import describe, keeps_owners, plan_table
from ..exchange.settings import Settings
from ..groups import refusing
from .buckets import Buckets, reduce_parts
from .executors import Executor, executor_for
from .node import Topology
from .parameters import device_of, named_parameters


class DCTState:
    """The state of `dct_hook`: residuals, thresholds and where to send payloads.

    Dynamic Communication Thresholding, data-parallel side (arXiv 2010.08899), or every entry in few
    bits. Construct it on every rank, register it once, and keep `state_dict()` in the checkpoint of
    every rank: residuals differ between ranks. The mean is deterministic, and bitwise the same on
    every rank. Memory: 4 bytes per parameter, and each bucket's payload once per rank. What happens
    in a step, what may fail, and limits: docs/guide/ddp.md.

    Args:
        ddp: the model the hook is registered with; dense gradients, on one CPU or CUDA device.
            None if it is not made yet: `bind` it before the first step.
        density: fraction of each bucket's entries sent per step, in (0, 1]; default 0.005, and 1 in
            few bits. 1 % is 0.01.
        format: of what is sent, a name or a torch dtype. "bfloat16" (the default) or "float32": the
            largest entries, or at density 1 all of them, whole. "int8", "int4" or "ternary": every
            entry in few bits.
        transport: how payloads reach the other ranks, "all_gather" or "reduce_scatter"; None: by
            the number of ranks and the format (docs/guide/choosing.md).
        process_group: ranks to average over, this one among them; default those of `ddp`.
        mesh: the ranks of `ddp` as a DeviceMesh of dimensions ("node", "local"): dense inside a
            node, compressed between nodes. See `node_mesh` and docs/guide/cluster.md.
        grad_scaler: the GradScaler that scales the loss, or None. If it skips a step, the entries
            that were sent return to the residual.
        optimizer: the optimizer of these parameters, or a list of several; needed with an enabled
            `grad_scaler`, to see which steps it skips.
        start_step: steps before compression; they average in bfloat16.
        policy: "fresh": the threshold is sampled in every step; or "fixed", the paper's way: in
            every `refresh_every`-th, and after a load; see `Compressor`.
        refresh_every: steps between samples of the threshold, with policy "fixed".

    Attributes:
        step: steps taken.
        node_group: the group inside a node of a mesh, for one who counts bytes; or None.
        copied: whether this is a copy (deepcopy and pickle of the DDP reach this state), which has
            the settings only and cannot be used.

    Raises:
        ValueError, TypeError: an argument is out of its range, a parameter cannot be compressed, or
            ranks differ; the text names it.
        RuntimeError: a different rank raised, as the text says, or did not construct its state
            within the group's timeout.
    """

    copied = False  # by deepcopy or pickle

    @checks.names_keywords
    def __init__(
        self,
        ddp: DistributedDataParallel | None = None,
        *,
        density: float | None = None,
        format: str | torch.dtype | None = None,
        transport: str | None = None,
        process_group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        grad_scaler: GradScaler | None = None,
        optimizer: Optimizers | None = None,
        start_step: int = 2,
        policy: str = "fresh",
        refresh_every: int = 1000,
    ) -> None:
        op = "DCTState"
        self._process_group, self._mesh = process_group, mesh
        with refusing(op, self._group_with(ddp)):
            self.settings = Settings.checked(op, density, format, transport, policy, refresh_every)
            if mesh is not None and process_group is not None:
                raise ValueError(
                    f"dct::{op}: process_group must be None with a mesh, got {process_group}"
                )
            self._loss_scale = loss_scale_of(op, grad_scaler, optimizer)
            checks.require_int(op, "start_step", start_step, 0, 2**63 - 1)
        self.start_step = start_step
        self._in_step = False  # from the first bucket of a backward pass to its end
        self._next_index = 0
        self._pass = NO_PASS  # the backward pass whose end is awaited

        # Once bound to a DDP:
        self._names: dict[Parameter, str] = {}
        self._topology: Topology
        self._ledger: StepLedger
        self.node_group: dist.ProcessGroup | None = None
        self._buckets: Buckets
        self._executor: Executor | None = None
        self._warned = False  # that no hook is registered
        if ddp is not None:
            self.bind(ddp)

    def bind(self, ddp: DistributedDataParallel) -> None:
        """Attach a state that was made without its DDP; on every rank, like the constructor.

        Raises:
            ValueError: the state is bound already; or as the constructor.
        """
        if self.copied:
            self._require_usable("bind")
        group = self._group_with(ddp)
        with refusing("DCTState", group):
            names = named_parameters(ddp)
            if self._names:
                raise ValueError("dct::DCTState: state must be bound to one DDP only, got a second")
            device = device_of(names)
            if self._loss_scale is not None:
                self._loss_scale.watch(names)
            topology = Topology("DCTState", group, self._mesh, device)
        warn_of_eager(device.type)
        self._ledger = StepLedger(
            "DCTState",
            topology.everyone,
            device,
            self.settings,
            {"model": describe(names), "mesh": topology.layout},
            self._loss_scale,
            self.start_step,
        )
        self._ledger.first_step = FirstStep("DCTState", names, self.settings, self._loss_scale)
        topology.open(self._ledger.run_id)
        self._buckets = Buckets(names, self.settings, topology, device)
        self._topology, self.node_group = topology, topology.node.group
        sends_once = not keeps_owners(self.settings, topology.between.size())
        self._executor = executor_for(device, sends_once and topology.node.size == 1)
        self._ledger.submit = self._executor.submit_after
        self._names = names  # bound
        self._hooks = comm_hooks(ddp)

    def _group_with(self, ddp: DistributedDataParallel | None) -> dist.ProcessGroup | None:
        """The ranks to average over; None if they are not known without a DDP."""
        of_ddp = getattr(ddp, "process_group", None)
        return of_ddp if self._process_group is None else self._process_group

    @property
    def step(self) -> int:
        return self._ledger.step if self._names else 0

    def close(self) -> None:
        """Wait for the last step, and end the thread, if any, and the process groups of this state.

        It takes no further step; `stats` and the like still answer. Idempotent.

        Raises:
            RuntimeError: a payload was damaged. The state is closed all the same.
        """
        if self._executor is not None:
            self._executor.close()
            self._executor, self._ledger.submit = None, run_now
            self._topology.close()
            self._ledger.end_first_step()
        if self._names:
            self._finish_last_step("close")

    def plan(self) -> str:
        """The bytes and the capacity of each bucket in a compressed step, as a table.

        DDP's buckets are not known until compression has started: one is assumed, and the last line
        says so. From then on bytes are exact, as in `stats()`.

        Raises:
            ValueError: the state is not bound to a DDP yet.
            RuntimeError: this rank received a damaged payload.
        """
        self._require_usable("plan")
        device = device_of(self._names)
        plans = self._buckets.plans()
        table = plan_table(plans, device)
        table += self._topology.node.sentence(self._buckets.node_bytes())
        if not self._buckets.in_order():
            table += "\nOne bucket is assumed: DDP's are known from the first compressed step on."
        return table

    def stats(self) -> dict[str, float | int | None]:
        """Means of the last 100 steps, and the bytes of a step. Waits for the last step.

        - `step`: steps taken.
        - `density`: entries that this rank sent over those that were compressed; None before any.
        - `overflow`: fraction of payloads, of all ranks, with less room than entries that passed;
          None before any.
        - `wire_bytes`: bytes sent per rank and compressed step, with a mesh those to other nodes.
          Messages have a fixed size, so this is the same in every step and on ranks of equal part.
          None before any.

        Raises:
            ValueError: the state is not bound to a DDP yet.
            RuntimeError: a payload was damaged.
        """
        self._finish_last_step("stats")
        return self._ledger.stats(self._buckets.plans())

    def parameter_stats(self) -> dict[str, dict[str, float]]:
        """{parameter: figures of the last step on this rank}, for any logger. Waits for the device.

        `density`: values sent that are not 0, over elements; `threshold`: of the payload that its
        first element belongs to; `residual_norm`: Euclidean norm of its residual, in unscaled
        units. Empty before compression starts, and after a load until the next step. Allocates a
        bucket in float32.

        Raises:
            ValueError: the state is not bound to a DDP yet.
            RuntimeError: a payload was damaged.
        """
        self._finish_last_step("parameter_stats")
        return parameter_stats(self._buckets.in_order())

    def take_back(self) -> None:
        """Return the entries of the last step to the residuals, for a step that you do not apply.

        Otherwise they would be lost: gradients of the step, and of many steps before it.
        Call it on every rank, after the backward pass and before the next one; it waits for all:

            norm = torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            if not norm.isfinite():  # on all ranks, as their gradients are the same
                state.take_back()
                optimizer.zero_grad()
                continue

        Exact for finite gradients (owners' residuals with "reduce_scatter": to float32 rounding).
        NaN and Inf are dropped, in few bits with the 64 gradients that share a scale; with a mesh,
        so is the rest of that entry of the node's mean. If several backward passes were exchanged,
        as DDP adds them up, all of them are taken back. Called again, or after a GradScaler skipped
        the step, it does nothing. If an exchange failed, it does not wait for other ranks.

        Raises:
            ValueError: the state is not bound to a DDP yet, or ranks have taken different steps.
            RuntimeError: a payload was damaged, or a rank did not call this within the group's
                timeout. Nothing was taken back.
        """
        self._require_usable("take_back")
        self._ledger.compare_step("take_back")
        self._finish_last_step("take_back")
        self._ledger.take_back()

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals by parameter name, and the step. Copies, on the CPU.

        Call it between steps: after the optimizer's step (and the scaler's update), before the next
        backward pass. For `torch.save`, one file per rank. torch.distributed.checkpoint takes the
        state itself, {"dct": state} (deeper in a dict, only this method's result), and calls this
        on loading as well, for the shapes: all parameters are in it from the start.

        Raises:
            ValueError: the state is not bound to a DDP yet.
            RuntimeError: a payload was damaged. Or an exchange failed, as if a rank is gone: call
                `take_back` first, because what was sent in it is in no weights.
        """
        self._require_usable("state_dict")
        self._ledger.require_exchanged("state_dict")
        self._finish_last_step("state_dict")
        return self._run().save(
            self._buckets.states(),
            run_id=self._ledger.run_id,
            step=self.step,
            buckets=self._buckets.names(),
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict`, each rank from its own, or all from one of `merge_states`.

        Every rank loads before any of them takes a step. The next step compares run and step, and
        waits for late ranks, up to the group's timeout. A refused dict changes nothing.

        Raises:
            ValueError: made with a different version, density, number of ranks or mesh, by a
                different rank, or for a different model; something in it is missing, of a wrong
                type or shape or not finite; or this state is not bound to a DDP yet.
            TypeError: not a state dict.
            RuntimeError: this state received a damaged payload: load into a new one.
        """
        self._require_usable("load_state_dict")
        entry, states = self._run().find(state)
        self._buckets.load(states, entry["buckets"])  # before what cannot fail
        self._ledger.load(entry)
        self._in_step = False

    def _run(self) -> Run:
        """This rank, for checkpoints."""
        same = {
            "density": self.settings.density,
            "world_size": self._topology.everyone.size(),
            "local_size": self._topology.node.size,
        }
        sizes = {name: Flat(parameter.numel()) for parameter, name in self._names.items()}
        return Run("rank", self._ledger.rank, self.settings.format, same, sizes)

    def __getstate__(self) -> dict[str, Any]:
        """The settings, because DDP, process groups and threads cannot be copied."""
        own = {"settings": self.settings, "start_step": self.start_step, "node_group": None}
        return {**own, "copied": True, "_names": {}, "_executor": None}

    def _require_usable(self, op: str) -> None:
        if self.copied:
            raise ValueError(
                f"dct::{op}: state must be one made by DCTState(ddp), got a copy, which has the "
                "settings only: make a new one"
            )
        if not self._names:
            raise ValueError(
                f"dct::{op}: state must be bound to its DDP by state.bind(ddp), got an unbound one"
            )
        self._ledger.require_intact()

    def _reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        if not isinstance(bucket, dist.GradBucket):
            raise TypeError(
                "dct::dct_hook: bucket must be a torch.distributed.GradBucket, got "
                f"{checks.shown(bucket)}, as with torch._dynamo's optimize_ddp='python_reducer'"
            )
        if self._executor is None:
            self._require_usable("dct_hook")
            raise ValueError("dct::dct_hook: state must be open, got a closed one")
        # Detached: with create_graph=True DDP's buffer has a graph, and is written here.
        index, buffer = bucket.index(), bucket.buffer().detach()
        increment_version(buffer)
        # DDP's buckets are in order within a backward pass.
        if not self._in_step or index < self._next_index:
            self._begin_step()
        self._next_index = index + 1
        parts = self._buckets.parts(index, bucket)
        if parts is None:
            job: Start = partial(self._launch(index), buffer)
        else:
            launches = [(parameters, self._launch(number)) for number, parameters in parts.items()]
            job = partial(reduce_parts, bucket.parameters(), launches, buffer)
        mean = self._executor.submit(self._ledger.watch(job), buffer)
        self._await_end(bucket)
        return mean

    def _begin_step(self) -> None:
        self._ledger.begin("dct_hook")
        self._buckets.begin()
        self._in_step, self._pass = True, NO_PASS

    def _await_end(self, bucket: dist.GradBucket) -> None:
        """Call `_end_pass` at the end of the backward pass that this bucket is of."""
        if current_node() is None and self._executor is not None:
            self._executor.complete()  # DDP waits for this bucket before anything else is called
        backward = backward_pass()
        if backward == NO_PASS:  # for a rank that has joined, DDP calls the hook for each bucket
            if bucket.is_last():
                self._end_pass(nested=False)
        elif backward != self._pass:
            self._pass = backward
            at_end_of_backward(self._end_pass)

    def _end_pass(self, nested: bool) -> None:
        if self._executor is not None:
            self._executor.complete()
        if self._in_step and not nested:  # in a pass with others nested in it this is called twice
            self._in_step = False
            self._ledger.end()

    def _launch(self, number: int) -> Callable[[Tensor], Complete | None]:
        """Starts to reduce the gradients of a bucket in this step, as one flat tensor."""
        if self._ledger.packed < 0:
            return self._topology.reduce_densely
        self._ledger.sent[number] = bucket = self._buckets.bucket(number, self._ledger.packed)
        scale, inv_scale = self._ledger.scales
        return partial(bucket.launch, scale=scale, inv_scale=inv_scale)

    def _finish_last_step(self, op: str) -> None:
        self._require_usable(op)
        self._warn_if_unused()
        self._ledger.finish()

    def _warn_if_unused(self) -> None:
        # A copied DDP has copies of states, whose hooks are not called.
        registered = any(s is self or not isinstance(s, DCTState) for _, s in self._hooks)
        if self._warned or registered:
            return
        if any(parameter.grad is not None for parameter in self._names):
            self._warned = True
            warnings.warn(
                "DCT: there are gradients, but no hook is registered with the DDP for this state, "
                "so it did not compress them: call ddp.register_comm_hook(state, dct_hook).",
                stacklevel=4,
            )


def dct_hook(state: DCTState, bucket: dist.GradBucket) -> Future[Tensor]:
    """DDP communication hook: the mean of the gradients over the ranks, compressed.

    Register with `ddp.register_comm_hook(state, dct_hook)`. Mutates the bucket, which becomes the
    mean, bitwise the same on every rank, and the state: entries below the threshold stay in its
    residual. Deterministic. With torch.compile, DDP's Python reducer is not supported.

    Args:
        state: of the DDP that it is registered with, open.
        bucket: DDP's, of float32, bfloat16 or float16 gradients.

    Returns:
        A future of the bucket's buffer, in its dtype.

    Raises:
        TypeError: `state` is not a DCTState, or `bucket` not a GradBucket.
        ValueError: `state` is closed, not bound or of a different model.
        RuntimeError: this rank received a damaged payload, in the step before or earlier. The
            weights took that step without it, or its damaged blocks: load a checkpoint into a new
            state.
    """
    if not isinstance(state, DCTState):
        raise TypeError(
            "dct::dct_hook: state must be a DCTState, as in "
            f"ddp.register_comm_hook(DCTState(ddp), dct_hook), got {checks.shown(state)}"
        )
    return state._reduce(bucket)
