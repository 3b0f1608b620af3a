"""The cost model against a run of bench/link.py."""

import dataclasses
import math
import statistics
from pathlib import Path

from dlrm.errors import UsageError

from .cost_model import METHODS, Cluster, Kernels, Link, Model, all_gather, all_reduce, all_to_all
from .kernel_rates import read_json
from .shapes import dlrm

# Modes with the smallest messages, of a replicated and of a hybrid model: alpha is found from one.
_CALIBRATING = ("dct", "hybrid-dct")
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


def load(path: Path) -> list[Point]:
    """Of the JSON of bench/link.py, what `validate` says.

    Raises:
        UsageError: it is not, or has not what is needed.
    """
    link = read_json(path)
    try:
        return validate(link)
    except (LookupError, TypeError, AttributeError, ValueError, ZeroDivisionError):
        raise UsageError(f"--validate must be the JSON of bench/link.py, got {path}") from None


def validate(link: dict) -> list[Point]:
    """A point per cell that the model covers: all modes but exact top-k.

    What the run gives: compute, pack and unpack of every mode at the fastest rate; the plain
    transfer's rate on every link; and alpha, from the wire time of DCT (hybrid-dct in a run of
    hybrid modes) at the fastest rate. alpha then holds what small messages cost on that machine:
    wake-ups of threads, waiting for the slower rank. Of a hybrid mode it gives the bytes, too: how
    many rows are distinct is no formula's. What is predicted: the wire time of every mode at every
    other rate.

    Raises:
        UsageError: the run has no cell of DCT, or one rate only.
    """
    options = link["options"]
    keys = ("hash_size", "embedding_dim", "bottom", "top")
    shapes = dlrm(**{key: options[key] for key in keys})
    model = Model(shapes, 0.0, _NO_KERNELS, options["density"])
    cells = [c for c in link["cells"] if c["step_ms"] and _is_known(c["mode"])]
    needed = f"the run must have {' or '.join(_CALIBRATING)} and two rates at least"
    if not cells:
        raise UsageError(f"{needed}, got {sorted({c['mode'] for c in link['cells']})}")
    bandwidth = {(k["ranks"], k["rate"]): k["bits_per_second"] / 8 for k in link["links"]}
    points = []
    for ranks in sorted({cell["ranks"] for cell in cells}):
        of_ranks = [cell for cell in cells if cell["ranks"] == ranks]
        rates = {cell["rate"] for cell in of_ranks}
        base = max(rates, key=lambda rate: math.inf if rate is None else rate)
        at_base = {cell["mode"]: cell for cell in of_ranks if cell["rate"] == base}
        calibrating = next((mode for mode in _CALIBRATING if mode in at_base), None)
        if calibrating is None or len(rates) < 2:
            raise UsageError(f"{needed}, got {sorted(at_base)}")
        alpha = _alpha(model, bandwidth[ranks, base], at_base[calibrating])
        for cell in of_ranks:
            if cell["mode"] not in at_base:
                continue
            between = Link(alpha, bandwidth[ranks, cell["rate"]])
            wire = _wire(model, cell, between)
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


def _is_known(mode: str) -> bool:
    return mode in METHODS or mode.startswith("hybrid-")


def _wire(model: Model, cell: dict, between: Link) -> float:
    """Seconds of all collectives of a step in the cell's mode, on this link."""
    ranks, mode = cell["ranks"], cell["mode"]
    if mode in METHODS:
        return model.step(mode, _flat(ranks, between)).wire
    sent = dict(cell["purpose_bytes"])
    gradients = sent.pop("dp") / (ranks - 1)
    if mode.startswith("hybrid-dense"):
        wire = all_reduce(between, ranks, gradients * ranks / 2)
    else:
        wire = all_gather(between, ranks, gradients)
    each = [all_to_all(between, ranks, nbytes / (ranks - 1)) for nbytes in sent.values() if nbytes]
    return wire + sum(each)


def _alpha(model: Model, bandwidth: float, cell: dict) -> float:
    """Wire time is affine in alpha: solved from its values at 0 and 1 second."""
    at_zero, at_one = (_wire(model, cell, Link(alpha, bandwidth)) for alpha in (0.0, 1.0))
    return max(0.0, (cell["phases_ms"]["wire"] / 1e3 - at_zero) / (at_one - at_zero))


def _flat(ranks: int, between: Link) -> Cluster:
    return Cluster(ranks, 1, between, Link(0.0, math.inf))
