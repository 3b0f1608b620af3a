"""What a call cannot be faster than, from its counts in tests/ptx/baseline.json: computed.

Launches, and the pipe of instructions that binds. What memory allows is measured: a copy.
"""

import functools
import re
import sys

from common import ROOT

sys.path.append(str(ROOT / "tests"))

from ptx import costs

GPUS = ("H100", "H200")  # with the same multiprocessors
# https://resources.nvidia.com/en-us-tensor-core (the whitepaper of the H100): 132 multiprocessors,
# each with 4 schedulers that issue one instruction a clock.
ISSUED = 132 * 4  # a clock, of warps
# Integer additions, logic, shifts, comparisons and minima: 64 lanes a clock and multiprocessor
# (CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions", 9.0).
AT_HALF_RATE = ISSUED / 2
CLOCK = 1.755e9  # where none was seen: sustained, below the 1.98e9 of the data sheet's peak rates
# From the begin of a launch to the end of an empty kernel, and of one that follows in the stream
# (https://github.com/NVIDIA/cccl/pull/9722: 5.0 and 7.4 us of one and two kernels on an H200).
FIRST_LAUNCH, NEXT_LAUNCH = 5.0e-6, 2.4e-6


def floor_ms(result: dict, gpu: str | None, clock: float | None = None) -> float | None:
    """None where the call was not counted, or the GPU's rates are unknown.

    `clock` in Hz, of the multiprocessors while this was measured.
    """
    cost = _cost(result)
    if cost is None or not any(known in (gpu or "") for known in GPUS):
        return None
    warps = _elements(cost, result) / costs.LANES
    clocks = warps * max(cost.slots / ISSUED, cost.half_rate / AT_HALF_RATE)
    launches = FIRST_LAUNCH + NEXT_LAUNCH * (cost.launches - 1)
    return 1e3 * (launches + clocks / (clock or CLOCK))


def instructions(result: dict) -> float | None:
    """Issue slots of a call, of warps: what Nsight Compute counts as executed instructions."""
    cost = _cost(result)
    return None if cost is None else cost.slots * _elements(cost, result) / costs.LANES


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
