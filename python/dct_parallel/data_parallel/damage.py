"""What this rank knows of damaged payloads, and whether the others know it, too."""

from collections.abc import Mapping

from .transports import Receipt


class Damage:
    """Nothing at first; once a payload was damaged, the error that every later step raises.

    Damage of step t is seen by the rank that received it, when it looks at its receipts. Its
    headers of step t + 1, or of t if the transport sends a second time, tell the others, who see
    them in their receipts of that step.

    Args:
        op, step: what raises and what it counts, for the error.
    """

    def __init__(self, op: str = "dct_hook", step: str = "step") -> None:
        self._op, self._step = op, step
        self._error: str | None = None
        self._untold = False

    def look(self, step: int, receipts: Mapping[int, Receipt]) -> None:
        """Note what {bucket: receipt} of a step say."""
        seen = [
            f"{damaged} in bucket {bucket}"
            for bucket, receipt in sorted(receipts.items())
            for damaged in receipt.damaged
        ]
        told = sorted({rank for receipt in receipts.values() for rank in receipt.told})
        if seen:
            self._error = self._message(f"of {self._step} {step}", "; ".join(seen))
        elif told:
            got = f"damage that rank {told[0]} received"
            self._error = self._message(f"up to {self._step} {step}", got)
        self._untold = bool(seen) and not told  # else all ranks know that training ends here

    def take_untold(self) -> bool:
        """Whether the other ranks are to be told; true once."""
        untold, self._untold = self._untold, False
        return untold

    def require_none(self) -> None:
        """Raise if anything was damaged, now or before."""
        if self._error is not None:
            raise RuntimeError(self._error)

    def _message(self, when: str, got: str) -> str:
        return f"dct::{self._op}: every payload {when} must be intact, got {got}"
