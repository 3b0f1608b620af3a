"""The scale of a GradScaler, and whether it skipped the last step."""

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from dct_kernels import checks

from .results import Readback


class OptimizerSteps:
    """What a GradScaler did with the optimizers of these parameters, pass by pass.

    A scaler skips an optimizer for any of its gradients, of other modules as well, so that the
    gradients seen here do not tell. Two things do: the scaler's own notes of the optimizers that
    it handled, which its `update` replaces by new ones; and a hook in every step of an optimizer.

    Args:
        op: for errors.
        scaler: enabled.
        parameters: as optimizers hold them.
    """

    def __init__(self, op: str, scaler: GradScaler, parameters: Iterable[Tensor]) -> None:
        self._op, self._scaler, self._parameters = op, scaler, set(parameters)
        self._notes: dict[int, dict[str, Any]] | None = None  # of this pass, until looked at
        self._before: dict[int, OptState] = {}  # stages, as the pass began
        # By id, as the scaler's notes. Of steps: what a fused optimizer was told of overflow.
        self._stepped: dict[int, Readback | None] = {}
        self._optimizers = weakref.WeakValueDictionary[int, Any]()
        note = weakref.WeakMethod(self._note)

        def hook(optimizer: Optimizer, *_: object) -> None:
            if (alive := note()) is not None:
                alive(optimizer)

        handle = register_optimizer_step_post_hook(hook)
        weakref.finalize(self, handle.remove)

    def begin(self) -> None:
        """A backward pass starts."""
        self._notes = self._scaler._per_optimizer_states
        self._before = {key: note["stage"] for key, note in self._notes.items()}
        self._stepped = {}

    def skipped(self) -> bool:
        """Whether no optimizer of the parameters stepped, and one was to; true once.

        False before the scaler's update, and if no optimizer was to step: gradients accumulate.

        Raises:
            RuntimeError: some stepped and others did not, or it cannot be told; once.
        """
        notes = self._notes
        if notes is None or notes is self._scaler._per_optimizer_states:
            return False
        self._notes = None
        handled = {
            key for key, note in notes.items() if note["stage"] is not self._before.get(key, _FRESH)
        }
        ours = [key for key in handled | self._stepped.keys() if self._is_ours(key)]
        stepped = [self._did_step(key, notes) for key in ours]
        if any(stepped) and not all(stepped):
            rule = "one optimizer, or optimizers that the GradScaler skips together"
            got = f"{len(ours)}, of which it skipped {stepped.count(False)}: {_ADVICE}"
            checks.fail(self._op, "parameters", rule, got, RuntimeError, verb="have")
        return bool(stepped) and not any(stepped)

    def _note(self, optimizer: Optimizer) -> None:
        """`optimizer` has stepped; a fused one maybe without a change, which the device knows."""
        self._optimizers[id(optimizer)] = optimizer
        found_inf, readback = getattr(optimizer, "found_inf", None), None
        if isinstance(found_inf, Tensor):
            readback = Readback()
            readback.post((found_inf != 0).to(torch.int32).view(1))
        self._stepped[id(optimizer)] = readback

    def _is_ours(self, key: int) -> bool:
        if key not in self._optimizers:  # it never stepped: look for it in memory, once
            found = next((thing for thing in gc.get_objects() if id(thing) == key), None)
            if not hasattr(found, "param_groups"):
                self._fail("one that is gone")
            self._optimizers[key] = found
        groups = self._optimizers[key].param_groups
        return any(p in self._parameters for group in groups for p in group["params"])

    def _did_step(self, key: int, notes: dict[int, dict[str, Any]]) -> bool:
        if key in self._stepped:
            readback = self._stepped[key]  # posted as it stepped: on the host by now
            return readback is None or not readback.wait()[0].item()
        if isinstance(self._optimizers[key], Optimizer):
            return False
        # Torch's hooks do not see it, so the device is asked, and the host waits for it; and
        # `update` may add up the overflows of all in the first.
        overflowed = any(found.item() for found in notes[key]["found_inf_per_device"].values())
        if overflowed and len(notes) > 1:
            self._fail(type(self._optimizers[key]).__name__)
        return not overflowed

    def _fail(self, got: str) -> None:
        rule = "torch.optim.Optimizers that live until the next backward pass"
        got = f"{got}, so that it cannot be told whether it skipped the last step: {_ADVICE}"
        checks.fail(self._op, "grad_scaler", rule, got, RuntimeError, verb="step")


_FRESH = OptState.READY
_ADVICE = (
    "call take_back() if no gradient of the last step was applied, or load a checkpoint; nothing "
    "was taken back"
)


class LossScale:
    """The scale of each step, on the device; none without a scaler, or with a disabled one."""

    def __init__(self, op: str, scaler: GradScaler | None) -> None:
        if scaler is not None and not isinstance(scaler, GradScaler):
            got = type(scaler).__name__
            checks.fail(op, "grad_scaler", "a torch.amp.GradScaler", got, TypeError)
        self._op = op
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.value: Tensor | None = None
        self.inverse: Tensor | None = None
        self._steps: OptimizerSteps | None = None

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Follow the optimizers of these parameters from now on."""
        if self.scaler is not None:
            self._steps = OptimizerSteps(self._op, self.scaler, parameters)

    def begin(self) -> None:
        """A backward pass starts to exchange its gradients."""
        self.value = self.inverse = None
        if self.scaler is not None:
            self.value = self.scaler._scale  # get_scale() would synchronize
        if self.value is not None:
            self.inverse = self.value.reciprocal()
        if self._steps is not None:
            self._steps.begin()

    def as_told(self) -> str:
        """Its description, for ranks to compare."""
        return "none" if self.scaler is None else "given"

    def skipped(self) -> bool:
        """Whether the scaler skipped the step that this pass was the last of; true once.

        Raises:
            RuntimeError: see `OptimizerSteps.skipped`.
        """
        return self._steps is not None and self._steps.skipped()
