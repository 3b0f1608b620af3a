"""What counted instructions and sectors say of what is measured here (tests/ptx, `report`)."""

import functools
import re
import sys

from common import ROOT

sys.path.append(str(ROOT / "tests"))

from ptx import costs, roofline

PIPES = (
    "issue",
    "alu",
)  # of roofline.Time, in seconds: what instructions take of it; where it has them


def floor_ms(result: dict, gpu: str | None, clock: float | None = None) -> float | None:
    """What its launches and the pipe of instructions that binds take; a copy says what memory does.

    None where it was not counted, or the GPU's rates are unknown. `clock` in Hz, of the
    multiprocessors while this was measured; by default the one that roofline assumes.
    """
    known, cost = _gpu(gpu), _cost(result)
    if known is None or cost is None:
        return None
    time = roofline.time(cost, _elements(cost, result), known)
    pipe = max(getattr(time, pipe, 0.0) for pipe in PIPES)
    return 1e3 * (time.launches + pipe * roofline.CLOCK / (clock or roofline.CLOCK))


def instructions(result: dict) -> float | None:
    """Issue slots of a call, of warps: what Nsight Compute counts as executed instructions."""
    cost = _cost(result)
    return None if cost is None else cost.slots * _elements(cost, result) / costs.LANES


def _gpu(name: str | None) -> roofline.Gpu | None:
    return next((known for known in roofline.GPUS if known.name in (name or "")), None)


def _elements(cost: costs.Cost, result: dict) -> int:
    return cost.elements if cost.op == "sample_threshold" else result["numel"]


def _cost(result: dict) -> costs.Cost | None:
    detail = re.sub(r"^\[\d+, ", "[B, ", result["case"])
    for cost in _counted().values():
        same = (cost.op, cost.detail) == (result["op"], detail)
        if same and cost.density in (None, result["density"]):
            return cost
    return None


@functools.cache
def _counted() -> dict[str, costs.Cost]:
    return costs.load()[1]
