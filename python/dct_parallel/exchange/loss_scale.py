"""The scale of a GradScaler, and whether it skipped the last step."""

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
    """Check these arguments of an entry point, which errors call `op`.

    Returns:
        None without a scaler, or with a disabled one.
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
            f"dct::{op}: optimizer must be a torch.optim.Optimizer, or a list of them (of a "
            f"wrapper, the optimizer inside), got {got}"
        )
    return LossScale(op, scaler, optimizers)


class LossScale:
    """The scale of each step, on the device.

    A scaler skips an optimizer if any of its gradients overflowed, also gradients of other modules.
    So gradients alone cannot show whether a step was skipped. The scaler's notes show whether an
    optimizer was to step, and a hook of the optimizer shows whether it did.

    Args:
        op: for errors.
        scaler: enabled.
        optimizers: of the parameters.

    Attributes:
        scaler: as given.
    """

    def __init__(self, op: str, scaler: GradScaler, optimizers: Sequence[Optimizer]) -> None:
        self._op, self.scaler, self._optimizers = op, scaler, optimizers
        self._notes: dict[int, dict[str, Any]] | None = None  # the scaler's, of the last pass
        self._before: dict[int, object] = {}  # its stages, as the pass began
        # {id of an optimizer that stepped: whether a fused one was to skip, as the device knows}
        self._stepped: dict[int, HostCopy] = {}

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Follow the steps of the optimizers from now on.

        Raises:
            ValueError: an optimizer has none of these parameters.
        """
        ours, alive = set(parameters), weakref.ref(self)

        def hook(optimizer: Optimizer, *_: object) -> None:
            if (scale := alive()) is not None:
                scale._note_step(optimizer)

        for optimizer in self._optimizers:
            groups = optimizer.param_groups
            if not any(p in ours for group in groups for p in group["params"]):
                raise ValueError(
                    f"dct::{self._op}: optimizer must be of the parameters that are averaged, got "
                    f"{type(optimizer).__name__} of others"
                )
            weakref.finalize(self, optimizer.register_step_post_hook(hook).remove)

    def holds(self, parameters: Iterable[Tensor]) -> bool:
        """Whether the optimizers hold all of these parameters."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return {p for group in groups for p in group["params"]}.issuperset(parameters)

    def begin(self) -> tuple[Tensor | None, Tensor | None]:
        """A backward pass starts to exchange its gradients: the scale, and its inverse."""
        self._notes = optimizer_notes(self.scaler)
        self._before = {key: note["stage"] for key, note in self._notes.items()}
        self._stepped = {}
        scale = scale_of(self.scaler)
        return scale, None if scale is None else scale.reciprocal()

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
        changed = {k for k, stage in stages.items() if stage is not self._before.get(k, _READY)}
        handled = changed | self._stepped.keys()
        updated = notes is not optimizer_notes(self.scaler)
        if not updated and (handled != ours or {*stages.values()} != {OptState.STEPPED}):
            return False
        self._notes = None
        skipped = [self._stepped.get(key, _SKIPPED).tolist()[0] for key in handled]
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
        if self._notes is not optimizer_notes(self.scaler):
            return  # the step of a later pass, of another state
        found_inf = getattr(optimizer, "found_inf", None)
        self._stepped[id(optimizer)] = _APPLIED
        if isinstance(found_inf, Tensor):
            self._stepped[id(optimizer)] = HostCopy((found_inf != 0).view(1))


_READY = OptState.READY
_SKIPPED, _APPLIED = (
    HostCopy(torch.tensor([skipped], dtype=torch.bool, device="cpu")) for skipped in (True, False)
)
