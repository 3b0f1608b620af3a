"""Local SGD with compression: averages the changes of the weights every few optimizer steps."""

import contextlib
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager
from torch.nn import Parameter

from dct_kernels import checks

from .. import groups
from ..collectives import all_reduce_bytes, any_rank, dense_mean
from ..exchange.bucket import Bucket, SegmentState
from ..exchange.checkpoint import Flat, Run, States, changeable
from ..exchange.ledger import StepLedger
from ..exchange.optimizers import AveragerChecks
from ..exchange.plan import log_plan, plan_bucket, plan_table
from ..exchange.settings import Settings
from ..groups import Agreement, known_group, sharing_errors
from ..user_warnings import warn_user
from .weights import FlatWeights, shard_groups

_OP = "DCTAverager"


class DCTAverager(ModelAverager):
    """Averages the weights of all ranks every `period` steps: compressed local SGD.

        averager = DCTAverager(module, period=10)  # without DDP
        optimizer.step()  # any optimizer; it sees only this rank's gradients
        averager.average_parameters()

    Every `period`-th call computes, for all weights (`base` is the result of the last averaging):

        moved = weights - base + residual  # on every rank
        sent = moved in a quantized format, or its largest entries (fraction `density`)
        residual = moved - sent
        base += mean of all ranks' sent
        weights = base  # with step_ahead: base + residual

    After `load_state_dict` of `module`, on every rank and with the same weights, training continues
    from the loaded weights. Their earlier changes are dropped.

    Results are deterministic. Weights are then bitwise equal on all ranks. With `step_ahead`, they
    are equal only after `flush`. Source: SparseLoCo (arXiv 2508.15706) without its outer optimizer
    and decay, and with quantization or thresholds instead of top-k.

    Args:
        module: parameters of float32, bfloat16 or float16, on one CPU or CUDA device. The averager
            broadcasts all parameters of the first rank, and then averages the parameters that
            require grad. The set of these parameters must not change. For a module sharded by
            `fully_shard` on a one-dimensional mesh, it averages this rank's shards.
        period: number of steps between averagings.
        density: fraction of all entries sent per averaging, in (0, 1]; default 1.
        format: see `DCTState`; default "ternary", or "bfloat16" with a density below 1.
        transport: see `DCTState`.
        process_group: the ranks to average over, including this one; default: all. With shards:
            the ranks that hold the same shard in other replicas (docs/guide/fsdp2.md).
        refresh_every: see `DCTState`. An averaging takes the place of a step.
        step_ahead: continue from base + residual, as in SAEF (arXiv 2008.05823).

    Attributes:
        step: number of calls of `average_parameters`. Set it on every rank to resume at a step.
        wire_bytes: bytes per averaging that a rank sends, for the rank that sends the most.

    Raises:
        ValueError, TypeError: an argument is out of range, or ranks differ.
        RuntimeError: another rank raised an error, or did not construct its averager in time.
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
        refresh_every: int = 1,
        step_ahead: bool = False,
    ) -> None:
        with sharing_errors(_OP, known_group(process_group), *shard_groups(module)):
            group = groups.require_group(_OP, process_group, "process_group")
            super().__init__(group)
            density = 1.0 if density is None else density
            checks.require_density(_OP, density)
            if format is None:
                format = "ternary" if density == 1 else "bfloat16"
            self._settings = Settings.checked(_OP, density, format, transport, refresh_every)
            checks.require_int(_OP, "period", period, 1, 2**31 - 1)
            checks.require_type(_OP, "step_ahead", step_ahead, bool, "a bool")
            self._weights = weights = FlatWeights(_OP, module, group)
        self.period, self._step_ahead = period, step_ahead
        self._run_settings = {"period": period, "shard": weights.shard, "step_ahead": step_ahead}
        names, sizes, numel = list(weights.names.values()), weights.sizes, weights.numel
        self._plan = plan_bucket(names, sizes, self._settings, group.size(), numel)
        self.wire_bytes, self._device = self._plan.wire_bytes, weights.device
        values = {**weights.to_compare(), **self._run_settings, **self._settings.to_compare()}
        self._agreement = Agreement(_OP, group, self._device, values, *weights.shard_groups)
        self._ledger = StepLedger(_OP, unit="averaging")
        weights.broadcast_from_first_rank(group)
        self._base = weights.read()
        self._resumed = False  # whether there was no step since `load_state_dict`
        self._unaveraged = 0  # steps since the last averaging
        self._bucket = self._new_bucket({})
        self._optimizers = AveragerChecks(weights.names, period, step_ahead)

    @property
    def step(self) -> int:
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        checks.require_int(_OP, "step", step, 0, 2**31 - 1)
        if step != self._step:  # ModelAverager's constructor sets 0 before the ledger exists
            self._agreement.resume(step)
            self._ledger.resume(step // self.period)
            self._step = step

    @torch.no_grad()
    def average_parameters(
        self, params: Iterable[Parameter] | Iterable[dict[str, Parameter]] | None = None
    ) -> None:
        """Average the weights in every `period`-th call. Call it after each optimizer step.

        An averaging is collective and overwrites the weights of the module.

        Args:
            params: ignored; for compatibility with torch's averagers.

        Raises:
            ValueError: at an averaging, the set of parameters that require grad has changed on this
                rank. Nothing was averaged, and the step is not counted. Other ranks raise at the
                group's timeout. Load a checkpoint to continue.
            RuntimeError: a rank had NaN or infinite weights, or the sum of finite changes
                overflows. Every rank raises, and training can continue from the base of the last
                averaging, with the changes since then in the residual. Non-finite and overflowed
                changes are dropped. In quantized formats, the whole group of 64 entries that
                contains a NaN or Inf is dropped.
            RuntimeError: a rank is gone. The other ranks raise, at the group's timeout at the
                latest. They lose no changes and can call `state_dict`, but the group is unusable.
            RuntimeError: this rank received a damaged payload. Every later call of any method also
                raises. Load a checkpoint into a new averager. Other ranks raise as if this rank
                were gone.
        """
        self._ledger.require_intact()
        self._optimizers.called()
        if self._resumed:
            self._weights.take_loaded()  # the same, if they were loaded after the averager
            self._resumed = False
        self._rebase()
        averages = (self.step + 1) % self.period == 0
        if averages:
            self._weights.require_same("average_parameters")
        self._step += 1
        self._unaveraged += 1
        if averages:
            self._average()

    @torch.no_grad()
    def flush(self) -> None:
        """Average weights and residuals densely in float32, for example at the end of training.

        Call it on every rank, after any step. It does not count as a step. Afterwards, weights
        are bitwise the same on all ranks, and residuals are 0. With P ranks in a ring, each rank
        sends 8 (P - 1) / P bytes per element.

        Raises:
            ValueError: ranks resumed from different steps, or have averaged a different number of
                times.
            ValueError: the set of parameters that require grad has changed on this rank. Other
                ranks raise at the group's timeout.
            RuntimeError: a rank did not call this within the group's timeout. Nothing has changed.
            RuntimeError: a rank has NaN or infinite weights, or a mean overflows. Every rank
                raises, and nothing has changed.
        """
        self._ledger.require_intact()
        self._optimizers.called()
        self._weights.require_same("flush")
        self._rebase()
        self._compare("flush")
        self._agreement.check_step("flush", self._ledger.step)
        pending = self._weights.change_from(self._start(self._base))
        self._bucket.add_pending(pending)
        with self._collective("flush"):
            base = dense_mean(pending, torch.float32, self.process_group).add_(self._base)
            overflows = not self._weights.all_representable(base)
            overflows = any_rank(overflows, self._device, *self._weights.shard_groups)
        if overflows:
            checks.fail("flush", "weights", "finite on every rank", "NaN or Inf", RuntimeError)
        torch._foreach_zero_(self._bucket.residuals())
        self._base = base
        self._weights.write(base)
        self._unaveraged = 0

    def plan(self) -> str:
        """Return a table of the bytes per averaging, and the bytes per step."""
        self._ledger.require_intact()
        table = plan_table([self._plan], self._device, "averaging")
        dense = all_reduce_bytes(4 * self._plan.numel, self._plan.ranks)
        line = f"\nEvery {self.period} steps: {self.wire_bytes / self.period:,.0f} bytes per step"
        fewer = dense * self.period / self.wire_bytes if self.wire_bytes else 0
        line += f", {fewer:,.1f}x fewer than the all-reduce in every step." if fewer else "."
        return table + line

    def stats(self) -> dict[str, float | int | None]:
        """Return means over the last 100 averagings, without waiting.

        - `step`: number of steps taken.
        - `unaveraged`: number of local steps since the last averaging.
        - `density`: fraction of the entries that this rank sent; None before the first averaging.
        - `overflow`: fraction of all ranks' payloads that could not hold all entries above the
          threshold; None before the first averaging.
        - `wire_bytes`: bytes sent per rank and averaging.
        """
        self._ledger.require_intact()
        counts = {"step": self.step, "unaveraged": self._unaveraged, "wire_bytes": self.wire_bytes}
        return {**self._ledger.stats([self._plan]), **counts}

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals, the base, and the step, as copies on the CPU.

        Save one file per rank, together with the rank's weights and optimizer, which differ between
        ranks. "unaveraged" in the result counts the local steps since the last averaging.
        """
        self._ledger.require_intact()
        self._rebase()
        parts = zip(self._bucket.states().items(), self._base.split(self._plan.sizes), strict=True)
        states = {
            name: SegmentState(state.residual, state.owner, base.to("cpu", copy=True))
            for (name, state), base in parts
        }
        run_id, unaveraged = self._agreement.run_id, self._unaveraged
        return self._run().save(states, run_id, self.step, unaveraged=unaveraged)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from this rank's `state_dict`, bit for bit, with the weights saved with it.

        First construct the averager, which broadcasts weights. Then load the weights, and then call
        this method. With `refresh_every` above 1, bits may differ, because a new threshold is
        sampled. With `step_ahead`, a state saved directly after an averaging also restores the
        weights. If this call raises an error, nothing has changed.

        Raises:
            ValueError: the dict has a different version, density, period, step_ahead, number of
                ranks, rank or model; or a value is missing, not finite, or has a wrong type or
                shape. With `step_ahead`: the state is merged, or its transport is incompatible.
            TypeError: `state` is not a state dict.
        """
        self._ledger.require_intact()
        groups.require_group("load_state_dict", self.process_group)
        run = self._run()
        entry, states = run.find(state)
        owned = any(s.owner is not None and s.owner.any() for s in states.values())
        if self._step_ahead and owned and self._plan.transport == "all_gather":
            # Loading would add the owner's residual to this rank's residual but not to its weights.
            rule = "reduce_scatter, as in the saved run, with step_ahead "
            rule += "(or flush, and start a new averager)"
            checks.fail("load_state_dict", "transport", rule, "all_gather")
        run.report_changes(entry)
        bases = [base for name in self._plan.names if (base := states[name].base) is not None]
        self._step = entry["step"]
        self._agreement.resume(self.step, entry, bases)
        self._ledger.restart(self.step // self.period)
        self._bucket = self._new_bucket(states)
        self._base = torch.cat(bases).to(self._device)
        self._unaveraged = entry["unaveraged"]
        self._weights.take_loaded()  # the weights that belong to this state
        self._resumed = True
        if self._step_ahead and not self._unaveraged:
            # Restores the saved weights, which the constructor's broadcast may have overwritten.
            self._weights.write(self._start(self._base))

    def _run(self) -> Run:
        """The description of this run in checkpoints."""
        ranks = {"world_size": self.process_group.size(), "local_size": 1}
        same = {**self._run_settings, "density": self._settings.density, **ranks}
        parameters = dict(zip(self._plan.names, map(Flat, self._plan.sizes), strict=True))
        others = changeable(self._settings, self.process_group.size())
        return Run("rank", self._agreement.rank, others, same, parameters)

    def __getstate__(self) -> NoReturn:
        rule = "be copied or pickled (save its state_dict())"
        checks.fail(_OP, "an averager", rule, "a copy", TypeError, "not")

    def _new_bucket(self, states: States) -> Bucket:
        log_plan(_OP, self._plan, self._device)
        return Bucket(self._plan, self.process_group, self._device, self._ledger.step, states)

    def _average(self) -> None:
        """Average the weights. On an error, restore the last base and keep changes as residual."""
        moved = self._weights.change_from(self._start(self._base))
        self._compare("average_parameters")
        self._ledger.begin(self.step // self.period)
        base, non_finite = None, False
        try:
            self._ledger.record("bucket 0", self._bucket)
            with self._collective("average_parameters"):
                self._bucket.reduce(moved)
            self._ledger.finish()
            base = moved.add_(self._base)
            non_finite = self._ledger.non_finite or not self._weights.all_representable(base)
            start = self._start(base)  # may run out of memory, so compute it before ranks agree
            # Wait until all ranks have received all payloads. If a rank received a damaged payload,
            # it has raised, so no rank applies this averaging.
            dimensions = self.process_group, *self._weights.shard_groups
            with self._collective("average_parameters"):
                non_finite = any_rank(non_finite, self._device, *dimensions)
            if non_finite:
                what = f"weights at averaging {self.step // self.period}"
                rule, got = "finite on every rank", self._weights.cause(base)
                checks.fail("average_parameters", what, rule, got, RuntimeError)
        except BaseException:
            self._ledger.take_back()
            if base is not None and non_finite:
                self._drop_overflow(base)
            self._weights.write(self._start(self._base))
            raise
        self._base = base
        self._weights.write(start)
        self._unaveraged = 0

    def _rebase(self) -> None:
        """Use the weights that `load_state_dict` of the module has loaded as the base.

        Drops their changes since the last averaging and their residuals.
        """
        if loaded := self._weights.take_loaded():
            spans = zip(self._weights.names, pairwise(self._plan.bounds), strict=True)
            for parameter, (low, high) in spans:
                if parameter in loaded:
                    self._base[low:high] = loaded[parameter].flatten()
                    self._bucket.drop_range(low, high)
            self._agreement.resume(self.step, base=[self._base])

    def _compare(self, op: str) -> None:
        """Compare the run and step. Warn if all ranks have equal gradients, as with DDP."""
        digests = self._agreement.check(op, self._weights.gradient_digest)
        if len(digests) > 1 and len({*digests}) == 1 and any(digests):
            warn_user(
                "DCT: gradients are the same on all ranks, so every rank reads the same data, or "
                "DistributedDataParallel still averages gradients and nothing is saved: train the "
                "module itself, or under ddp.no_sync()."
            )

    def _start(self, base: Tensor) -> Tensor:
        """The weights after an averaging: `base`, plus the residual if `step_ahead` is set."""
        if not self._step_ahead:
            return base
        ahead = base + self._bucket.codec.residual
        return torch.where(self._weights.is_representable(ahead), ahead, base, out=ahead)

    @contextlib.contextmanager
    def _collective(self, op: str) -> Iterator[None]:
        """If a collective inside fails, raise an error with the call, the step and the cause."""
        try:
            yield
        except RuntimeError as error:
            rule = f"call {op} after the same step, here {self.step}, and keep running"
            raise RuntimeError(f"dct::{op}: every rank must {rule}, got {error}") from error

    def _drop_overflow(self, base: Tensor) -> None:
        """Drop the residual entries that would make the weights infinite again."""
        bound = torch.zeros_like(self._base)
        self._bucket.add_pending(bound)
        bound.mul_(2 * self._plan.ranks).add_(self._base)  # rounding at most doubles a value
        kept = self._weights.is_representable(base) | self._weights.is_representable(bound)
        self._bucket.drop(~kept)
