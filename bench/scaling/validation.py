"""The cost model against a run of bench/link.py."""

import dataclasses
import math
import statistics
from pathlib import Path

from dlrm.errors import UsageError

from .cost_model import Cluster, Kernels, Model
from .kernel_rates import read_json
from .links import GLOO, Link, all_gather, all_reduce, all_to_all
from .methods import METHODS
from .shapes import dlrm

# {mode with the smallest messages: with the largest ones}, of a replicated and of a hybrid model:
# what a message costs is found from the former, and what a byte costs from the latter.
_CALIBRATING = {"dct": "dense", "hybrid-dct": "hybrid-dense"}
_COSTS = ("alpha", "per_byte")
_NO_KERNELS = Kernels(*[math.inf] * 5, "taken from the run")


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
    transfer's rate on every link; what a message costs, and a byte, from the wire times of DCT and
    of float32 at the fastest rate (in a run of hybrid modes, of theirs). That holds wake-ups of
    threads, waiting for the slower rank, copies. The part of a link that all-gathers fill is
    `GLOO`'s. Of a hybrid mode it gives the bytes, too: how many rows are distinct is no formula's.
    What is predicted: the wire time of every mode at every other rate.

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
        largest = at_base.get(_CALIBRATING[calibrating], at_base[calibrating])
        costs = _costs(model, bandwidth[ranks, base], at_base[calibrating], largest)
        for cell in of_ranks:
            if cell["mode"] not in at_base:
                continue
            between = costs._replace(bandwidth=bandwidth[ranks, cell["rate"]])
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


def _costs(model: Model, bandwidth: float, smallest: dict, largest: dict) -> Link:
    """What explains the wire times of two cells, each of which is affine in both costs."""
    link = GLOO._replace(alpha=0.0, bandwidth=bandwidth, per_byte=0.0)

    def excess(cell: dict) -> float:
        return cell["phases_ms"]["wire"] / 1e3 - _wire(model, cell, link)

    def slope(cell: dict, cost: str) -> float:
        return (_wire(model, cell, link._replace(**{cost: 1e-6})) - _wire(model, cell, link)) / 1e-6

    (a, b), (c, d) = ([slope(cell, cost) for cost in _COSTS] for cell in (smallest, largest))
    alpha, per_byte = max(0.0, excess(smallest) / a), 0.0
    if a * d > b * c:  # two different cells
        per_byte = max(0.0, (a * excess(largest) - c * excess(smallest)) / (a * d - b * c))
        alpha = max(0.0, (excess(smallest) - b * per_byte) / a)
    return link._replace(alpha=alpha, per_byte=per_byte)


def _flat(ranks: int, between: Link) -> Cluster:
    return Cluster(ranks, 1, between, Link(0.0, math.inf))
