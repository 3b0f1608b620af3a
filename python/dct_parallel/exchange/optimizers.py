"""What the optimizers do with the averaged gradients: skipped steps, and warnings."""

import weakref
from collections.abc import Iterable, Sequence
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

    Raises:
        ValueError: an optimizer has none of these parameters.
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
# DLRM, the sparse hook increased the loss by 0.001.
_SECOND_MOMENTS = {"exp_avg_sq", "exp_inf", "square_avg", "variance", "row_var", "exp_avg_sq_row"}
_SECOND_MOMENTS |= {"state2"}

# The beginning of the line that a warning asks the user to write.
_CALLS = {
    "DCTState": "DCTState(ddp, {})",
    "dct_fully_shard_hook": "dct_fully_shard_hook(model, mesh=mesh, {})",
}


class OptimizerChecks:
    """Warns if optimizers lose gradients or quality because of the compression.

    A global hook checks every optimizer until one of the averaged parameters' optimizers has
    stepped. The hook does not keep this object alive. The device is never synchronized.

    Args:
        op: the entry point, for warnings.
        parameters: the averaged parameters.
        density: the fraction of the entries that is sent in a step.
        loss_scale: the scale of the user's GradScaler, or None.

    Attributes:
        close: removes the hook. Do not call it from an optimizer hook, because torch iterates over
            the hooks.
    """

    def __init__(
        self, op: str, parameters: Iterable[Tensor], density: float, loss_scale: LossScale | None
    ) -> None:
        self._call, self._parameters = _CALLS[op], set(parameters)
        self._density, self._loss_scale = density, loss_scale
        self._warned: set[str] = set()
        self._seen = False  # whether an optimizer has stepped
        # All parameters, and one of each optimizer after the optimizers have stepped, to save time.
        self._watched = list(self._parameters)
        self._versions = -1
        self.forget_step()
        alive, check = weakref.ref(self), torch.compiler.disable(OptimizerChecks._check)

        def hook(optimizer: Optimizer, *_: object) -> None:
            if (checks := alive()) is not None:
                check(checks, optimizer)

        self.close = register_optimizer_step_post_hook(hook).remove

    def begin(self, last: int) -> None:
        """Begin a step. `last` is the number of the step before it."""
        if self._seen:
            self.close()
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

    def _check(self, optimizer: Optimizer) -> None:
        held = [p for p in _parameters_of(optimizer) if p in self._parameters]
        held = [p for p in held if p.grad is not None]
        if not held:
            return
        if not self._seen:
            self._seen, self._watched, self._versions = True, [], -1
        self._watched.append(held[0])
        name = type(optimizer).__name__
        kept = {key for p in held for key in optimizer.state.get(p, ())}
        if self._density < 1 and kept & _SECOND_MOMENTS:
            self._warn(
                f"{name} divides by second moments of gradients, which the sparse hook (density "
                f"{self._density}) sends late. This raised a transformer's loss by 0.3 and a "
                "DLRM's by 0.001 (docs/guide/choosing.md). Unless you measured your loss, write "
                + self._call.format('format="int4"')
            )
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
