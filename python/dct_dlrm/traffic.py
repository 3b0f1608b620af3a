"""Bytes that this rank sends in a step, by what they are for."""

from types import TracebackType

from torch import nn

from dct_parallel import WireMeter

from .models.hybrid import HybridDLRM

PURPOSES = ("counts", "ids", "mp_forward", "mp_backward", "dp")


class Traffic:
    """Counts while active; call `forward_done` and `step_done` in every step.

    Attributes:
        wire: bytes of each step in all collectives.
        purposes: of a hybrid model, bytes of each step, apart: "counts", "ids", the rows'
            "mp_forward" and "mp_backward", and "dp", which is all the rest. Empty for other models.
    """

    def __init__(self, model: nn.Module) -> None:
        self.wire: list[int] = []
        self.purposes: dict[str, list[int]] = {}
        self._all = WireMeter()
        self._meters = [self._all]
        self._hybrid = isinstance(model, HybridDLRM)
        if self._hybrid:
            self.purposes = {name: [] for name in PURPOSES}
            groups = (model.counts_group, model.ids_group, model.rows_group)
            self._counts, self._ids, self._rows = (WireMeter(group) for group in groups)
            self._meters += [self._counts, self._ids, self._rows]

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
        if self._hybrid:
            self.purposes["mp_forward"].append(self._rows.take())

    def step_done(self) -> None:
        """From here on, it is the next step."""
        self.wire.append(self._all.take())
        if self._hybrid:
            self.purposes["counts"].append(self._counts.take())
            self.purposes["ids"].append(self._ids.take())
            self.purposes["mp_backward"].append(self._rows.take())
            told = sum(self.purposes[name][-1] for name in PURPOSES[:-1])
            self.purposes["dp"].append(self.wire[-1] - told)
