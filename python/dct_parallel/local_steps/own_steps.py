"""The steps that only this rank's weights have, and a word where they may be forgotten."""

import warnings
import weakref
from collections.abc import Iterable

from torch.nn import Parameter


class OwnSteps:
    """Counts the steps since the last averaging, and warns where a run may not know of them.

    Args:
        averager: whose steps they are; its end may be that of a run.
        parameters: of its module.
        first: whether this is the first rank, which alone warns at the end.

    Attributes:
        count: steps since the last averaging.
        ahead: whether this rank's weights differ from the others' after it as well.
    """

    def __init__(self, averager: object, parameters: Iterable[Parameter], first: bool) -> None:
        self.count, self.ahead = 0, False
        self._called = False  # average_parameters, in this run or the one that it goes on from
        self._saved = True
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        if first:
            weakref.finalize(averager, self._at_the_end)

    def add(self) -> None:
        self.count, self._called, self._saved = self.count + 1, True, False

    def save(self) -> int:
        """The count, for a saved state, from which a run may go on."""
        self._saved = True
        return self.count

    def load(self, count: int) -> None:
        self.count, self._called, self._saved = count, True, True

    def warn_if_never_called(self) -> None:
        """Warn, once, if there are gradients and no call of `average_parameters` yet."""
        found = (parameter() for parameter in self._parameters)
        if not self._called and any(p is not None and p.grad is not None for p in found):
            self._called = True
            warnings.warn(
                "DCT: there are gradients, but average_parameters() was never called, so each "
                "rank trains alone: call averager.average_parameters() after optimizer.step().",
                stacklevel=3,
            )

    def _at_the_end(self) -> None:
        self.warn_if_never_called()
        if (self.count or self.ahead) and not self._saved:
            what = f"the run's last {self.count} steps" if self.count else "the residuals"
            warnings.warn(
                f"DCT: {what} were not averaged, so weights differ between ranks: "
                "call averager.flush() at its end, or save state_dict() to go on.",
                stacklevel=2,
            )
