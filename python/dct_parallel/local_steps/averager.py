"""Weights of ranks that train on their own, averaged every few steps by compressed changes."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager
from torch.nn import Parameter

from dct_kernels import checks

from .. import groups
from ..collectives import all_reduce_bytes, dense_mean, any_rank
from ..exchange.bucket import Bucket, SegmentState
from ..exchange.checkpoint import Flat, Run, States
from ..exchange.ledger import StepLedger
from ..exchange.plan import (
    plan_bucket,
    plan_table,
)
from ..exchange.settings import Settings
from ..groups import refusing
from ..user_warnings import warn_user
from .weights import FlatWeights, shard_groups

_OP = "DCTAverager"


class DCTAverager(ModelAverager):
    """Averages the weights of all ranks every `period` steps: local SGD, compressed.

        averager = DCTAverager(module, period=10)
        optimizer.step()
        averager.average_parameters()

    No DDP: every rank's optimizer, of any kind, sees the gradients of that rank alone. After every
    `period`-th step, for all weights as one flat tensor,

        moved = weights - base + residual     on every rank
        sent = moved in few bits, or the largest `density` of it
        residual = moved - sent
        base += mean of all ranks' sent
        weights = base

    so that weights are then bitwise the same on all ranks, until the next step. With `step_ahead`
    the last line is `weights = base + residual`: none of its own gradients is late for a rank, but
    weights differ between ranks until `flush`. Deterministic. The rule is that of SparseLoCo (arXiv
    2508.15706) without its outer optimizer and decay, or that of SAEF (arXiv 2008.05823) without
    its averaging of errors; with every entry in few bits, or thresholds in place of top-k. How far
    a run ends behind a dense one: docs/guide/transformers.md. A torch `ModelAverager`, for
    `PostLocalSGDOptimizer(optimizer, averager)`. Not to be copied or pickled: save `state_dict()`.

    Args:
        module: parameters on one CPU or CUDA device, float32, bfloat16 or float16; those that
            require grad are averaged. No DDP. Of one that `fully_shard` has cut, on a mesh of one
            dimension, this rank's shards. All parameters of the first rank, frozen ones as well,
            replace the others'. Which of them require grad must stay the same.
        period: steps from one averaging to the next.
        density: fraction of all entries sent each time, in (0, 1]; default 1.
        format: see `DCTState`; default "ternary", and "bfloat16" with a density below 1.
        transport: see `DCTState`.
        process_group: ranks to average over, this one among them; default all. With shards: those
            that hold the same shard in other replicas (docs/guide/fsdp2.md).
        policy: "fresh": the threshold is sampled at every averaging; or "fixed"; see `Compressor`.
        refresh_every: averagings between samples of the threshold, with policy "fixed".
        step_ahead: continue from weights plus this rank's residual (docs/guide/choosing.md).

    Attributes:
        step: calls of `average_parameters`. May be set, on every rank, to continue from that step,
            as the `load_state_dict` of `PostLocalSGDOptimizer` does.
        period: as given.
        wire_bytes: bytes per averaging of the rank that sends most, always the same. Besides, all
            ranks reduce 8 bytes (shards twice): either all of them apply an averaging or none.

    Raises:
        ValueError, TypeError: an argument is out of its range, or ranks differ; the text names it.
        RuntimeError: a different rank raised, as the text says, or did not construct its averager
            within the group's timeout.
    """

    _step = 0

    @checks.names_keywords
    def __init__(
        self,
        module: nn.Module,
        *,
        period: int = 10,
        density: float | None = None,
        format: str | torch.dtype | None = None,
        transport: str | None = None,
        process_group: dist.ProcessGroup | None = None,
        policy: str = "fresh",
        refresh_every: int = 1000,
        step_ahead: bool = False,
    ) -> None:
        group = groups.require_group(_OP, process_group, "process_group")
        super().__init__(group)
        with refusing(_OP, group, *shard_groups(module)):
            density = 1.0 if density is None else density
            checks.require_density(_OP, density)
            if format is None:
                format = "ternary" if density == 1 else "bfloat16"
            self._settings = Settings.checked(
                _OP, density, format, transport, policy, refresh_every
            )
            checks.require_int(_OP, "period", period, 1, 2**31 - 1)
            checks.require_type(_OP, "step_ahead", step_ahead, bool, "a bool")
            self._weights = FlatWeights(_OP, module, group)
        self.period = period
        self._step_ahead = step_ahead
        self._run_settings = {
            "period": period,
            "shard": self._weights.shard,
            "step_ahead": step_ahead,
        }
        self._plan = plan_bucket(
            list(self._weights.names.values()),
            self._weights.sizes,
            self._settings,
            group.size(),
            self._weights.numel,
        )
        self.wire_bytes = self._plan.wire_bytes
        self._device = self._weights.device
        to_compare = {**self._weights.to_compare(), **self._run_settings}
        others = self._weights.shard_group
        self._shard_groups = () if others is None else (others,)
        self._ledger = StepLedger(
            _OP,
            group,
            self._device,
            self._settings,
            to_compare,
            step_name="averaging",  # its steps are averagings
            shards=others,
        )
        self._weights.broadcast_from_first_rank(group)
        self._base = self._weights.read()
        self._unaveraged = 0  # steps since the last averaging
        self._bucket = self._new_bucket({})

    @property
    def step(self) -> int:
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        checks.require_int(_OP, "step", step, 0, 2**31 - 1)
        if step != self._step:  # ModelAverager sets 0 before there is a ledger
            self._ledger.resume_at(step // self.period, step)
            self._step = step

    @torch.no_grad()
    def average_parameters(
        self, params: Iterable[Parameter] | Iterable[dict[str, Parameter]] | None = None
    ) -> None:
        """Call it after every step of the optimizer; averages after every `period`-th.

        Collective at an averaging. Mutates the weights of the module.

        Args:
            params: ignored, as the parameters are those of `module`. Torch's averagers have it.

        Raises:
            ValueError: at an averaging, different parameters of this rank require grad than when
                this was made. Nothing was averaged, and the step is not counted. Other ranks raise
                at the group's timeout; load a checkpoint then.
            RuntimeError: a rank had NaN or infinite weights, or the sum of finite changes
                overflows. Every rank raises, and training can continue: the base is that of the
                last averaging, and the changes since then are in the residual. Non-finite and
                overflowed changes are dropped. In the few-bit formats, the whole group of 64
                entries that contains a NaN or Inf is dropped.
            RuntimeError: a rank is gone. The other ranks raise at the group's timeout at the
                latest. They lose nothing, and `state_dict` works; the group cannot be used again.
            RuntimeError: this rank received a damaged payload. It raises now and in every later
                call: load a checkpoint into a new averager. Other ranks raise as if it were gone.
        """
        self._ledger.require_intact()
        averages = (self.step + 1) % self.period == 0
        if averages:
            self._weights.require_same("average_parameters")
        self._step += 1
        self._unaveraged += 1
        if averages:
            self._average()

    @torch.no_grad()
    def flush(self) -> None:
        """Average weights and residuals now, densely in float32, at the end of training.

        Call it on every rank, after any step. It does not count as a step. Afterwards weights are
        bitwise the same on all ranks, and residuals are 0. A ring sends 8 (P - 1) / P bytes per
        element.

        Raises:
            ValueError: ranks do not resume from the same step, after a load, or have averaged a
                different number of times.
            RuntimeError: a rank did not call this within the group's timeout. Nothing has changed.
            ValueError: different parameters of this rank require grad than when this was made.
                Other ranks raise at the group's timeout.
            RuntimeError: a rank has NaN or infinite weights, or a mean overflows. Every rank
                raises; nothing has changed. Or this rank received a damaged payload.
        """
        self._ledger.require_intact()
        self._weights.require_same("flush")
        self._compare("flush")
        self._ledger.compare_step("flush")
        pending = self._weights.change_from(self._start(self._base))
        self._bucket.add_pending(pending)
        with self._collective("flush"):
            base = dense_mean(pending, torch.float32, self.process_group).add_(self._base)
            overflows = not self._weights.all_representable(base)
            overflows = any_rank(overflows, self._device, *self._shard_groups)
        if overflows:
            raise RuntimeError("dct::flush: weights must be finite on every rank, got NaN or Inf")
        torch._foreach_zero_(self._bucket.residuals())
        self._base = base
        self._weights.write(base)
        self._unaveraged = 0

    def plan(self) -> str:
        """The bytes of an averaging, as a table, and the bytes per step.

        Raises:
            RuntimeError: this rank received a damaged payload.
        """
        self._ledger.require_intact()
        table = plan_table([self._plan], self._device, "averaging")
        dense = all_reduce_bytes(4 * self._plan.numel, self._plan.ranks)
        line = f"\nEvery {self.period} steps: {self.wire_bytes / self.period:,.0f} bytes a step"
        fewer = dense * self.period / self.wire_bytes if self.wire_bytes else 0
        line += f", {fewer:,.1f}x fewer than that." if fewer else "."
        return table + line

    def stats(self) -> dict[str, float | int | None]:
        """Means of the last 100 averagings. Does not wait.

        `step`: steps taken; `unaveraged`: those since the last averaging, in this rank's weights
        alone; `density`: entries that this rank sent over all entries; `overflow`: fraction of
        payloads, of all ranks, with less room than entries that passed (both None before the first
        averaging); `wire_bytes`: bytes sent per rank and averaging.

        Raises:
            RuntimeError: this rank received a damaged payload.
        """
        self._ledger.require_intact()
        own = {"step": self.step, "unaveraged": self._unaveraged, "wire_bytes": self.wire_bytes}
        return {**self._ledger.stats([self._plan]), **own}

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals (an owner's as well) and step, and the base. Copies, on the CPU.

        Save one file per rank, together with the rank's weights and optimizer, because these differ
        between averagings. The entry's "unaveraged" counts the steps since the last averaging. With
        `step_ahead` weights differ right after an averaging as well, until a flush.

        Raises:
            RuntimeError: this rank received a damaged payload.
        """
        self._ledger.require_intact()
        parts = zip(self._bucket.states().items(), self._base.split(self._plan.sizes), strict=True)
        states = {
            name: SegmentState(state.residual, state.owner, base.to("cpu", copy=True))
            for (name, state), base in parts
        }
        numbers = {"run_id": self._ledger.run_id, "step": self.step}
        return self._run().save(states, **numbers, unaveraged=self._unaveraged)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from this rank's `state_dict`, bit for bit, with the weights saved with it.

        First make the averager, which broadcasts weights, then load the weights, then call this.
        (With policy "fixed" a new threshold is sampled, so bits may differ.) With `step_ahead`, a
        state that was saved right after an averaging restores the weights. A refused dict changes
        nothing.

        Raises:
            ValueError: made with a different version, density, period, step_ahead or number of
                ranks, by a different rank, or for a different model; or something in it is missing,
                of a wrong type or shape or not finite. With `step_ahead`: a merged state, or one of
                a transport that this averager cannot resume from.
            TypeError: not a state dict.
            RuntimeError: this averager received a damaged payload: load into a new one.
        """
        self._ledger.require_intact()
        groups.require_group("load_state_dict", self.process_group)
        entry, states = self._run().find(state)
        owned = any(own.owner is not None and own.owner.any() for own in states.values())
        if self._step_ahead and owned and self._plan.transport == "all_gather":
            # The owner's residual would become this rank's, and its weights not be as far ahead.
            raise ValueError(
                "dct::load_state_dict: transport must be reduce_scatter, as in the saved run, "
                "with step_ahead (or flush, and start anew), got all_gather"
            )
        self._step = entry["step"]
        self._ledger.load(entry, self.step // self.period)
        self._bucket = self._new_bucket(states)
        bases = [base for name in self._plan.names if (base := states[name].base) is not None]
        self._base = torch.cat(bases).to(self._device)
        self._unaveraged = entry["unaveraged"]
        if self._step_ahead and not self._unaveraged:
            # Those saved, to the bit, where this rank was given others since (as it was made, say).
            self._weights.write(self._start(self._base))

    def _run(self) -> Run:
        """This rank, for checkpoints."""
        sizes = zip(self._plan.names, self._plan.sizes, strict=True)
        ranks = {"world_size": self.process_group.size(), "local_size": 1}
        same = {**self._run_settings, "density": self._settings.density, **ranks}
        parameters = {name: Flat(numel) for name, numel in sizes}
        return Run("rank", self._ledger.rank, self._settings.format, same, parameters)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"dct::{_OP}: an averager must not be copied or pickled (save its state_dict()), got "
            "a copy"
        )

    def _new_bucket(self, states: States) -> Bucket:
        group, averagings = self.process_group, self._ledger.step
        return Bucket(self._plan, group, self._device, averagings, states)

    def _average(self) -> None:
        """Exchange the changes of the weights. If that fails, undo it."""
        moved = self._weights.change_from(self._start(self._base))
        self._compare("average_parameters")
        self._ledger.begin("average_parameters", self.step // self.period)
        base = None
        try:
            self._ledger.sent[0] = self._bucket
            with self._collective("average_parameters"):
                self._bucket.start(moved)
            del moved  # is in the residual; the mean needs as much memory
            base = self._receive()
            start = self._start(base)  # needs memory, so before ranks agree
            self._agree()
            if self._ledger.non_finite:
                raise RuntimeError(
                    f"dct::average_parameters: weights at averaging {self.step // self.period} "
                    f"must be finite on every rank, got {self._weights.cause(base)}"
                )
        except BaseException:
            self._ledger.take_back()
            if base is not None and self._ledger.non_finite:
                self._drop_overflow(base)
            self._weights.write(self._start(self._base))
            raise
        self._base = base
        self._weights.write(start)
        self._unaveraged = 0

    def _compare(self, op: str) -> None:
        """As `StepLedger.compare`; warn if a DDP, say, still averages gradients."""
        digests = self._ledger.compare(op, self._weights.gradient_digest)
        if len(digests) > 1 and set(digests) == {digests[0]} != {0}:
            warn_user(
                "DCT: gradients are the same on all ranks, so every rank reads the same data, or "
                "DistributedDataParallel still averages gradients and nothing is saved: train the "
                "module itself, or under ddp.no_sync()."
            )

    def _start(self, base: Tensor) -> Tensor:
        """The weights of this rank after an averaging: the base, plus the residual if ahead."""
        if not self._step_ahead:
            return base
        ahead = base + self._bucket.codec.residual
        return torch.where(self._weights.is_representable(ahead), ahead, base, out=ahead)

    def _receive(self) -> Tensor:
        """The base after the exchange. Waits for the payloads; changes no weights."""
        mean = torch.empty_like(self._base)
        with self._collective("average_parameters"):
            self._bucket.finish(mean)
        self._ledger.look()
        base = mean.add_(self._base)
        self._ledger.non_finite |= not self._weights.all_representable(base)
        return base

    def _agree(self) -> None:
        """Wait until all ranks have received all payloads; then every rank knows of a NaN or Inf.

        A rank that received a damaged payload raises before, so no rank applies this averaging.
        """
        self._ledger.require_intact()
        among = self.process_group, *self._shard_groups
        with self._collective("average_parameters"):
            self._ledger.non_finite = any_rank(self._ledger.non_finite, self._device, *among)

    @contextlib.contextmanager
    def _collective(self, op: str) -> Iterator[None]:
        """Name the call, the step and the likely cause if a collective inside fails."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"dct::{op}: every rank must call {op} after the same step, here {self.step}, and "
                f"keep running, got {error}"
            ) from error

    def _drop_overflow(self, base: Tensor) -> None:
        """Drop the entries of residuals that would overflow the weights again."""
        most = torch.zeros_like(self._base)
        self._bucket.add_pending(most)
        most.mul_(2 * self._plan.ranks).add_(self._base)  # rounding doubles it, at most
        self._bucket.drop(
            ~(self._weights.is_representable(base) | self._weights.is_representable(most))
        )
