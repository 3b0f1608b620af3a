"""Bytes that this rank sends per step, by purpose."""

from collections.abc import Mapping
from contextlib import ExitStack

import torch.distributed as dist

from wire_meter import WireMeter


class Traffic(ExitStack):
    """Counts bytes while active. Call `forward_done` and `step_done` in every step.

    Args:
        groups: {purpose: the process group that is used for this purpose only}. Bytes that the
            group "rows" sends backward are counted as "rows back", all other bytes as "gradients".

    Attributes:
        steps: {purpose: bytes} of each step.
    """

    def __init__(self, groups: Mapping[str, dist.ProcessGroup]) -> None:
        super().__init__()
        self.steps: list[dict[str, int]] = []
        self._all = WireMeter()
        self._meters = {name: WireMeter(group) for name, group in groups.items()}
        self._forward: dict[str, int] = {}

    def __enter__(self) -> "Traffic":
        for meter in (self._all, *self._meters.values()):
            self.enter_context(meter)
        return self

    def forward_done(self) -> None:
        """Rows sent from here on are gradients of rows."""
        if "rows" in self._meters:
            self._forward = {"rows": self._meters["rows"].take()}

    def step_done(self) -> None:
        """Bytes sent from here on belong to the next step."""
        sent = {name: meter.take() for name, meter in self._meters.items()}
        if "rows" in sent:
            sent |= {"rows": self._forward["rows"], "rows back": sent["rows"]}
        self.steps.append(sent | {"gradients": self._all.take() - sum(sent.values())})
