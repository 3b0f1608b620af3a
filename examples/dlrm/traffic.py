"""Bytes that this rank sends in a step, by what they are for."""

from types import TracebackType

import torch.distributed as dist
from torch import nn

from wire_meter import WireMeter

from .models.sharded import ShardedDLRM
from .models.substituted import SubstitutedModel


class Traffic:
    """Counts while active; call `forward_done` and `step_done` in every step.

    Args:
        model: from `distribute`.
        node_group: in which gradients cross inside a node (`DCTState.node_group`).

    Attributes:
        wire: bytes of each step in all collectives, without those of `node_group`.
        purposes: of a model with sharded tables, bytes of each step, apart: "ids", "sync" of
            replicas (2D only), the rows' (DES: partial results') "mp_forward" and "mp_backward",
            and "dp", which is all the rest. With a `node_group` "node": its own. Empty for other
            models.
    """

    def __init__(self, model: nn.Module, node_group: dist.ProcessGroup | None = None) -> None:
        self.wire: list[int] = []
        self._all = WireMeter()
        groups = _groups(model) | ({} if node_group is None else {"node": node_group})
        self._of_groups = {name: WireMeter(group) for name, group in groups.items()}
        self._rows = self._of_groups.pop("rows", None)
        of_rows = {} if self._rows is None else {"mp_forward": [], "mp_backward": [], "dp": []}
        self.purposes: dict[str, list[int]] = {name: [] for name in self._of_groups} | of_rows
        self._meters = [self._all, *self._of_groups.values()]
        self._meters += [] if self._rows is None else [self._rows]

    def __enter__(self) -> "Traffic":
        for meter in self._meters:
            meter.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for meter in reversed(self._meters):
            meter.__exit__(kind, error, trace)

    def forward_done(self) -> None:
        """From here on, rows are gradients."""
        if self._rows is not None:
            self.purposes["mp_forward"].append(self._rows.take())

    def step_done(self) -> None:
        """From here on, it is the next step."""
        for name, meter in self._of_groups.items():
            self.purposes[name].append(meter.take())
        inside = self.purposes["node"][-1] if "node" in self.purposes else 0
        self.wire.append(self._all.take() - inside)
        if self._rows is not None:
            self.purposes["mp_backward"].append(self._rows.take())
            others = (
                sent[-1] for name, sent in self.purposes.items() if name not in ("dp", "node")
            )
            self.purposes["dp"].append(self.wire[-1] - sum(others))


def _groups(model: nn.Module) -> dict[str, dist.ProcessGroup]:
    if not isinstance(model, (ShardedDLRM, SubstitutedModel)):
        return {}
    groups = {"ids": model.ids_group, "rows": model.rows_group}
    if isinstance(model, ShardedDLRM) and model.replicas > 1:
        groups["sync"] = model.sync_group
    return groups
