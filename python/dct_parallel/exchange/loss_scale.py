"""The scale of a GradScaler, and whether it skipped the last step."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from .._torch import has_step_hooks, optimizer_notes, scale_of
from .results import HostCopy

Optimizers = Optimizer | Sequence[Optimizer]


class LossScale:
    """The scale of each step, on the device; none without a scaler, or with a disabled one.

    A scaler skips an optimizer if any of its gradients overflowed, also gradients of other modules.
    So gradients alone cannot show whether a step was skipped. The scaler's notes show whether an
    optimizer was to step, and a hook of the optimizer shows whether it did.

    Args:
        op: for errors.
        scaler: of the loss, or None.
        optimizer: of the parameters, one or several; needed with an enabled scaler.
    """

    def __init__(
        self, op: str, scaler: GradScaler | None, optimizer: Optimizers | None = None
    ) -> None:
        if scaler is not None and not isinstance(scaler, GradScaler):
            rule, got = "a torch.amp.GradScaler", type(scaler).__name__
            raise TypeError(f"dct::{op}: grad_scaler must be {rule}, got {got}")
        self._op = op
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._optimizers = self._checked(optimizer) if self._scaler is not None else []
        self.value: Tensor | None = None
        self.inverse: Tensor | None = None
        self._notes: dict[int, dict[str, Any]] | None = None  # the scaler's, of the last pass
        self._before: dict[int, object] = {}  # its stages, as the pass began
        # {id of an optimizer that stepped: whether a fused one was to skip, as the device knows}
        self._stepped: dict[int, HostCopy | None] = {}

    def _checked(self, optimizer: Optimizers | None) -> list[Optimizer]:
        if optimizer is None:
            raise ValueError(
                f"dct::{self._op}: optimizer must be given with an enabled grad_scaler, to see "
                "which steps the scaler skips (write grad_scaler=scaler, optimizer=optimizer), "
                "got None"
            )
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
        for each in optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]:
            if not isinstance(each, Optimizer) or not has_step_hooks(each):
                raise TypeError(
                    f"dct::{self._op}: optimizer must be a torch.optim.Optimizer, or a list of "
                    f"them (of a wrapper, the optimizer inside), got {type(each).__name__}"
                )
        return list(optimizers)

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Follow the steps of the optimizers from now on.

        Raises:
            ValueError: an optimizer has none of these parameters.
        """
        ours = set(parameters)
        for optimizer in self._optimizers:
            groups = optimizer.param_groups
            if not any(p in ours for group in groups for p in group["params"]):
                raise ValueError(
                    f"dct::{self._op}: optimizer must be of the parameters that are averaged, "
                    f"got {type(optimizer).__name__} of others"
                )
            handle = optimizer.register_step_post_hook(partial(_call, WeakMethod(self._note_step)))
            weakref.finalize(self, handle.remove)

    def begin(self) -> None:
        """A backward pass starts to exchange its gradients."""
        self.value = self.inverse = None
        if self._scaler is None:
            return
        self.value = scale_of(self._scaler)
        if self.value is not None:
            self.inverse = self.value.reciprocal()
        self._notes = optimizer_notes(self._scaler)
        self._before = {key: note["stage"] for key, note in self._notes.items()}
        self._stepped = {}

    def to_compare(self) -> str:
        """A description that must be the same on every rank."""
        return "none" if self._scaler is None else "given"

    def skipped(self) -> bool:
        """Whether the scaler skipped the step that this pass was the last of; true once.

        False before the scaler's `step`, and if it was not to step: gradients accumulate. Waits
        for the device if an optimizer is fused.

        Raises:
            RuntimeError: some optimizers stepped and others did not; once.
        """
        notes = self._notes
        if notes is None:
            return False
        ours = {id(optimizer) for optimizer in self._optimizers}
        stages = {key: note["stage"] for key, note in notes.items() if key in ours}
        handled = {
            key for key, stage in stages.items() if stage is not self._before.get(key, _FRESH)
        } | self._stepped.keys()
        updated = notes is not optimizer_notes(self._scaler)
        if not updated and (handled != ours or {*stages.values()} != {_STEPPED}):
            return False
        self._notes = None
        flags = [self._stepped.get(key, _SKIPPED) for key in handled]
        skipped = [flag is not None and flag.tolist()[0] for flag in flags]
        if any(skipped) and not all(skipped):
            raise RuntimeError(
                f"dct::{self._op}: parameters must have one optimizer, or optimizers that the "
                f"GradScaler skips together, got {len(skipped)}, of which it skipped "
                f"{skipped.count(True)}: call take_back() if no gradient of the last step was "
                "applied, or load a checkpoint; nothing was taken back"
            )
        return any(skipped)

    def _note_step(self, optimizer: Optimizer) -> None:
        """`optimizer` has stepped. A fused one may have skipped it, which only the device knows."""
        if self._notes is None or self._notes is not optimizer_notes(self._scaler):
            return  # the step of a later pass, of another state
        found_inf = getattr(optimizer, "found_inf", None)
        self._stepped[id(optimizer)] = None
        if isinstance(found_inf, Tensor):
            self._stepped[id(optimizer)] = HostCopy((found_inf != 0).view(1))


def _call(method: WeakMethod[Callable[[Optimizer], None]], optimizer: Optimizer, *_: Any) -> None:
    alive = method()
    if alive is not None:
        alive(optimizer)


_FRESH, _STEPPED = OptState.READY, OptState.STEPPED
_SKIPPED = HostCopy(torch.tensor([True]))
