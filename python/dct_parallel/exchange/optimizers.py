"""What the optimizers do with the averaged gradients: skipped steps, and warnings."""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from dct_kernels import checks

from .._torch import has_step_hooks, optimizer_notes, scale_of
from ..user_warnings import warn_user
from .results import HostCopy
from .settings import DENSITY

Optimizers = Optimizer | Sequence[Optimizer]


def loss_scale_of(
    op: str, scaler: GradScaler | None, optimizer: Optimizers | None, parameters: Iterable[Tensor]
) -> "LossScale | None":
    """Check these arguments of the entry point `op`, and return a LossScale for `parameters`.

    Returns None if there is no scaler, or if it is disabled.
    """
    rule = "a torch.amp.GradScaler"
    checks.require_type(op, "grad_scaler", scaler, (GradScaler, type(None)), rule)
    if scaler is None or not scaler.is_enabled():
        return None
    if optimizer is None:
        rule = "with an enabled grad_scaler, to see which steps the scaler skips (write "
        rule += "grad_scaler=scaler, optimizer=optimizer)"
        checks.fail(op, "optimizer", rule, None, verb="be given")
    given: list[Any] = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    wrong = [checks.shown(each) for each in given if not has_step_hooks(each)]
    if wrong or not given:
        rule = "a torch.optim.Optimizer, or a list of them "
        rule += "(for a wrapper, pass the inner optimizer)"
        checks.fail(op, "optimizer", rule, [*wrong, "an empty list"][0], TypeError)
    return LossScale(op, scaler, given, parameters)


class LossScale:
    """The scale of each step, on the device, and whether the scaler skipped a step.

    A scaler skips the step of an optimizer if any gradient of the optimizer is NaN or Inf,
    including gradients of other modules. So the averaged gradients cannot show whether a step was
    skipped. The scaler's records show whether `scaler.step` was called, and an optimizer hook shows
    whether the optimizer ran.

    Args:
        op: the entry point, for error messages.
        scaler: an enabled GradScaler.
        optimizers: the optimizers of the averaged parameters. Hooks record their steps.
        parameters: the averaged parameters.
    """

    def __init__(
        self,
        op: str,
        scaler: GradScaler,
        optimizers: Sequence[Optimizer],
        parameters: Iterable[Tensor],
    ) -> None:
        self._op, self._scaler, self._optimizers = op, scaler, optimizers
        self._notes: dict[int, dict[str, Any]] | None = None  # the scaler's records of this pass
        self._before: dict[int, object] = {}  # the optimizers' stages when the pass began
        # {id of an optimizer that ran: whether the device skipped its step; False if not fused}
        self._stepped: dict[int, HostCopy] = {}
        averaged, alive = set(parameters), weakref.ref(self)

        def hook(optimizer: Optimizer, *_: object) -> None:
            if (scale := alive()) is not None:
                scale._record_step(optimizer)

        for optimizer in optimizers:
            if not any(p in averaged for p in _parameters_of(optimizer)):
                got = f"{type(optimizer).__name__} of others"
                checks.fail(op, "optimizer", "parameters that are averaged", got, verb="have")
            weakref.finalize(self, optimizer.register_step_post_hook(hook).remove)

    @property
    def is_used(self) -> bool:
        """Whether the scaler has scaled a loss."""
        return scale_of(self._scaler) is not None

    def lacks(self, optimizer: Optimizer, parameters: Iterable[Tensor]) -> bool:
        """Whether the scaler steps this optimizer of `parameters`, some of which ours lack."""
        held = {p for optimizer in self._optimizers for p in _parameters_of(optimizer)}
        return id(optimizer) in optimizer_notes(self._scaler) and not held.issuperset(parameters)

    def begin(self) -> tuple[Tensor | None, Tensor | None]:
        """Begin a backward pass. Returns the scale of its gradients and the inverse, if known."""
        self._notes = optimizer_notes(self._scaler)
        self._before = {key: note["stage"] for key, note in self._notes.items()}
        self._stepped = {}
        scale = scale_of(self._scaler)
        return scale, None if scale is None else scale.reciprocal()

    def skipped(self) -> bool:
        """Whether the scaler skipped the step after this pass. Returns True once per skipped step.

        Returns False before `scaler.step`, and if the user accumulates the gradients of this pass.
        Waits for the device if an optimizer is fused.

        Raises:
            RuntimeError: some optimizers stepped and others did not. Raised once.
        """
        notes = self._notes
        if notes is None:
            return False
        watched = {id(optimizer) for optimizer in self._optimizers}
        stages = {key: note["stage"] for key, note in notes.items() if key in watched}
        changed = {k for k, stage in stages.items() if stage is not self._before.get(k, _READY)}
        handled = changed | self._stepped.keys()
        updated = notes is not optimizer_notes(self._scaler)
        if not updated and (handled != watched or {*stages.values()} != {OptState.STEPPED}):
            return False
        self._notes = None
        skipped = [self._stepped.get(key, _SKIPPED).tolist()[0] for key in handled]
        if any(skipped) and not all(skipped):
            rule = "one optimizer, or optimizers that the GradScaler skips together"
            got = f"{len(skipped)}, of which it skipped {skipped.count(True)}; nothing was taken "
            got += "back: call take_back() if no gradient of the last step was applied, otherwise "
            got += "load a checkpoint"
            checks.fail(self._op, "parameters", rule, got, RuntimeError, "have")
        return any(skipped)

    def _record_step(self, optimizer: Optimizer) -> None:
        """Record that `optimizer` ran. A fused optimizer decides on the device whether to skip."""
        if self._notes is not optimizer_notes(self._scaler):
            return  # this step belongs to a later pass of a different state
        found_inf = getattr(optimizer, "found_inf", None)
        self._stepped[id(optimizer)] = _APPLIED
        if isinstance(found_inf, Tensor):
            self._stepped[id(optimizer)] = HostCopy((found_inf != 0).view(1))


_READY = OptState.READY
_SKIPPED, _APPLIED = (
    HostCopy(torch.tensor([skipped], dtype=torch.bool, device="cpu")) for skipped in (True, False)
)


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


# Keys of optimizer states with running means of squared gradients (or a maximum, in Adamax):
# - exp_avg_sq: Adam, AdamW, NAdam, RAdam, LAMB
# - exp_inf: Adamax
# - square_avg: RMSprop, Adadelta
# - variance, row_var: Adafactor of torch
# - exp_avg_sq_row: Adafactor of transformers
# - state2: bitsandbytes
# AdaGrad's "sum" is not listed, because it is not a mean. With AdaGrad on the embedding tables of a
# DLRM and Adam on its MLPs, the sparse hook at 0.5 % increased the loss by 0.0011 +- 0.0004.
_SECOND_MOMENTS = {"exp_avg_sq", "exp_inf", "square_avg", "variance", "row_var", "exp_avg_sq_row"}
_SECOND_MOMENTS |= {"state2"}
_ADAGRAD, _MOMENTUM = "sum", "momentum_buffer"

UNUSED_STEPS = 3  # optimizer steps after which a hook that was never called warns
UNAVERAGED_PERIODS = 10  # without a call, after which an averager warns

# The beginning of the line that a warning asks the user to write.
_CALLS = {
    "DCTState": "DCTState(ddp, {})",
    "dct_fully_shard_hook": "dct_fully_shard_hook(model, mesh=mesh, {})",
}


def _watch_steps(watcher: Any, check: Callable[[Any, Optimizer], None]) -> Callable[[], None]:
    """Call check(watcher, optimizer) after every step of any optimizer, while `watcher` is alive.

    Returns a function that removes the hook. Do not call it while torch iterates over the hooks.
    """
    alive, check = weakref.ref(watcher), torch.compiler.disable(check)

    def hook(optimizer: Optimizer, *_: object) -> None:
        if (found := alive()) is not None:
            check(found, optimizer)

    return register_optimizer_step_post_hook(hook).remove


def _stepped(optimizer: Optimizer, parameters: set[Tensor]) -> list[Tensor]:
    """The parameters that the last step of this optimizer has changed."""
    return [p for p in _parameters_of(optimizer) if p in parameters and p.grad is not None]


def _state_keys(optimizer: Optimizer, parameters: Iterable[Tensor]) -> set[str]:
    return {key for p in parameters for key in optimizer.state.get(p, ())}


class OptimizerChecks:
    """Warns if optimizers lose gradients or quality because of the compression.

    A global hook checks every optimizer until all optimizers of the averaged parameters have
    stepped, which is when the next step begins. The device is never synchronized.

    Args:
        op: the entry point, for warnings.
        parameters: the averaged parameters.
        density: the fraction of the entries that is sent in a step.
        loss_scale: the scale of the user's GradScaler, or None.
        unused: a WeakMethod to call after an optimizer's third step if no step has begun, or None.

    Attributes:
        close: removes the hook. Do not call it from an optimizer hook.
    """

    def __init__(
        self,
        op: str,
        parameters: Iterable[Tensor],
        density: float,
        loss_scale: LossScale | None,
        unused: "weakref.WeakMethod[Callable[[], None]] | None" = None,
    ) -> None:
        self._call, self._parameters = _CALLS[op], set(parameters)
        self._density, self._loss_scale, self._unused = density, loss_scale, unused
        self._warned: set[str] = set()
        self._begun = False
        self._steps: Counter[int] = Counter()  # by the id of an optimizer
        self._states: dict[str, set[str]] = {}  # {class of optimizers: keys of their states}
        # All parameters, and one of each optimizer after the optimizers have stepped, to save time.
        self._watched = list(self._parameters)
        self._versions = -1
        self.forget_step()
        self.close = _watch_steps(self, OptimizerChecks._check)

    def begin(self, last: int) -> None:
        """Begin a step. `last` is the number of the step before it."""
        self._begun = True
        if self._steps:
            self.close()
            self._warn_about_states()
        if self._loss_scale is not None and self._loss_scale.is_used:  # it takes back skipped steps
            return
        versions = sum(parameter._version for parameter in self._watched)
        if versions == self._versions:
            self._unapplied = last
            self._warn_if_lost()
        self._versions = versions

    def non_finite(self, step: int) -> None:
        """A sender had a NaN or Inf in this step."""
        self._non_finite = step
        self._warn_if_lost()

    def forget_step(self) -> None:
        """Do not check that the last step is applied, because its entries were taken back."""
        self._versions = -1  # the sum of the versions of `_watched` when the current step began
        # The last step with a NaN or Inf, and the last step after which no parameter changed.
        self._non_finite, self._unapplied = -1, -2

    def _warn_if_lost(self) -> None:
        if self._non_finite == self._unapplied:
            self._warn(
                "gradients had NaN or Inf in a step that no optimizer applied, so the entries that "
                "were sent in it are lost. If a GradScaler skips steps, write "
                + self._call.format("grad_scaler=scaler, optimizer=optimizer")
                + "; if you skip a step, call take_back()"
            )

    def _warn_about_states(self) -> None:
        """Warn if an optimizer loses quality because entries are sent late."""
        states, self._states = self._states, {}
        was_measured = self._density >= DENSITY and any(
            _ADAGRAD in keys for keys in states.values()
        )
        for name, keys in states.items() if self._density < 1 else ():
            if keys & _SECOND_MOMENTS and not was_measured:
                text = (
                    f"{name} divides by second moments of gradients, which the sparse hook "
                    f"(density {self._density}) sends late. This raised a transformer's loss by "
                    "0.3 and a DLRM's by 0.001 (docs/guide/choosing.md)"
                )
            elif _MOMENTUM in keys:
                text = (
                    f"{name} applies momentum to gradients, which the sparse hook (density "
                    f"{self._density}) sends late. This raised a transformer's loss by 0.07 and a "
                    "DLRM's by 0.0025 (docs/guide/choosing.md#momentum)"
                )
            else:
                continue
            call = self._call.format('format="int4"')
            self._warn(f"{text}. Unless you measured your loss, write {call}")

    def _check(self, optimizer: Optimizer) -> None:
        held = _stepped(optimizer, self._parameters)
        if not held:
            return
        if not self._steps:
            self._watched, self._versions = [], -1
        self._steps[id(optimizer)] += 1
        if (steps := self._steps[id(optimizer)]) > 1:
            if steps == UNUSED_STEPS and not self._begun and self._unused is not None:
                self._unused()()  # type: ignore[misc]  # the state has this object, so it is alive
            return
        self._watched.append(held[0])
        name = type(optimizer).__name__
        self._states.setdefault(name, set()).update(_state_keys(optimizer, held))
        given = self._loss_scale
        if given is not None and given.is_used:
            if given.lacks(optimizer, held):
                self._warn(
                    f"{name} holds averaged parameters, but was not passed as optimizer: gradients "
                    "that were sent in a step that the GradScaler skips may be lost. Write "
                    + self._call.format("grad_scaler=scaler, optimizer=[...]")
                    + ", with all optimizers of these parameters"
                )
        # A GradScaler sets this attribute for the step of a fused optimizer.
        elif isinstance(getattr(optimizer, "found_inf", None), Tensor):
            self._warn(
                f"{name} is stepped by a GradScaler that was not passed as grad_scaler: gradients "
                "that were sent in a step that it skips are lost. Write "
                + self._call.format("grad_scaler=scaler, optimizer=optimizer")
            )

    def _warn(self, text: str) -> None:
        kind = text.partition(" ")[2]
        if kind not in self._warned:
            self._warned.add(kind)
            warn_user(f"DCT: {text}.")


class AveragerChecks:
    """Warns if an averager is not called, or has `step_ahead` with second moments."""

    def __init__(self, parameters: Iterable[Tensor], period: int, step_ahead: bool) -> None:
        self._parameters, self._step_ahead = set(parameters), step_ahead
        self._interval: float = period  # or the longest interval between two calls
        self._steps: Counter[int] = Counter()  # since the last call, by the id of an optimizer
        _watch_steps(self, AveragerChecks._check)

    def called(self) -> None:
        """The averager was called."""
        self._interval = max(self._interval, *self._steps.values(), 0)
        self._steps.clear()

    def _check(self, optimizer: Optimizer) -> None:
        held, name = _stepped(optimizer, self._parameters), type(optimizer).__name__
        self._steps[id(optimizer)] += bool(held)
        steps = self._steps[id(optimizer)]
        if steps > UNAVERAGED_PERIODS * self._interval:
            self._interval = math.inf  # warns once
            warn_user(
                f"DCT: the last {steps} steps of {name} changed weights that were not averaged, so "
                "ranks train different models: call averager.average_parameters() after every "
                "optimizer.step()."
            )
        if self._step_ahead and _state_keys(optimizer, held) & _SECOND_MOMENTS:
            self._step_ahead = False
            warn_user(
                f"DCT: {name} divides by second moments, with which step_ahead=True did not lower "
                "the loss or raised it (docs/guide/choosing.md#momentum). Unless you measured your "
                "loss, write step_ahead=False."
            )
