"""DCT for torch's DistributedDataParallel: a state and a communication hook.

    state = DCTState(ddp, density=0.005)
    ddp.register_comm_hook(state, dct_hook)

In a step every bucket is packed, exchanged and unpacked beside the backward pass, in bucket order
on every rank. The result (damage, overflow) is read before the next step.
"""

import dataclasses
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

# DDP's constructor imports it. Its functions' defaults hold the default group, if there is one by
# then, until Python ends, and a thread of gloo that still finishes its work aborts the process.
import torch.distributed.nn.functional
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from dct_kernels import __version__, checks

from ..agreement import refusing
from ..compressor import warn_of_eager
from ..exchange import checkpoint
from ..exchange.bucket import parameter_stats
from ..exchange.codec import Settings
from ..exchange.ledger import StepLedger
from ..exchange.loss_scale import LossScale
from ..exchange.parameters import describe
from ..exchange.plan import BucketPlan, plan_table
from ..exchange.run_guard import RunGuard
from ..exchange.segment_state import SegmentState
from ..exchange.selection import require_transport
from . import ddp_parameters
from .buckets import Buckets
from .executors import Executor, executor_for
from .topology import Topology


class DCTState:
    """The state of `dct_hook`: residuals, thresholds and where to send payloads.

    Dynamic Communication Thresholding, data-parallel side (arXiv 2010.08899). Construct it on every
    rank of the group, register it once, and keep `state_dict()` in the checkpoint of every rank:
    residuals differ between ranks. `close()` ends its thread and its process groups; a process may
    exit without it.

    The first `start_step` steps average the gradients densely in bfloat16; DDP rebuilds its buckets
    in that time. Then each bucket sends its largest entries: a payload has one threshold, sampled
    in every step from the sum of gradient and residual. A parameter whose gradients are far smaller
    than the others' is sent rarely: `stats()` names the silent ones. State belongs to parameters,
    by name, and moves along if the buckets change later. Memory: 4 bytes per parameter, and each
    bucket's payload once per rank; with "reduce_scatter" 8 / P bytes more, and three payloads.
    The mean is deterministic, and bitwise the same on every rank.

    Settings and parameters are compared between ranks when the state is bound to its DDP, and run
    and step at the first step after that or a load: if they differ, every rank raises and names all
    values. No rank waits for others longer than the group's timeout.

    Args:
        ddp: the model the hook is registered with; dense gradients, on one CPU or CUDA device.
            None if it is not made yet: `bind` it before the first step.
        density: fraction of each bucket's entries sent per step, in (0, 1].
        refresh_every: steps between samples of the thresholds, with policy "fixed".
        value_dtype: of the values sent: torch.bfloat16 or torch.float32. With density 1 also
            "int8", "int4" and "ternary": every entry in few bits, in rows of 1,024 with a scale
            each. The rounding error stays in the residual.
        transport: how payloads reach the other ranks. "all_gather": every rank gets all of them,
            so bytes grow with the ranks. "reduce_scatter": each rank sums one range of every bucket
            and compresses the sum again; bytes do not grow with the ranks, as long as a bucket has
            a block of 16,384 elements for each. None: all-gather up to 8 ranks, and in buckets of
            fewer than four blocks per rank; reduce-scatter beyond, and from 3 ranks on for every
            entry in few bits.
        process_group: ranks to average over, this one among them; default those of `ddp`.
        mesh: the ranks of `ddp` as a DeviceMesh of dimensions ("node", "local"): see `node_mesh`.
        grad_scaler: the GradScaler that scales the loss, if one does; a disabled one counts as
            none. Residuals are kept in unscaled units. If the scaler skips a step, the entries that
            were sent in it return to the residual.
        start_step: steps before compression.
        policy: "fresh": the threshold is sampled in every step; or "fixed", the paper's way: in
            every `refresh_every`-th, and after a load; see `Compressor`.

    Gradients may be accumulated over several backward passes, under `ddp.no_sync()` or without it.
    If a scaler skips such a step, the entries that overflowed in it are lost, and the first of each
    bucket. Uneven inputs (`ddp.join()`) are supported. A copy (deepcopy, or pickle without a
    scaler) has the residuals and is bound to no DDP; it shares the scaler.

    With a `mesh` of L ranks per node, a reduce-scatter takes the node's mean, in the gradients'
    dtype. Each rank compresses its L-th part of every bucket and exchanges it with the ranks of
    equal number in other nodes; then parts are gathered inside the node. Bytes between nodes, and
    memory, are 1 / L of those without a mesh. Nodes of one rank give the bits of no mesh. In a
    single node compression only delays entries: use no hook there.

    The receiver of a damaged payload detects the damage. It raises for step t, as do the ranks of
    its node, at the first hook of step t + 1, which still tells the others; they raise at the first
    hook of step t + 2 at the latest. (If DDP changes its buckets between t and t + 1, as after its
    first step, they fail with the connection or at the timeout.) `state_dict()`, `stats()`,
    `parameter_stats()` and `close()` of a rank that knows of damage raise as well. So damage of the
    very last step is raised by the first of them, on the ranks that know of it; the others do not
    learn of it. Weights of a damaged step differ between ranks: go back to a checkpoint.

    Limits: with find_unused_parameters, DDP drops the result for a parameter that no rank used in a
    step, and with it the entries that were sent for it. Use one optimizer per GradScaler, because a
    skipped step is taken back for all parameters.

    Attributes:
        step: steps taken.
        node_group: the group inside a node of a mesh, for a `WireMeter`; or None.

    Raises:
        ValueError, TypeError: an argument is out of its range, a parameter cannot be compressed, or
            ranks differ; the text names it.
        RuntimeError: a different rank raised, as the text says, or did not construct its state
            within the group's timeout. All ranks may try again, after this error as well.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel | None = None,
        density: float = 0.005,
        refresh_every: int = 1000,
        value_dtype: torch.dtype | str = torch.bfloat16,
        transport: str | None = None,
        process_group: dist.ProcessGroup | None = None,
        grad_scaler: GradScaler | None = None,
        start_step: int = 2,
        policy: str = "fresh",
        mesh: DeviceMesh | None = None,
    ) -> None:
        self._process_group, self._mesh = process_group, mesh
        with refusing("DCTState", self._group_with(ddp)):
            self.settings = Settings(density, refresh_every, policy, value_dtype, "DCTState")
            checks.require_int("DCTState", "start_step", start_step, 0, 2**63 - 1)
            require_transport("DCTState", transport)
            if mesh is not None and process_group is not None:
                checks.fail("DCTState", "process_group", "None with a mesh", process_group)
            self._loss_scale = LossScale("DCTState", grad_scaler)
        self._transport, self.start_step = transport, start_step
        self._next_index = 0

        # Once bound to a DDP:
        self._names: dict[Parameter, str] = {}
        self._topology: Topology
        self._ledger: StepLedger
        self.node_group: dist.ProcessGroup | None = None
        self._buckets: Buckets
        self._executor: Executor | None = None
        self._to_load: dict[str, Any] | None = None  # by a copy of a state
        self._warned = False  # that no hook is registered
        if ddp is not None:
            self.bind(ddp)

    def bind(self, ddp: DistributedDataParallel) -> None:
        """Attach a state that was made without its DDP; on every rank, like the constructor.

        Raises:
            ValueError: the state is bound already; or as the constructor.
        """
        group = self._group_with(ddp)
        with refusing("DCTState", group):
            names = ddp_parameters.named_parameters(ddp)
            if self._names:
                checks.fail("DCTState", "state", "bound to one DDP only", "a second")
            device = ddp_parameters.device_of(names)
            topology = Topology("DCTState", group, self._mesh, device)
        warn_of_eager(device.type)
        guard = RunGuard(
            "DCTState",
            topology.everyone,
            device,
            {
                "version": __version__,
                "model": describe(names),
                **self.settings.as_told(),
                "transport": self._transport,
                "mesh": topology.layout,
                "start_step": self.start_step,
                "grad_scaler": self._loss_scale.as_told(),
            },
        )
        topology.open(guard.id)
        self._ledger = StepLedger("dct_hook", guard, self._loss_scale, self.start_step)
        self._buckets = Buckets(names, self.settings, self._transport, topology, device)
        self._topology, self.node_group = topology, topology.node.group
        self._executor = executor_for(device)
        self._names = names  # bound
        self._ddp = weakref.ref(ddp)
        if self._to_load is not None:
            self.load_state_dict(self._to_load)

    def _group_with(self, ddp: DistributedDataParallel | None) -> dist.ProcessGroup | None:
        """The ranks to average over; None if they are not known without a DDP."""
        of_ddp = getattr(ddp, "process_group", None)
        return of_ddp if self._process_group is None else self._process_group

    @property
    def step(self) -> int:
        return self._ledger.step if self._names else 0

    def close(self) -> None:
        """Wait for the last step, and end the thread and the process groups of this state.

        It takes no further step; `stats` and the like still answer. A second call does nothing.

        Raises:
            RuntimeError: a payload was damaged. The state is closed all the same.
        """
        if self._executor is not None:
            self._executor.close()
            self._executor = None
            self._topology.close()
            self._finish_last_step()

    def plan(self) -> str:
        """The bytes and the capacity of each bucket in a compressed step, as a table.

        DDP's buckets are not known until compression has started: one is assumed, and the last line
        tells the bytes of each further one. From then on bytes are exact, as in `stats()`.

        Raises:
            ValueError: the state is not bound to a DDP yet.
        """
        self._require_bound("plan")
        device = ddp_parameters.device_of(self._names)
        table = plan_table(self._buckets.plans(), self._buckets.reason(), device)
        table += self._topology.node.sentence(self._buckets.node_bytes())
        another = self._buckets.bytes_of_another()
        if another is not None:
            table += (
                "\nDDP's buckets are known from the first compressed step on: one is assumed, and "
                f"each\nfurther one adds about {another:,} bytes."
            )
        return table

    def stats(self) -> dict[str, float | int | list[str] | None]:
        """Means of the last 100 steps, and the bytes of a step. Waits for the last step.

        - `step`: steps taken.
        - `density`: entries that this rank sent over those that were compressed; None before any.
        - `overflow`: fraction of payloads, of all ranks, with less room than entries that passed.
        - `wire_bytes`: bytes sent per rank and compressed step, with a mesh those to other nodes.
          Messages have a fixed size, so this is the same in every step and on ranks of equal part.
        - `silent`: parameters of which this rank has sent nothing for 1,000 steps, as far as one
          step in 23 tells.

        Raises:
            ValueError: the state is not bound to a DDP yet.
            RuntimeError: a payload was damaged.
        """
        self._require_bound("stats")
        self._finish_last_step()
        silent = [name for bucket in self._buckets.in_order() for name in bucket.silent()]
        return {**self._ledger.stats(self._buckets.plans()), "silent": silent}

    def parameter_stats(self) -> dict[str, dict[str, float]]:
        """{parameter: figures of the last step on this rank}, for any logger. Waits for the device.

        `density`: entries sent over elements; `threshold`: of the payload that its first element
        belongs to; `residual_norm`: Euclidean norm of its residual, in unscaled units. Empty before
        compression starts, and after a load until the next step.

        Raises:
            ValueError: the state is not bound to a DDP yet.
            RuntimeError: a payload was damaged.
        """
        self._require_bound("parameter_stats")
        self._finish_last_step()
        return parameter_stats(self._buckets.in_order())

    def take_back(self) -> None:
        """Return the entries of the last step to the residuals, for a step that you do not apply.

        Otherwise they would be lost: gradients of the step, and of many steps before it.
        Call it on every rank, after the backward pass and before the next one:

            norm = torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            if not norm.isfinite():  # on all ranks, as their gradients are the same
                state.take_back()
                optimizer.zero_grad()
                continue

        Exact for finite gradients (owners' residuals with "reduce_scatter": to float32 rounding).
        NaN and Inf are dropped; with a mesh, so is the rest of that entry of the node's mean. If
        several backward passes were exchanged, as DDP adds them up, all of them are taken back.
        Called again, or after a GradScaler skipped the step, it does nothing.

        Raises:
            ValueError: the state is not bound to a DDP yet.
            RuntimeError: a payload was damaged.
        """
        self._require_bound("take_back")
        self._finish_last_step()
        self._ledger.take_back()

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals by parameter name, the step, and statistics. Copies, on the CPU.

        Call it between steps: after the optimizer's step (and the scaler's update), before the next
        backward pass. For `torch.save`, one file per rank. torch.distributed.checkpoint takes the
        state itself, {"dct": state} (deeper in a dict, only this method's result), and calls this
        on loading as well, for the shapes: all parameters are in it from the start.

        Raises:
            ValueError: the state is not bound to a DDP yet.
            RuntimeError: a payload was damaged.
        """
        self._require_bound("state_dict")
        self._finish_last_step()
        states = self._buckets.states().items()
        entry = {
            **self._topology.sizes(),
            **self._ledger.saved(),
            "density": self.settings.density,
            "parameters": {name: state.as_dict() for name, state in states},
        }
        return checkpoint.make(dist.get_rank(), cast(checkpoint.Entry, entry))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`, each rank from its own, or all from one of `merge_states`.

        Every rank loads before any of them takes a step. The next step compares run and step, and
        waits for late ranks, up to the group's timeout. A refused state changes nothing.

        Raises:
            ValueError: made with a different version, density, number of ranks or mesh, by a
                different rank, or for a different model; something in it is missing, of a wrong
                type or shape or not finite; or this state is not bound to a DDP yet.
            TypeError: not a state dict.
        """
        self._require_bound("load_state_dict")
        sizes = {name: parameter.numel() for parameter, name in self._names.items()}
        ranks = self._topology.sizes()
        entry = checkpoint.find(state, dist.get_rank(), self.settings, sizes, **ranks)
        self._ledger.load(entry)
        self._next_index = 0
        parameters = entry["parameters"].items()
        self._buckets.load({name: SegmentState.from_dict(saved) for name, saved in parameters})

    def __getstate__(self) -> dict[str, Any]:
        """Settings and residuals, because DDP, process groups and threads cannot be copied."""
        made = {
            **dataclasses.asdict(self.settings),
            "transport": self._transport,
            "grad_scaler": self._loss_scale,
            "start_step": self.start_step,
            "mesh": self._mesh,
        }
        return {"made": made, "state": self.state_dict() if self._names else self._to_load}

    def __setstate__(self, copied: dict[str, Any]) -> None:
        made = copied["made"]
        # A subclass's own, so the arguments are unknown to a type checker.
        self.__init__(**made | {"grad_scaler": made["grad_scaler"].scaler})  # type: ignore[misc]
        self._to_load = copied["state"]

    def _require_bound(self, op: str) -> None:
        if not self._names:
            checks.fail(op, "state", "bound to its DDP by state.bind(ddp)", "an unbound one")

    def _reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        if not isinstance(bucket, dist.GradBucket):
            got = f"{type(bucket).__name__}, as with torch._dynamo's optimize_ddp='python_reducer'"
            checks.fail("dct_hook", "bucket", "a torch.distributed.GradBucket", got, TypeError)
        self._require_bound("dct_hook")
        if self._executor is None:
            checks.fail("dct_hook", "state", "open", "a closed one")
        # Detached: with create_graph=True DDP's buffer has a graph, and is written here.
        index, buffer = bucket.index(), bucket.buffer().detach()
        plan = self._buckets.plan(index, bucket)
        # DDP goes through its buckets in order, and may leave out any, also the first or last.
        if not 0 < self._next_index <= index:
            self._begin_step(index, plan)
        if self._ledger.compresses:
            compressed = self._buckets.bucket(index, plan, self._ledger.packed)
            job = self._ledger.reduction(index, compressed, buffer)
        else:
            dense = partial(self._topology.dense_mean, buffer)
            job = partial(self._ledger.carry_out, dense)
        self._next_index = 0 if bucket.is_last() else index + 1
        return self._executor.submit(job)

    def _begin_step(self, index: int, plan: BucketPlan) -> None:
        # This step can tell others of damage, unless buckets have changed: theirs are not known.
        announce = None
        if self._executor is not None and self._buckets.holds(index, plan):
            announce = partial(self._buckets.announce_damage, self._executor)
        self._finish_last_step(announce)
        self._ledger.begin()

    def _finish_last_step(self, announce: Callable[[], None] | None = None) -> None:
        self._warn_if_unused()
        self._ledger.finish(announce)

    def _warn_if_unused(self) -> None:
        ddp = self._ddp()
        if self._warned or ddp is None or ddp_parameters.has_hook(ddp):
            return
        if any(parameter.grad is not None for parameter in self._names):
            self._warned = True
            warnings.warn(
                "DCT: there are gradients, but no hook is registered with the DDP of this state, "
                "so they were not compressed: call ddp.register_comm_hook(state, dct_hook).",
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
        ValueError: `state` is closed, not bound or of a different model, or a gradient is sparse.
        RuntimeError: this rank received a damaged payload in the step before, or a different rank
            in the one before that. The weights took that step without the damaged parts: go back to
            a checkpoint.
    """
    if not isinstance(state, DCTState):
        rule = "a DCTState, as in ddp.register_comm_hook(DCTState(ddp), dct_hook)"
        checks.fail("dct_hook", "state", rule, type(state).__name__, TypeError)
    return state._reduce(bucket)
