"""A DDP communication hook that compresses gradients, and its state.

    state = DCTState(ddp, density=0.005)
    ddp.register_comm_hook(state, dct_hook)

Every bucket is packed, exchanged and unpacked during the backward pass, in the same order on every
rank. The host reads the results of a step (damage, overflow) at the end of the next backward pass.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

# Imported here because DDP's constructor would import this module later. If a default group exists
# at that time, default arguments of the module's functions keep the group alive until Python exits.
# A gloo thread may then abort.
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
from ..compressor import warn_if_eager
from ..exchange.bucket import Complete, Start, parameter_stats, run_now
from ..exchange.checkpoint import Flat, Run
from ..exchange.first_step import FirstStep
from ..exchange.ledger import StepLedger
from ..exchange.loss_scale import Optimizers, loss_scale_of
from ..exchange.plan import describe, keeps_owners, plan_table
from ..exchange.settings import Settings
from ..groups import sharing_errors
from .buckets import Buckets, reduce_parts
from .executors import Executor, executor_for
from .node import Topology
from .parameters import device_of, named_parameters


class DCTState:
    """The state of `dct_hook`: settings, residuals and process groups.

    Construct it on every rank and register it once. Residuals differ between ranks, so save
    `state_dict()` on every rank. The mean is deterministic and bitwise the same on every rank.
    Memory: 4 bytes per parameter, and for each bucket a payload from each rank (with
    reduce-scatter, three payloads). See docs/guide/ddp.md. Source: Dynamic Communication
    Thresholding, data-parallel (arXiv 2010.08899).

    Args:
        ddp: the DDP module, with dense gradients on one CPU or CUDA device. If it does not exist
            yet, pass None and call `bind` before the first step.
        density: fraction of the entries of each bucket sent per step, in (0, 1]; default 0.005, or
            1 with quantized formats. 1 % is 0.01.
        format: a name or a torch dtype. "bfloat16" (default) and "float32" send the largest
            entries, or all entries at density 1. "int8", "int4" and "ternary" send all entries.
        transport: "all_gather" or "reduce_scatter"; None chooses by the number of ranks and the
            format (docs/guide/choosing.md).
        process_group: the ranks to average over, including this one; default: the group of `ddp`.
        mesh: the ranks of `ddp` as a DeviceMesh with dimensions ("node", "local"). Gradients are
            dense inside a node and compressed between nodes. See `node_mesh`.
        grad_scaler: the GradScaler of the loss, or None. If the scaler skips a step, the entries
            that were sent return to the residual.
        optimizer: the optimizer of these parameters, or a list of optimizers. Required with an
            enabled `grad_scaler`, to detect which steps the scaler skips.
        start_step: number of dense steps, averaged in bfloat16, before compression starts.
        refresh_every: steps between samples of the threshold. The paper keeps a threshold for
            thousands of steps. A load samples a new one. See `Compressor`.

    Attributes:
        step: number of steps taken.
        node_group: the intra-node process group when a mesh is used, else None.
        copied: whether deepcopy or pickle made this state. Such a copy has only the settings.

    Raises:
        ValueError, TypeError: an argument is out of range, a parameter cannot be compressed, or
            ranks differ.
        RuntimeError: another rank raised an error, or did not construct its state in time.
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
        refresh_every: int = 1,
    ) -> None:
        op = "DCTState"
        self._process_group, self._mesh = process_group, mesh
        with sharing_errors(op, self._group_with(ddp)):
            self.settings = Settings.checked(op, density, format, transport, refresh_every)
            if mesh is not None and process_group is not None:
                raise ValueError(
                    f"dct::{op}: process_group must be None with a mesh, got {process_group}"
                )
            self._loss_scale = loss_scale_of(op, grad_scaler, optimizer)
            checks.require_int(op, "start_step", start_step, 0, 2**63 - 1)
        self.start_step = start_step
        self._in_step = False  # from the first bucket of a backward pass to its end
        self._next_index = 0
        self._pass = NO_PASS  # the backward pass that has a callback queued for its end

        # Set by `bind`:
        self._names: dict[Parameter, str] = {}
        self._topology: Topology
        self._ledger: StepLedger
        self.node_group: dist.ProcessGroup | None = None
        self._buckets: Buckets
        self._executor: Executor | None = None
        self._warned = False  # whether `_warn_if_unused` has warned
        if ddp is not None:
            self.bind(ddp)

    def bind(self, ddp: DistributedDataParallel) -> None:
        """Attach a state that was constructed without a DDP module. Call it on every rank.

        Raises:
            ValueError: the state is already bound. Also the errors of the constructor.
        """
        if self.copied:
            self._require_usable("bind")
        group = self._group_with(ddp)
        with sharing_errors("DCTState", group):
            names = named_parameters(ddp)
            if self._names:
                raise ValueError("dct::DCTState: state must be bound to one DDP only, got a second")
            device = device_of(names)
            if self._loss_scale is not None:
                self._loss_scale.watch(names)
            topology = Topology("DCTState", group, self._mesh, device)
        warn_if_eager(device.type)
        self._ledger = StepLedger(
            "DCTState",
            topology.all_ranks,
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
        """The group to average over, or None if only a later DDP module determines the group."""
        default = getattr(ddp, "process_group", None)
        return default if self._process_group is None else self._process_group

    @property
    def step(self) -> int:
        return self._ledger.step if self._names else 0

    def close(self) -> None:
        """Wait for the last step, then stop the thread and destroy this state's process groups.

        The hook then raises an error, but methods such as `stats` still work. Idempotent.

        Raises:
            RuntimeError: a payload was damaged. The state is closed nevertheless.
        """
        if self._executor is not None:
            self._executor.close()
            self._executor, self._ledger.submit = None, run_now
            self._topology.close()
            self._ledger.end_first_step()
        if self._names:
            self._finish_last_step("close")

    def plan(self) -> str:
        """Return a table of the bytes and the capacity of each bucket in a compressed step.

        DDP's buckets are unknown until compression has started. Until then the table assumes a
        single bucket, as its last line states. Afterwards the bytes are exact.

        Raises:
            ValueError: the state is not bound yet.
            RuntimeError: this rank received a damaged payload.
        """
        self._require_usable("plan")
        device = device_of(self._names)
        plans = self._buckets.plans()
        table = plan_table(plans, device)
        table += self._topology.node.sentence(self._buckets.node_bytes())
        if not self._buckets.in_order():
            table += "\nOne bucket is assumed until the first compressed step shows DDP's buckets."
        return table

    def stats(self) -> dict[str, float | int | None]:
        """Return means over the last 100 steps, and the bytes per step. Waits for the last step.

        All values except `step` are None before the first compressed step.

        - `step`: number of steps taken.
        - `density`: fraction of the entries that this rank sent.
        - `overflow`: fraction of all ranks' payloads that could not hold all entries above the
          threshold.
        - `wire_bytes`: bytes sent per rank and compressed step; with a mesh, only to other nodes.
          Payloads have a fixed size, so every step sends the same number of bytes.

        Raises:
            ValueError: the state is not bound yet.
            RuntimeError: a payload was damaged.
        """
        self._finish_last_step("stats")
        return self._ledger.stats(self._buckets.plans())

    def parameter_stats(self) -> dict[str, dict[str, float]]:
        """Return {parameter: figures of the last step on this rank}. Waits for the device.

        - `density`: fraction of the elements that were sent with a non-zero value.
        - `threshold`: the threshold of the payload that holds the first element.
        - `residual_norm`: the Euclidean norm of the residual, in units of the unscaled gradient.

        The result is empty before compression starts, and after a load until the next step. The
        call allocates one bucket in float32.

        Raises:
            ValueError: the state is not bound yet.
            RuntimeError: a payload was damaged.
        """
        self._finish_last_step("parameter_stats")
        return parameter_stats(self._buckets.in_order())

    def take_back(self) -> None:
        """Return the entries of the last step to the residuals, for a step that you do not apply.

        Without this call, the sent entries are lost. They contain gradients of this and of earlier
        steps. Call it on every rank before the next backward pass. It waits for all ranks. Example:

            norm = torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            if not norm.isfinite():  # on all ranks, because their gradients are the same
                state.take_back()
                optimizer.zero_grad()
                continue

        The result is exact for finite gradients, except that the residuals of owners (transport
        "reduce_scatter") are rounded to float32. NaN and Inf are dropped. In quantized formats, the
        whole group of 64 entries that contains a NaN or Inf is dropped. With a mesh, the entries of
        all ranks of the node at the same position are dropped. If several backward passes were
        exchanged, the call takes back all of them, because DDP accumulates them. A second call, or
        a call after a GradScaler skipped the step, does nothing. After a failed exchange, the call
        does not wait for the other ranks.

        Raises:
            ValueError: the state is not bound yet, or ranks have taken different steps.
            RuntimeError: a payload was damaged, or a rank did not call this within the group's
                timeout. Nothing was taken back.
        """
        self._require_usable("take_back")
        self._ledger.compare_step("take_back")
        self._finish_last_step("take_back")
        self._ledger.take_back()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals by parameter name, and the step, as copies on the CPU.

        Call it between steps: after the optimizer's step and the scaler's update, before the next
        backward pass. Use `torch.save` with one file per rank, or pass the state itself to
        torch.distributed.checkpoint as {"dct": state}. If the entry is nested deeper in the dict,
        pass this result instead of the state.

        Raises:
            ValueError: the state is not bound yet.
            RuntimeError: a payload was damaged, or an exchange failed. After a failed exchange,
                call `take_back` first, to return the entries of this step to the residuals.
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
        """Resume from this rank's `state_dict`, or from the result of `merge_states` on all ranks.

        Every rank must load before any rank takes a step. In the next step, ranks check that they
        loaded the same run and step, and wait for late ranks up to the group's timeout. If this
        call raises an error, the state is unchanged.

        Raises:
            ValueError: the dict has a different version, density, number of ranks, mesh, rank or
                model; or a value is missing, not finite, or has a wrong type or shape; or this
                state is not bound yet.
            TypeError: `state` is not a state dict.
            RuntimeError: this state received a damaged payload. Load into a new state.
        """
        self._require_usable("load_state_dict")
        entry, states = self._run().find(state)
        self._buckets.load(states, entry["buckets"])  # first, because it may raise
        self._ledger.load(entry)
        self._in_step = False

    def _run(self) -> Run:
        """The description of this run in checkpoints."""
        same = {
            "density": self.settings.density,
            "world_size": self._topology.all_ranks.size(),
            "local_size": self._topology.node.size,
        }
        sizes = {name: Flat(parameter.numel()) for parameter, name in self._names.items()}
        return Run("rank", self._ledger.rank, self.settings.format, same, sizes)

    def __getstate__(self) -> dict[str, Any]:
        """Copy only the settings, because process groups and threads cannot be copied."""
        kept = {"settings": self.settings, "start_step": self.start_step, "node_group": None}
        return {**kept, "copied": True, "_names": {}, "_executor": None}

    def _require_usable(self, op: str) -> None:
        if self.copied:
            raise ValueError(
                f"dct::{op}: state must be made by DCTState(ddp), got a copy, which has only the "
                "settings: make a new one"
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
        # Detached, because create_graph=True gives the buffer a graph, and the hook overwrites it.
        index, buffer = bucket.index(), bucket.buffer().detach()
        increment_version(buffer)
        # DDP passes its buckets in order, so an index that is not higher than the last one belongs
        # to a new backward pass.
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
        """Call `_end_pass` at the end of the backward pass that this bucket belongs to."""
        if current_node() is None and self._executor is not None:
            self._executor.complete()  # because DDP waits for this bucket next
        backward = backward_pass()
        if backward == NO_PASS:  # DDP.join calls the hook outside of a backward pass
            if bucket.is_last():
                self._end_pass(nested=False)
        elif backward != self._pass:
            self._pass = backward
            at_end_of_backward(self._end_pass)

    def _end_pass(self, nested: bool) -> None:
        if self._executor is not None:
            self._executor.complete()
        if self._in_step and not nested:  # called twice if passes are nested
            self._in_step = False
            self._ledger.end()

    def _launch(self, number: int) -> Callable[[Tensor], Complete | None]:
        """Return a function that starts to reduce the flat gradients of a bucket in this step."""
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
        # A copied DDP module has copies of its states, but does not call hooks with these copies.
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
    """Average a bucket of gradients over all ranks with compression: a DDP communication hook.

    Register it with `ddp.register_comm_hook(state, dct_hook)`. The hook overwrites the bucket with
    the mean, which is deterministic and bitwise the same on every rank. Entries that are not sent
    stay in the state's residual. With torch.compile, DDP's Python reducer is not supported.

    Args:
        state: the open DCTState of this DDP module.
        bucket: a bucket of float32, bfloat16 or float16 gradients, from DDP.

    Returns:
        A future of the bucket's buffer, in the dtype of the bucket.

    Raises:
        TypeError: `state` is not a DCTState, or `bucket` is not a GradBucket.
        ValueError: `state` is closed, not bound, or belongs to a different model.
        RuntimeError: this rank received a damaged payload in an earlier step. The weights lack
            that payload or its damaged blocks, so load a checkpoint into a new state.
    """
    if not isinstance(state, DCTState):
        raise TypeError(
            "dct::dct_hook: state must be a DCTState, as in "
            f"ddp.register_comm_hook(DCTState(ddp), dct_hook), got {checks.shown(state)}"
        )
    return state._reduce(bucket)
