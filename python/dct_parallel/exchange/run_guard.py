"""The training run of a group's ranks, and the check that all go on from the same step of it."""

import contextlib
import threading
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dct_kernels import checks

from ..agreement import Agreement, named, require_same
from ..groups import timeout_of

ASK_SECONDS = 2  # to ask, once, for the reason of an error that is raised anyway

_LOAD = "load_state_dict"
_Result = TypeVar("_Result")


class RunGuard:
    """Settings are compared when it is made, step and checkpoint before the first step after that.

    Args:
        op: for errors.
        group: the ranks; all of them make one.
        device: the timeout of its backend bounds the wait for the others.
        settings: {name: value that JSON can hold}, to be the same on every rank.

    Attributes:
        id: made by the first rank as training begins, and kept in checkpoints.

    Raises:
        ValueError: settings differ; it names every rank's.
        RuntimeError: some rank refuses, or does not tell its own within the group's timeout.
    """

    def __init__(
        self,
        op: str,
        group: dist.ProcessGroup,
        device: torch.device,
        settings: Mapping[str, Any],
    ) -> None:
        self._agreement, self._timeout = Agreement(group), timeout_of(group, device)
        own = {**settings, "run_id": uuid.uuid4().hex}
        told = self._agreement.exchange(op, own, self._timeout)
        self.id: str = next(iter(told.values()))["run_id"]
        for values in told.values():
            del values["run_id"]
        require_same(op, told)
        self._checkpoint = "none"
        self._compared = False  # whether ranks know that they go on from the same step
        self._asked = False  # the store, for the reason of an error

    def load(self, run_id: str, world_size: int) -> None:
        """Go on with the run of a checkpoint. All ranks call it, each at its own time."""
        self._compared = self._asked = False
        self._checkpoint = f"one of {world_size} ranks"
        self.id = run_id

    def begin_step(self, step: int) -> None:
        """Raise on every rank if they do not go on from the same step of the same run.

        Waits for all ranks after a load, to the group's timeout. Those that did not load train on,
        and wait for this one in a collective: see `carry_out`.
        """
        if self._compared:
            return
        start = {"checkpoint": self._checkpoint, "run_id": self.id, "step": step}
        require_same(_LOAD, self._agreement.exchange(_LOAD, start, self._timeout))
        self._compared = True

    def carry_out(self, collectives: Callable[[], _Result]) -> _Result:
        """The result of `collectives`; call it for all exchanges of a step.

        If it fails because others loaded a checkpoint and this rank did not, the error says so. It
        asks the store only after a failure, so a successful step costs nothing more.
        """
        try:
            return collectives()
        except RuntimeError:
            if alone := self._loaded_alone():
                got = f"a load on {named(alone)} only"
                rule = "before any of them takes a step"
                checks.fail(_LOAD, "every rank", rule, got, RuntimeError, verb="load")
            raise

    def _loaded_alone(self) -> list[int]:
        """The ranks that wait for this one to load; none if the store does not answer.

        Also none after the first call: a step's other collectives fail for the same reason.
        """
        found: list[int] = []
        if self._asked:
            return found
        self._asked = True

        def ask() -> None:
            with contextlib.suppress(RuntimeError):
                found.extend(self._agreement.waiting(_LOAD))

        # The store's host may be the rank that is stopped, and would never answer.
        asking = threading.Thread(target=ask, name="dct ask", daemon=True)
        asking.start()
        asking.join(ASK_SECONDS)
        return found
