"""The cost model against a run of `dct-bench link`."""

import dataclasses
import math
import statistics

from dct_dlrm.errors import UsageError

from .cost_model import METHODS, Cluster, Kernels, Link, Model
from .shapes import dlrm

_NO_KERNELS = Kernels(math.inf, math.inf, math.inf, "taken from the run")


@dataclasses.dataclass(frozen=True)
class Point:
    """Milliseconds per step; calibrating: figures of this point went into the prediction."""

    ranks: int
    rate: float | None
    mode: str
    measured: float
    predicted: float
    calibrating: bool

    @property
    def error(self) -> float:
        """Of the prediction, as a fraction of what was measured."""
        return self.predicted / self.measured - 1


def validate(link: dict) -> list[Point]:
    """A point per cell that the model covers: not exact top-k, and no hybrid mode.

    What the run gives: compute, pack and unpack of every mode at the fastest rate; the plain
    transfer's rate on every link; and alpha, from the wire time of DCT at the fastest rate. alpha
    then holds what small messages cost on that machine: wake-ups of threads, waiting for the
    slower rank. What is predicted: the wire time of every mode at every other rate.

    Raises:
        UsageError: the run has no DCT cell, or one rate only.
    """
    options = link["options"]
    keys = ("hash_size", "embedding_dim", "bottom", "top")
    shapes = dlrm(**{key: options[key] for key in keys})
    model = Model(shapes, 0.0, _NO_KERNELS, options["density"])
    cells = [c for c in link["cells"] if c["step_ms"] and c["mode"] in METHODS]
    needed = "the run must have dct and two rates at least"
    if not cells:
        raise UsageError(f"{needed}, got {sorted({c['mode'] for c in link['cells']})}")
    bandwidth = {(k["ranks"], k["rate"]): k["bits_per_second"] / 8 for k in link["links"]}
    points = []
    for ranks in sorted({cell["ranks"] for cell in cells}):
        of_ranks = [cell for cell in cells if cell["ranks"] == ranks]
        rates = {cell["rate"] for cell in of_ranks}
        base = max(rates, key=lambda rate: math.inf if rate is None else rate)
        at_base = {cell["mode"]: cell for cell in of_ranks if cell["rate"] == base}
        if "dct" not in at_base or len(rates) < 2:
            raise UsageError(f"{needed}, got {sorted(at_base)}")
        alpha = _alpha(model, ranks, bandwidth[ranks, base], at_base["dct"])
        for cell in of_ranks:
            if cell["mode"] not in at_base:
                continue
            between = Link(alpha, bandwidth[ranks, cell["rate"]])
            wire = model.step(cell["mode"], _flat(ranks, between)).wire
            phases = at_base[cell["mode"]]["phases_ms"]
            local = phases["compute"] + phases["pack"] + phases["unpack"]
            measured = cell["step_ms"][1]
            predicted = local + 1e3 * wire
            points.append(
                Point(ranks, cell["rate"], cell["mode"], measured, predicted, cell["rate"] == base)
            )
    return points


def median_error(points: list[Point]) -> float:
    """Of the points that did not calibrate: the median of the errors' magnitudes."""
    return statistics.median(abs(p.error) for p in points if not p.calibrating)


def _alpha(model: Model, ranks: int, bandwidth: float, cell: dict) -> float:
    """Wire time is affine in alpha: solved from its values at 0 and 1 second."""
    at_zero, at_one = (
        model.step("dct", _flat(ranks, Link(alpha, bandwidth))).wire for alpha in (0.0, 1.0)
    )
    return max(0.0, (cell["phases_ms"]["wire"] / 1e3 - at_zero) / (at_one - at_zero))


def _flat(ranks: int, between: Link) -> Cluster:
    return Cluster(ranks, 1, between, Link(0.0, math.inf))
