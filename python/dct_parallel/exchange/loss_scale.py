"""The scale of a GradScaler, and whether it skipped the last step."""

from torch import Tensor
from torch.amp import GradScaler

from dct_kernels import checks


class LossScale:
    """The scale of each step, on the device; none without a scaler, or with a disabled one."""

    def __init__(self, op: str, scaler: GradScaler | None) -> None:
        if scaler is not None and not isinstance(scaler, GradScaler):
            got = type(scaler).__name__
            checks.fail(op, "grad_scaler", "a torch.amp.GradScaler", got, TypeError)
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.value: Tensor | None = None
        self.inverse: Tensor | None = None
        self._version = 0
        self._overflowed = False

    def begin(self) -> None:
        """A backward pass starts to exchange its gradients."""
        self.value = self.inverse = None
        if self.scaler is not None:
            self.value = self.scaler._scale  # get_scale() would synchronize
        if self.value is not None:
            self.inverse = self.value.reciprocal()
            self._version = self.value._version
        # An overflow without an update is of an accumulation: the result of the last pass is in
        # .grad, and is added to that of this pass, with its overflow.
        self._overflowed = False

    def as_told(self) -> str:
        """Its description, for ranks to compare."""
        return "none" if self.scaler is None else "given"

    def saw(self, overflow: bool) -> None:
        """Whether some rank's gradients of this pass overflowed."""
        self._overflowed = overflow and self.value is not None

    def skipped(self) -> bool:
        """Whether the scaler skipped the step that this pass was the last of; true once."""
        # update() writes the scale, to the same or a different value.
        if not self._overflowed or self.value is None or self.value._version == self._version:
            return False
        self._overflowed = False
        return True
