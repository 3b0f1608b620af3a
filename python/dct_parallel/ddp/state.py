"""A DDP communication hook that compresses gradients, and its state.

    state = DCTState(ddp, density=0.005)
    ddp.register_comm_hook(state, dct_hook)

Every bucket is packed, exchanged and unpacked during the backward pass, in the same order on every
rank. The host reads the results of a step (damage, overflow) at the end of the next backward pass.
"""

import weakref
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
from torch.nn.parallel import DistributedDataParallel

from dct_kernels import checks

from .._torch import NO_PASS, at_end_of_backward, backward_pass, comm_hooks, current_node
from ..compressor import warn_if_eager
from ..exchange.bucket import parameter_stats
from ..exchange.checkpoint import Flat, Run, changeable
from ..exchange.ledger import StepLedger
from ..exchange.optimizers import OptimizerChecks, Optimizers, loss_scale_of
from ..exchange.plan import describe, keeps_owners, plan_table
from ..exchange.settings import Settings
from ..groups import Agreement, known_group, sharing_errors
from ..user_warnings import warn_user
from .buckets import Buckets, device_of, named_parameters
from .executors import executor_for
from .node import Topology


class DCTState:
    """The state of `dct_hook`: settings, residuals and process groups.

    Construct it on every rank and register it once. Residuals differ between ranks, so save
    `state_dict()` on every rank. The mean is deterministic and bitwise the same on every rank.
    After this rank has received a damaged payload, or an exchange has failed, every method raises a
    RuntimeError, because the residuals lack sent entries. Then load a checkpoint into a new state.
    Memory: 4 bytes per parameter, and for each bucket a payload from each rank (with
    reduce-scatter, three payloads). See docs/guide/ddp.md. Source: Dynamic Communication
    Thresholding, data-parallel (arXiv 2010.08899).

    Args:
        ddp: the DDP module or the result of torch.compile for it, with dense gradients on one CPU
            or CUDA device.
        density: fraction of the entries of each bucket sent per step, in (0, 1]; default 0.005, or
            1 with quantized formats. 1 % is 0.01.
        format: a name or a torch dtype. "bfloat16" (default) and "float32" send the largest
            entries, or all entries at density 1. "int8", "int4" and "ternary" send all entries.
        transport: "all_gather" or "reduce_scatter"; None chooses by the number of ranks, the format
            and the size of the bucket (docs/guide/choosing.md).
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
        settings: the settings of the compression.

    Raises:
        ValueError, TypeError: an argument is out of range, a parameter cannot be compressed, or
            ranks differ.
        RuntimeError: another rank raised an error, or did not construct its state in time.
    """

    @checks.names_keywords
    def __init__(
        self,
        ddp: DistributedDataParallel,
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
        ddp = getattr(ddp, "_orig_mod", ddp)  # inside the result of torch.compile
        group = getattr(ddp, "process_group", None) if process_group is None else process_group
        with sharing_errors(op, known_group(group)):
            self.settings = Settings.checked(op, density, format, transport, refresh_every)
            if mesh is not None and process_group is not None:
                checks.fail(op, "process_group", "None with a mesh", process_group)
            checks.require_int(op, "start_step", start_step, 0, 2**63 - 1)
            self._names = named_parameters(ddp)
            loss_scale = loss_scale_of(op, grad_scaler, optimizer, self._names)
            device = device_of(self._names)
            self._topology = Topology(op, group, mesh, device)
        warn_if_eager(device.type)
        self.start_step = start_step
        values = {"model": describe(self._names), "mesh": self._topology.layout}
        values |= {**self.settings.to_compare(), "start_step": str(start_step)}
        values["grad_scaler"] = "given" if loss_scale else "none"
        self._agreement = Agreement(op, self._topology.all_ranks, device, values)
        self._topology.open(self._agreement.run_id)
        node = self._topology.node
        self.node_group: dist.ProcessGroup | None = node.group
        self._buckets = Buckets(self._names, self.settings, self._topology)
        sends_once = not keeps_owners(self.settings, self._topology.between.size())
        self._executor = executor_for(device, sends_once and node.size == 1)
        unused = weakref.WeakMethod(self._warn_if_unused)
        density = self.settings.density
        self._optimizers = OptimizerChecks(op, self._names, density, loss_scale, unused)
        self._ledger = StepLedger(
            op, start_step, loss_scale, self._optimizers, self._executor.run_after
        )
        self._open, self._in_step = True, False  # in a step until the end of its backward pass
        self._next_index = 0
        self._pass = NO_PASS  # the backward pass that has a callback queued for its end
        self._hooks = comm_hooks(ddp)
        self._warned = False  # whether `_warn_if_unused` has warned

    @property
    def step(self) -> int:
        return self._ledger.step

    def close(self) -> None:
        """Wait for the last step, then stop the thread and destroy this state's process groups.

        The hook then raises an error, but methods such as `stats` still work. Idempotent. The state
        is closed even if this method raises an error.
        """
        if self._open:
            self._open = False
            self._executor.close()
            self._topology.close()
            self._optimizers.close()
        if hasattr(self, "_names"):  # not a copy
            self._finish_last_step()

    def plan(self) -> str:
        """Return a table of the bytes and the capacity of each bucket in a compressed step.

        DDP's buckets are unknown until compression has started. Until then the table assumes a
        single bucket, as its last line states. Afterwards the bytes are exact, for the rank that
        sends the most.
        """
        self._require_usable()
        table = plan_table(self._buckets.plans(), device_of(self._names))
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
        - `wire_bytes`: bytes per compressed step of the rank that sends the most; with a mesh, only
          to other nodes. Payloads have a fixed size, so only new buckets of DDP change the bytes.
        """
        self._finish_last_step()
        return self._ledger.stats(self._buckets.plans())

    def parameter_stats(self) -> dict[str, dict[str, float]]:
        """Return {parameter: figures of the last step on this rank}. Waits for the device.

        - `density`: fraction of the elements that were sent with a non-zero value.
        - `threshold`: the threshold of the payload that holds the first element.
        - `residual_norm`: the Euclidean norm of the residual, in units of the unscaled gradient.

        The result is empty before compression starts, and after a load until the next step. The
        call allocates one bucket in float32.
        """
        self._finish_last_step()
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

        The result is exact for finite gradients, except that "ternary" and the residuals of owners
        (transport "reduce_scatter") are rounded. NaN and Inf are dropped. In quantized formats, the
        whole group of 64 entries that contains a NaN or Inf is dropped. With a mesh, the entries of
        all ranks of the node at the same position are dropped. If several backward passes were
        exchanged, the call takes back all of them, because DDP accumulates them. A second call, or
        a call after a GradScaler skipped the step, does nothing.

        Raises:
            ValueError: ranks have taken different steps.
            RuntimeError: a rank did not call this within the group's timeout. Nothing was taken
                back.
        """
        self._require_usable()
        self._agreement.check_step("take_back", self.step)
        self._finish_last_step()
        self._ledger.take_back()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals by parameter name, and the step, as copies on the CPU.

        Call it between steps: after the optimizer's step and the scaler's update, before the next
        backward pass. Use `torch.save` with one file per rank, or pass the state itself to
        torch.distributed.checkpoint as {"dct": state}. If the entry is nested deeper in the dict,
        pass this result instead of the state.
        """
        self._finish_last_step()
        states, run_id = self._buckets.states(), self._agreement.run_id
        return self._run().save(states, run_id, self.step, buckets=self._buckets.names())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from this rank's `state_dict`, or from the result of `merge_states` on all ranks.

        Every rank must load before any rank takes a step. In the next step, ranks compare the run,
        the step and the buckets that they loaded, and wait for late ranks up to the group's
        timeout. If `format`, `transport`, `refresh_every` or `start_step` differs from the saved
        run, this call warns. If it raises an error, the state is unchanged.

        Raises:
            ValueError: the dict has a different version, density, number of ranks, mesh, rank or
                model; or a value is missing, not finite, or has a wrong type or shape.
            TypeError: `state` is not a state dict.
        """
        self._require_usable()
        run = self._run()
        entry, states = run.find(state)
        run.report_changes(entry)
        self._buckets.load(states, entry["buckets"])  # first, because it may raise
        self._agreement.resume(entry["step"], entry)
        self._ledger.restart(entry["step"])
        self._in_step = False

    def _run(self) -> Run:
        """The description of this run in checkpoints."""
        ranks, local = self._topology.all_ranks.size(), self._topology.node.size
        same = {"density": self.settings.density, "world_size": ranks, "local_size": local}
        sizes = {name: Flat(parameter.numel()) for parameter, name in self._names.items()}
        between = self._topology.between.size()
        others = changeable(self.settings, between, start_step=self.start_step)
        return Run("rank", self._agreement.rank, others, same, sizes)

    def __getstate__(self) -> dict[str, Any]:
        """Copy only the settings, because process groups and threads cannot be copied."""
        copied = {"settings": self.settings, "start_step": self.start_step, "node_group": None}
        return {**copied, "_ledger": StepLedger("DCTState"), "_open": False}

    def _require_usable(self) -> None:
        """Raise for a copy, and after damage or a failed exchange. Waits for the last step."""
        if not hasattr(self, "_names"):
            rule = "made for its DDP (write DCTState(ddp, ...) for a copied ddp, and register it)"
            checks.fail("DCTState", "state", rule, "a copy, which has only the settings")
        self._ledger.read()

    def _reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        if not isinstance(bucket, dist.GradBucket):
            got = f"{checks.shown(bucket)}, as with torch._dynamo's optimize_ddp='python_reducer'"
            checks.fail("dct_hook", "bucket", "a torch.distributed.GradBucket", got, TypeError)
        if not self._open:
            self._require_usable()
            checks.fail("dct_hook", "state", "open", "a closed one")
        # Detached, because create_graph=True gives the buffer a graph, and the hook overwrites it.
        index, buffer = bucket.index(), bucket.buffer().detach()
        increment_version(buffer)
        # DDP passes its buckets in order, so an index that is not higher than the last one belongs
        # to a new backward pass.
        if not self._in_step or index < self._next_index:
            self._agreement.check("dct_hook")
            self._ledger.begin()
            self._buckets.begin()
            self._in_step, self._pass = True, NO_PASS
        self._next_index = index + 1
        reduction = self._buckets.reduction(bucket, self._ledger)
        mean = self._executor.submit(reduction, buffer, self._ledger.current)
        self._await_end(bucket)
        return mean

    def _await_end(self, bucket: dist.GradBucket) -> None:
        """Call `_end_pass` at the end of the backward pass that this bucket belongs to."""
        if current_node() is None:
            self._executor.complete()  # because DDP waits for this bucket next
        backward = backward_pass()
        if backward == NO_PASS:  # DDP.join calls the hook outside of a backward pass
            if bucket.is_last():
                self._end_pass(nested=False)
        elif backward != self._pass:
            self._pass = backward
            at_end_of_backward(self._end_pass)

    def _end_pass(self, nested: bool) -> None:
        self._executor.complete()
        if self._in_step and not nested:  # called twice if passes are nested
            self._in_step = False
            self._ledger.end()

    def _finish_last_step(self) -> None:
        self._require_usable()
        self._warn_if_unused()
        self._ledger.finish()

    def _warn_if_unused(self) -> None:
        # A copied DDP module has copies of its states, but does not call hooks with these copies.
        registered = any(s is self or not isinstance(s, DCTState) for _, s in self._hooks)
        if self._warned or registered:
            return
        if any(parameter.grad is not None for parameter in self._names):
            self._warned = True
            warn_user(
                "DCT: there are gradients, but no hook is registered with the DDP for this state, "
                "so it did not compress them: call ddp.register_comm_hook(state, dct_hook)."
            )


def dct_hook(state: DCTState, bucket: dist.GradBucket) -> Future[Tensor]:
    """Average a bucket of gradients over all ranks with compression: a DDP communication hook.

    Register it with `ddp.register_comm_hook(state, dct_hook)`. Steps before `start_step` average
    the bucket in bfloat16. Every later step computes:

    1. At the first bucket of a backward pass: add the entries of the last step back to the
       residuals if a GradScaler skipped that step.
    2. Sample the entries of residual + gradient, and take as the threshold the value that the
       fraction `density` of the samples reaches. With density 1 there is no threshold.
    3. Pack the entries of residual + gradient that reach the threshold into a payload, up to its
       capacity. What the payload lacks is the new residual: other entries, and rounding errors.
    4. Send the payload to all ranks (transport "all_gather"). Or send each range of the bucket to
       its owner, which averages the range and packs the mean as in steps 2 and 3, with a residual
       of its own, and sends it to all ranks ("reduce_scatter").
    5. Overwrite the bucket with the mean of all payloads, summed in float32 in rank order.
    6. At the end of the backward pass: read whether payloads of the *previous* step were damaged,
       and start to copy this information about the current step to the host.

    The mean is deterministic and bitwise the same on every rank. With a mesh of nodes, step 2
    begins with the mean over the ranks of a node. Source: Dynamic Communication Thresholding (arXiv
    2010.08899). With torch.compile, DDP's Python reducer is not supported.

    Args:
        state: the open DCTState of this DDP module.
        bucket: a bucket of float32, bfloat16 or float16 gradients, from DDP.

    Returns:
        A future of the bucket's buffer, in the dtype of the bucket.

    Raises:
        TypeError: `state` is not a DCTState, or `bucket` is not a GradBucket.
        ValueError: `state` is closed, a copy, or belongs to a different model.
        RuntimeError: in an earlier step, this rank received a damaged payload or an exchange
            failed. The weights lack sent entries, so load a checkpoint into a new state.
    """
    rule = "a DCTState, as in ddp.register_comm_hook(DCTState(ddp), dct_hook)"
    checks.require_type("dct_hook", "state", state, DCTState, rule)
    return state._reduce(bucket)
