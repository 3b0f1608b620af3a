"""The scale of a GradScaler, and whether the GradScaler skipped the last step."""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from dct_kernels import checks

from .._torch import has_step_hooks, optimizer_notes, scale_of
from .results import HostCopy

Optimizers = Optimizer | Sequence[Optimizer]


def loss_scale_of(
    op: str, scaler: GradScaler | None, optimizer: Optimizers | None
) -> "LossScale | None":
    """Check these arguments of the entry point `op` and return a LossScale.

    Returns None if there is no scaler, or if it is disabled.
    """
    if scaler is not None and not isinstance(scaler, GradScaler):
        got = checks.shown(scaler)
        raise TypeError(f"dct::{op}: grad_scaler must be a torch.amp.GradScaler, got {got}")
    if scaler is None or not scaler.is_enabled():
        return None
    if optimizer is None:
        raise ValueError(
            f"dct::{op}: optimizer must be given with an enabled grad_scaler, to see which steps "
            "the scaler skips (write grad_scaler=scaler, optimizer=optimizer), got None"
        )
    optimizers: list[Any] = [optimizer]
    if isinstance(optimizer, (list, tuple)):
        optimizers = list(optimizer)
    wrong = [each for each in optimizers if not has_step_hooks(each)]
    if wrong or not optimizers:
        got = checks.shown(wrong[0]) if wrong else "an empty list"
        raise TypeError(
            f"dct::{op}: optimizer must be a torch.optim.Optimizer, or a list of them (for a "
            f"wrapper, pass the inner optimizer), got {got}"
        )
    return LossScale(op, scaler, optimizers)


class LossScale:
    """The scale of each step, on the device, and whether the scaler skipped a step.

    A scaler skips the step of an optimizer if any gradient of the optimizer is NaN or Inf,
    including gradients of other modules. So the averaged gradients cannot show whether a step was
    skipped. The scaler's records show whether `scaler.step` was called, and an optimizer hook shows
    whether the optimizer ran.

    Args:
        op: the entry point, for error messages.
        scaler: an enabled GradScaler.
        optimizers: the optimizers of the averaged parameters.
    """

    def __init__(self, op: str, scaler: GradScaler, optimizers: Sequence[Optimizer]) -> None:
        self._op, self.scaler, self._optimizers = op, scaler, optimizers
        self._notes: dict[int, dict[str, Any]] | None = None  # the scaler's records of this pass
        self._before: dict[int, object] = {}  # the optimizers' stages when the pass began
        # {id of an optimizer that ran: whether the device skipped its step; False if not fused}
        self._stepped: dict[int, HostCopy] = {}

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Register a hook that records the steps of the optimizers.

        Raises:
            ValueError: an optimizer has none of these parameters.
        """
        averaged, alive = set(parameters), weakref.ref(self)

        def hook(optimizer: Optimizer, *_: object) -> None:
            if (scale := alive()) is not None:
                scale._record_step(optimizer)

        for optimizer in self._optimizers:
            groups = optimizer.param_groups
            if not any(p in averaged for group in groups for p in group["params"]):
                raise ValueError(
                    f"dct::{self._op}: optimizer must have parameters that are averaged, got "
                    f"{type(optimizer).__name__} of others"
                )
            weakref.finalize(self, optimizer.register_step_post_hook(hook).remove)

    def holds(self, parameters: Iterable[Tensor]) -> bool:
        """Whether the optimizers hold all of these parameters."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return {p for group in groups for p in group["params"]}.issuperset(parameters)

    def begin(self) -> tuple[Tensor | None, Tensor | None]:
        """Begin a backward pass. Returns the scale of its gradients and the inverse, if known."""
        self._notes = optimizer_notes(self.scaler)
        self._before = {key: note["stage"] for key, note in self._notes.items()}
        self._stepped = {}
        scale = scale_of(self.scaler)
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
        updated = notes is not optimizer_notes(self.scaler)
        if not updated and (handled != watched or {*stages.values()} != {OptState.STEPPED}):
            return False
        self._notes = None
        skipped = [self._stepped.get(key, _SKIPPED).tolist()[0] for key in handled]
        if any(skipped) and not all(skipped):
            raise RuntimeError(
                f"dct::{self._op}: parameters must have one optimizer, or optimizers that the "
                f"GradScaler skips together, got {len(skipped)}, of which it skipped "
                f"{skipped.count(True)}; nothing was taken back: call take_back() if no gradient "
                "of the last step was applied, otherwise load a checkpoint"
            )
        return any(skipped)

    def _record_step(self, optimizer: Optimizer) -> None:
        """Record that `optimizer` ran. A fused optimizer decides on the device whether to skip."""
        if self._notes is not optimizer_notes(self.scaler):
            return  # this step belongs to a later pass of a different state
        found_inf = getattr(optimizer, "found_inf", None)
        self._stepped[id(optimizer)] = _APPLIED
        if isinstance(found_inf, Tensor):
            self._stepped[id(optimizer)] = HostCopy((found_inf != 0).view(1))


_READY = OptState.READY
_SKIPPED, _APPLIED = (
    HostCopy(torch.tensor([skipped], dtype=torch.bool, device="cpu")) for skipped in (True, False)
)
