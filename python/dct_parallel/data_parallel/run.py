"""The training run that the ranks of a group take part in, and that they go on from the same."""

import uuid
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, TypedDict

import torch
import torch.distributed as dist

from ..agreement import Agreement, require_same

LOAD_PATIENCE = timedelta(seconds=5)  # between a rank's first hook after a load and others' loads


class Saved(TypedDict):
    """What a run asks of a checkpoint's entry."""

    run_id: str
    world_size: int


class Run:
    """Settings are compared when it is made, step and checkpoint before the first step after that.

    Args:
        op: what is made, for errors.
        group: the ranks; all of them make one.
        device: whose backend's timeout bounds the wait for the others.
        settings: {name: value that JSON can hold}, to be the same on every rank.

    Attributes:
        id: made by the first rank as training begins, and kept in checkpoints.

    Raises:
        ValueError: settings differ; it names every rank's.
        RuntimeError: some rank does not say its own within the group's timeout.
    """

    def __init__(
        self,
        op: str,
        group: dist.ProcessGroup,
        device: torch.device,
        settings: Mapping[str, Any],
    ) -> None:
        self._agreement = Agreement(group, device)
        own = {**settings, "run_id": uuid.uuid4().hex}
        told = self._agreement.exchange(op, own)
        self.id = next(iter(told.values()))["run_id"]
        for values in told.values():
            del values["run_id"]
        require_same(op, told)
        self._checkpoint = "none"
        self._compared = False  # whether ranks know that they go on from the same step
        self._patience: timedelta | None = None

    def of_first_rank(self, op: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """What the first rank tells; all ranks of the group call this alike."""
        return next(iter(self._agreement.exchange(op, values).values()))

    def load(self, entry: Saved, apart: bool = False) -> None:
        """Go on with the run that a checkpoint is of.

        Args:
            apart: ranks may be far apart when they next begin a step, as they train alone.
        """
        if self._compared and not apart:  # others may train on, and never look here
            self._patience = LOAD_PATIENCE
        self._compared = False
        self._checkpoint = f"one of {entry['world_size']} ranks"
        self.id = entry["run_id"]

    def begin_step(self, step: int) -> None:
        """Raise on every rank if they do not go on from the same step of the same run."""
        if self._compared:
            return
        start = {"checkpoint": self._checkpoint, "run_id": self.id, "step": step}
        told = self._agreement.exchange("load_state_dict", start, self._patience)
        require_same("load_state_dict", told)
        self._compared = True
