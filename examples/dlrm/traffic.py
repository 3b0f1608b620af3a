"""Counts the bytes that this rank sends per step, by purpose."""

from collections.abc import Mapping
from contextlib import ExitStack

import torch.distributed as dist

from wire_meter import WireMeter


class Traffic(ExitStack):
    """Counts bytes while active. Call `forward_done` and `step_done` in every step.

    Args:
        groups: {purpose: a process group used only for this purpose}. Bytes that the group "rows"
            sends in the backward pass count as "rows back". All other bytes count as "gradients".

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
        """End the forward pass. Rows sent after this call count as gradients of rows."""
        if "rows" in self._meters:
            self._forward = {"rows": self._meters["rows"].take()}

    def step_done(self) -> None:
        """End the current step. Bytes sent after this call count towards the next step."""
        sent = {name: meter.take() for name, meter in self._meters.items()}
        if "rows" in sent:
            sent |= {"rows": self._forward["rows"], "rows back": sent["rows"]}
        self.steps.append(sent | {"gradients": self._all.take() - sum(sent.values())})
