"""Weights of ranks that train on their own, averaged every few steps by their largest changes."""

from collections.abc import Iterable
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager
from torch.nn import Parameter

from dct_kernels import __version__, checks

from .. import groups
from ..agreement import refusing
from ..compressor import check_settings
from . import checkpoint, model
from .bucket import Bucket
from .bucket_plan import BucketPlan, Settings
from .damage import Damage
from .gather import Gather
from .history import History
from .run import Run

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
        sent = the largest `density` of moved, residual = moved - sent
        base += mean of all ranks' sent
        weights = base

    so that weights are then bitwise the same on all ranks, and what was not sent has left them and
    waits in the residual. A step costs density / period of the entries, in bytes: 1 % as above.

    For optimizers that divide by a running mean of squares (Adam). Sparse gradients come to them in
    bursts that they take for noise, and late, while the weights that gradients are computed on know
    nothing of what waits. Local steps are dense, and at once. At a constant learning rate they end
    level with a dense run, under one that decays behind it. As SparseLoCo (arXiv 2508.15706) does,
    but with thresholds instead of chunked top-k, bfloat16 values, residuals that do not decay, and
    a plain mean as its outer optimizer.

    It is a torch `ModelAverager`, so `PostLocalSGDOptimizer(optimizer, averager)` takes it. With a
    GradScaler, a rank that skips a step has not moved in it: nothing is to be taken back. Buffers
    (running means of batch norm) stay each rank's own. Scores and exported models are to be of the
    weights after a `period`-th step.

    Memory: 8 bytes a parameter, 4 more while averaging, and the payload once per rank.

    Args:
        module: parameters on one CPU or CUDA device; those that require grad are averaged, and are
            float32. No DDP. All parameters of the first rank, frozen ones as well, replace the
            others'. Which of them require grad must stay the same.
        density: fraction of all entries sent each time, in (0, 1]: those above one threshold.
        period: steps from one averaging to the next.
        refresh_every: averagings between samples of the threshold, with policy "fixed".
        value_dtype: of the values sent, torch.bfloat16 or torch.float32.
        process_group: ranks to average over, this one among them; default all.
        policy: "fresh": the threshold is sampled at every averaging; or "fixed"; see `Compressor`.

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
        value_dtype: torch.dtype = torch.bfloat16,
        process_group: dist.ProcessGroup | None = None,
        policy: str = "fresh",
    ) -> None:
        group = groups.require_group(_OP, process_group)
        super().__init__(group)
        with refusing(_OP, group):
            check_settings(_OP, density, refresh_every, policy, value_dtype)
            checks.require_int(_OP, "period", period, 1, 2**63 - 1)
            self._names, frozen = _parameters(module)
        self.period = period
        self._module = module
        self._device = model.device_of(self._names)
        self._settings = Settings(density, refresh_every, policy, value_dtype)
        sizes = tuple(parameter.numel() for parameter in self._names)
        names = tuple(self._names.values())
        self._plan = BucketPlan(names, sizes, self._settings, Gather, group.size())
        self.wire_bytes = self._plan.wire_bytes
        self._run = Run(
            _OP,
            group,
            self._device,
            {
                "version": __version__,
                "model": model.describe(self._names),
                "frozen": model.describe(frozen),
                "period": period,
                **self._settings.as_told(),
            },
        )
        self._take_those_of_first_rank()
        self._base = self._weights()
        self._start(0, {})

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
            RuntimeError: a payload of one of the last two averagings was damaged.
        """
        averages = (self.step + 1) % self.period == 0
        if averages:
            self._require_same_parameters()
        self.step += 1
        if averages:
            self._average()

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and step, and the base. Copies, on the CPU.

        One file a rank, beside the rank's weights and optimizer, which differ between averagings.

        Raises:
            RuntimeError: a payload was damaged.
        """
        self._damage.require_none()
        parameters = self._bucket.states()
        parts = self._base.split(self._plan.sizes)
        for state, part in zip(parameters.values(), parts, strict=True):
            state["base"] = part.to("cpu", copy=True)
        entry = checkpoint.Entry(
            run_id=self._run.id,
            world_size=self.process_group.size(),
            step=self.step,
            density=self._settings.density,
            period=self.period,
            recent=History().state(),
            parameters=parameters,
        )
        return checkpoint.make(dist.get_rank(), entry)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from this rank's `state_dict`, bit for bit, with the weights saved beside it.

        (With policy "fixed" a threshold is sampled anew, so that bits may differ.)

        A state that is refused changes nothing.

        Raises:
            ValueError: made with another version, density, period or number of ranks, by another
                rank, or for another model; or something in it is missing, of another type or shape
                or not finite.
            TypeError: no state dict.
        """
        sizes = dict(zip(self._plan.names, self._plan.sizes, strict=True))
        ranks = self.process_group.size()
        entry = checkpoint.find(
            state, dist.get_rank(), self._settings, sizes, ranks, period=self.period
        )
        saved = entry["parameters"]
        self._start(entry["step"] // self.period, saved)
        self._run.load(entry)
        self.step = entry["step"]
        self._base.copy_(torch.cat([saved[name]["base"] for name in sizes]))

    def __getstate__(self) -> NoReturn:
        rule = "kept apart from what is copied or pickled (save its state_dict())"
        checks.fail(_OP, "an averager", rule, "a copy", TypeError)

    def _start(self, averagings: int, states: dict[str, checkpoint.SegmentState]) -> None:
        self._bucket = Bucket(
            self._plan, self.process_group, self._device, averagings, states, watches=False
        )
        self._damage = Damage("average_parameters", "averaging")

    def _require_same_parameters(self) -> None:
        """Raise if others require grad than at the start: ranks would train those each alone."""
        now = _named(self._module, trained=True)
        names = now | self._names
        different = [names[parameter] for parameter in now.keys() ^ self._names.keys()]
        if different:
            rule = "with the same parameters that require grad as when this averager was made"
            got = f"a difference in {', '.join(sorted(set(different)))}: make another averager"
            checks.fail("average_parameters", "module", rule, got)

    @torch.no_grad()
    def _average(self) -> None:
        if self._damage.take_untold():
            self._bucket.tell_damage()
        self._damage.require_none()
        number = self.step // self.period
        self._run.begin_step(number)
        moved = self._weights().sub_(self._base)
        self._run.carry_out(partial(self._bucket.reduce, moved))
        report = self._bucket.take_report()
        assert report is not None  # of what was reduced just now
        self._damage.look(number, {0: report.receipt})
        self._base += moved
        self._go_on_from_base()

    @torch.no_grad()
    def _take_those_of_first_rank(self) -> None:
        first = dist.get_global_rank(self.process_group, 0)
        for parameter in self._module.parameters():
            flat = parameter.detach().flatten()  # its memory, if that is contiguous
            dist.broadcast(flat.view(torch.uint8), first, self.process_group)  # of any dtype
            parameter.copy_(flat.view_as(parameter))

    def _weights(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self._names])

    @torch.no_grad()
    def _go_on_from_base(self) -> None:
        for parameter, part in zip(self._names, self._base.split(self._plan.sizes), strict=True):
            parameter.copy_(part.view_as(parameter))


def _parameters(module: nn.Module) -> tuple[dict[Parameter, str], dict[Parameter, str]]:
    """{parameter: name} of those that require grad, and of the others."""
    if not isinstance(module, nn.Module):
        checks.fail(_OP, "module", "an nn.Module", type(module).__name__, TypeError)
    if model.holds_ddp(module):
        rule = "without DistributedDataParallel, which averages all gradients in every step"
        checks.fail(_OP, "module", rule, type(module).__name__, TypeError)
    trained, frozen = _named(module, trained=True), _named(module, trained=False)
    if not trained:
        checks.fail(_OP, "module", "with parameters that require grad", "none")
    for parameter, name in trained.items():
        checks.require_dtype(_OP, f"parameter {name}", parameter.dtype, (torch.float32,))
    devices = {parameter.device for parameter in trained | frozen}
    if len(devices) > 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        got = ", ".join(sorted(map(str, devices)))
        checks.fail(_OP, "module", "on one device, the CPU or CUDA", got)
    return trained, frozen


def _named(module: nn.Module, trained: bool) -> dict[Parameter, str]:
    return {p: name for name, p in module.named_parameters() if p.requires_grad == trained}
