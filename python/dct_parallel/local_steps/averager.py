"""Weights of ranks that train on their own, averaged every few steps by their largest changes."""

from collections.abc import Iterable
from functools import partial
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from dct_kernels import __version__, checks

from .. import groups, wire
from ..agreement import refusing
from ..collectives import dense_mean
from ..exchange import checkpoint
from ..exchange.all_gather import AllGather
from ..exchange.bucket import Bucket
from ..exchange.codec import Settings
from ..exchange.ledger import StepLedger
from ..exchange.parameters import describe
from ..exchange.plan import BucketPlan, plan_table
from ..exchange.run_guard import RunGuard
from ..exchange.segment_state import SegmentState

_OP = "DCTAverager"


class DCTAverager(ModelAverager):
    """Averages the weights of all ranks every `period` steps: local SGD, with DCT for what crosses.

        averager = DCTAverager(module, density=0.1, period=10)
        ...
        optimizer.step()
        averager.average_parameters()

    No DDP: every rank's optimizer, of any kind, sees the gradients of that rank alone. After every
    `period`-th step, for all weights as one flat tensor,

        moved = weights - base + residual     on every rank
        sent = the largest `density` of moved, residual = (moved - sent) * residual_decay
        base += mean of all ranks' sent
        weights = base

    so that weights are then bitwise the same on all ranks, and what was not sent has left them and
    waits in the residual. A step costs density / period of the entries, in bytes: 1 % as above.

    For optimizers that divide by a running mean of squares (Adam). Sparse gradients come to them in
    bursts that they take for noise, and late, while the weights that gradients are computed on know
    nothing of what waits. Local steps are dense, and at once. At a constant learning rate they end
    level with a dense run, under one that decays behind it. As SparseLoCo (arXiv 2508.15706) does,
    but with thresholds instead of chunked top-k, bfloat16 values, and a plain mean as its outer
    optimizer.

    It is a torch `ModelAverager`, so `PostLocalSGDOptimizer(optimizer, averager)` takes it. With a
    GradScaler, a rank that skips a step has not moved in it: nothing is to be taken back. Buffers
    (running means of batch norm) stay each rank's own. Scores and exported models are to be of the
    weights after a `period`-th step.

    Memory: 8 bytes a parameter, 4 more while averaging (13 in few bits, and in `flush` 15), and the
    payload once per rank.

    Args:
        module: parameters on one CPU or CUDA device; those that require grad are averaged. They are
            float32, bfloat16 or float16, of which weights are then rounded from a base in float32.
            No DDP. All parameters of the first rank, frozen ones as well, replace the others'.
            Which of them require grad must stay the same.
        density: fraction of all entries sent each time, in (0, 1]: those above one threshold.
        period: steps from one averaging to the next.
        refresh_every: averagings between samples of the threshold, with policy "fixed".
        value_dtype: of the values sent: see `DCTState`. Here all ranks gather all payloads, so that
            bytes grow with the ranks: every entry in few bits is for few.
        process_group: ranks to average over, this one among them; default all.
        policy: "fresh": the threshold is sampled at every averaging; or "fixed"; see `Compressor`.
        residual_decay: in (0, 1]: each averaging multiplies by it what stays behind, as SparseLoCo
            does with .95. Below 1 something is lost, of what waits longest most.

    Attributes:
        step: calls of `average_parameters`.
        period: as given.
        wire_bytes: what a rank sends in an averaging, the same on every rank each time.

    A payload damaged on its way is not used. Who received it raises at the next averaging, all
    others at the one after that. Go back to a checkpoint then.

    It belongs to its module and its process group, so it cannot be copied or pickled: keep it
    beside what is (a module that gets an EMA, say), and `state_dict()` in checkpoints.

    Raises:
        ValueError, TypeError: an argument is out of its range, or ranks differ; the text names it.
        RuntimeError: some other rank raises instead, as the text says, or does not construct its
            averager within the group's timeout. All ranks may try again, after this as well.
    """

    def __init__(
        self,
        module: nn.Module,
        density: float = 0.1,
        period: int = 10,
        refresh_every: int = 1000,
        value_dtype: torch.dtype | str = torch.bfloat16,
        process_group: dist.ProcessGroup | None = None,
        policy: str = "fresh",
        residual_decay: float = 1.0,
    ) -> None:
        group = groups.require_group(_OP, process_group)
        super().__init__(group)
        with refusing(_OP, group):
            self._settings = Settings(density, refresh_every, policy, value_dtype, _OP)
            checks.require_int(_OP, "period", period, 1, 2**63 - 1)
            checks.require_number(_OP, "residual_decay", residual_decay)
            if not 0 < residual_decay <= 1:  # false of a NaN as well
                checks.fail(_OP, "residual_decay", "in (0, 1]", residual_decay)
            self._names, frozen = _parameters(module)
        self.period = period
        self._own = {"period": period, "residual_decay": float(residual_decay)}
        self._module = module
        self._device = next(iter(self._names)).device
        sizes = tuple(parameter.numel() for parameter in self._names)
        names = tuple(self._names.values())
        self._plan = BucketPlan(names, sizes, self._settings, AllGather, group.size())
        self.wire_bytes = self._plan.wire_bytes
        guard = RunGuard(
            _OP,
            group,
            self._device,
            {
                "version": __version__,
                "model": describe(self._names),
                "frozen": describe(frozen),
                **self._own,
                **self._settings.as_told(),
            },
        )
        # Its steps are averagings.
        self._ledger = StepLedger("average_parameters", guard, step_name="averaging")
        self._take_those_of_first_rank()
        self._base = self._weights()
        self._bucket = self._new_bucket({})

    def average_parameters(
        self, params: Iterable[Parameter] | Iterable[dict[str, Parameter]] | None = None
    ) -> None:
        """To be called after every step of the optimizer; averages after every `period`-th.

        Args:
            params: not looked at: always those of `module`. Torch's averagers have it.

        Raises:
            ValueError: at an averaging, other parameters require grad than when this was made; on
                this rank. Nothing was averaged, and the step is not counted. Ranks on which that
                is not so wait until the group's timeout: go back to a checkpoint then.
            RuntimeError: a payload of one of the last two averagings was damaged. Or some rank has
                weights that are NaN or infinite: every rank raises, its weights are those of the
                last averaging, and what they had moved by since waits in the residuals, which did
                not decay once more; in few bits but for rows of 1,024 with such a weight.
        """
        averages = (self.step + 1) % self.period == 0
        if averages:
            self._require_same_parameters("average_parameters")
        self.step += 1
        if averages:
            self._average()

    @torch.no_grad()
    def flush(self) -> None:
        """Average now, and all that waits with it: dense, in float32, where training ends.

        On every rank, after whichever step, which is not counted. Weights are then bitwise the same
        on all ranks, and no residual is left; a ring sends 8 (P - 1) / P bytes an element.

        Raises:
            ValueError: ranks do not go on from the same step, after a load. Or other parameters
                require grad than when this was made, on this rank: ranks on which that is not so
                wait until the group's timeout.
            RuntimeError: a payload was damaged, or some rank has weights that are NaN or infinite.
                Every rank raises, and nothing has changed.
        """
        self._require_same_parameters("flush")
        residual = self._bucket.codec.residual
        owed = self._moved().add_(residual)

        def mean_of(owed: Tensor) -> Tensor:
            return dense_mean(owed, torch.float32, self.process_group)

        # Who received damage lets the others find NaN: they are in this collective.
        def announce() -> None:
            mean_of(torch.full_like(owed, torch.nan))

        self._ledger.finish(announce)
        self._ledger.compare(self.step // self.period)
        mean = self._ledger.carry_out(partial(mean_of, owed))
        if not mean.isfinite().all():
            rule = "finite, and every payload intact, on every rank"
            checks.fail("flush", "weights", rule, "NaN or Inf", RuntimeError)
        residual.zero_()
        self._base += mean
        self._go_on_from_base()

    def plan(self) -> str:
        """What is sent in an averaging, as a table, and what that is a step."""
        table = plan_table([self._plan], "local steps", self._device, "averaging")
        dense = wire.all_reduce_bytes(4 * self._plan.numel, self._plan.ranks)
        line = f"\nEvery {self.period} steps: {self.wire_bytes / self.period:,.0f} bytes a step"
        fewer = dense * self.period / self.wire_bytes if self.wire_bytes else 0
        return table + line + (f", {fewer:,.1f}x fewer than that." if fewer else ".")

    def stats(self) -> dict[str, float | int | None]:
        """How the last 100 averagings went. Waits for the last one.

        `step`: steps taken; `density`: entries that this rank sent over all, a mean over averagings
        (None before any is); `overflow`: fraction of payloads, of all ranks, that were too small
        for what passed; `wire_bytes`: what a rank sends in an averaging.

        Raises:
            RuntimeError: a payload was damaged.
        """
        self._ledger.finish()
        stats = self._ledger.stats([self._plan])
        return {**stats, "step": self.step}

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and step, and the base. Copies, on the CPU.

        One file a rank, beside the rank's weights and optimizer, which differ between averagings.

        Raises:
            RuntimeError: a payload was damaged.
        """
        self._ledger.finish()
        states = self._bucket.states().items()
        bases = self._base.split(self._plan.sizes)
        parameters = {
            name: state.as_dict() | {"base": base.to("cpu", copy=True)}
            for (name, state), base in zip(states, bases, strict=True)
        }
        entry = {
            **self._ledger.saved(),
            "step": self.step,
            "world_size": self.process_group.size(),
            "density": self._settings.density,
            **self._own,
            "parameters": parameters,
        }
        return checkpoint.make(dist.get_rank(), cast(checkpoint.Entry, entry))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from this rank's `state_dict`, bit for bit, with the weights saved beside it.

        (With policy "fixed" a threshold is sampled anew, so that bits may differ.)

        A state that is refused changes nothing.

        Raises:
            ValueError: made with another version, density, period, residual_decay or number of
                ranks, by another rank, or for another model; or something in it is missing, of
                another type or shape or not finite.
            TypeError: no state dict.
        """
        sizes = dict(zip(self._plan.names, self._plan.sizes, strict=True))
        ranks = self.process_group.size()
        entry = checkpoint.find(
            state, dist.get_rank(), self._settings, sizes, ranks, averager=self._own
        )
        saved = entry["parameters"]
        self._ledger.load(entry, entry["step"] // self.period)
        self._bucket = self._new_bucket(saved)
        self.step = entry["step"]
        self._base.copy_(torch.cat([saved[name]["base"] for name in sizes]))

    def __getstate__(self) -> NoReturn:
        rule = "kept apart from what is copied or pickled (save its state_dict())"
        checks.fail(_OP, "an averager", rule, "a copy", TypeError)

    def _new_bucket(self, saved: dict[str, dict[str, Tensor]]) -> Bucket:
        states = {name: SegmentState.from_dict(state) for name, state in saved.items()}
        group, averagings = self.process_group, self._ledger.step
        return Bucket(self._plan, group, self._device, averagings, states, watches=False)

    def _require_same_parameters(self, op: str) -> None:
        """Raise if others require grad than at the start: ranks would train those each alone."""
        now = _named(self._module, trained=True)
        names = now | self._names
        different = [names[parameter] for parameter in now.keys() ^ self._names.keys()]
        if different:
            rule = "with the same parameters that require grad as when this averager was made"
            got = f"a difference in {', '.join(sorted(set(different)))}: make another averager"
            checks.fail(op, "module", rule, got)

    @torch.no_grad()
    def _average(self) -> None:
        self._ledger.finish(self._bucket.announce_damage)
        self._ledger.begin(self.step // self.period)
        moved = self._moved()
        self._ledger.reduction(0, self._bucket, moved)()
        self._ledger.look()
        if self._ledger.verdict.non_finite:
            self._refuse_non_finite()
        self._base += moved
        self._go_on_from_base()
        # For the next averaging: of one that is refused the residual then knows nothing.
        if self._own["residual_decay"] < 1:
            self._bucket.codec.residual.mul_(self._own["residual_decay"])

    def _refuse_non_finite(self) -> NoReturn:
        """On all ranks, as all saw it: what they moved by waits, but for what is not finite."""
        here = [name for parameter, name in self._names.items() if not parameter.isfinite().all()]
        got = f"NaN or Inf in {', '.join(here)}" if here else "NaN or Inf on another rank"
        self._ledger.take_back()
        self._go_on_from_base()
        op, number = "average_parameters", self.step // self.period
        checks.fail(op, f"weights at averaging {number}", "finite on every rank", got, RuntimeError)

    @torch.no_grad()
    def _take_those_of_first_rank(self) -> None:
        first = dist.get_global_rank(self.process_group, 0)
        for parameter in self._module.parameters():
            flat = parameter.detach().flatten().contiguous()  # its memory, if that is
            dist.broadcast(flat.view(torch.uint8), first, self.process_group)  # of any dtype
            parameter.copy_(flat.view_as(parameter))

    def _weights(self) -> Tensor:
        return torch.cat([parameter.detach().flatten().float() for parameter in self._names])

    def _moved(self) -> Tensor:
        """What weights have moved by since they were last set, flat, in float32.

        They were set to the base as their dtype rounds it. What that took off is in no difference:
        the base keeps it.
        """
        moved, sizes = self._weights(), self._plan.sizes
        parts = zip(self._names, moved.split(sizes), self._base.split(sizes), strict=True)
        for parameter, part, base in parts:
            part.sub_(base.to(parameter.dtype))
        return moved

    @torch.no_grad()
    def _go_on_from_base(self) -> None:
        for parameter, part in zip(self._names, self._base.split(self._plan.sizes), strict=True):
            parameter.copy_(part.view_as(parameter))


def _parameters(module: nn.Module) -> tuple[dict[Parameter, str], dict[Parameter, str]]:
    """{parameter: name} of those that require grad, and of the others."""
    if not isinstance(module, nn.Module):
        checks.fail(_OP, "module", "an nn.Module", type(module).__name__, TypeError)
    if any(isinstance(part, DistributedDataParallel) for part in module.modules()):
        rule = "without DistributedDataParallel, which averages all gradients in every step"
        checks.fail(_OP, "module", rule, type(module).__name__, TypeError)
    trained, frozen = _named(module, trained=True), _named(module, trained=False)
    if not trained:
        checks.fail(_OP, "module", "with parameters that require grad", "none")
    for parameter, name in trained.items():
        checks.require_dtype(_OP, f"parameter {name}", parameter.dtype, checks.FLOATS)
    devices = {parameter.device for parameter in trained | frozen}
    if len(devices) > 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        got = ", ".join(sorted(map(str, devices)))
        checks.fail(_OP, "module", "on one device, the CPU or CUDA", got)
    return trained, frozen


def _named(module: nn.Module, trained: bool) -> dict[Parameter, str]:
    return {p: name for name, p in module.named_parameters() if p.requires_grad == trained}
