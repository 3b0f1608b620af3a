"""The scale of a GradScaler, and whether it skipped the last step."""

from collections.abc import Iterable

from torch import Tensor
from torch.amp import GradScaler

from dct_kernels import checks

from .optimizer_steps import OptimizerSteps


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
