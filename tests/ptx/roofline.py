"""What counts come to in time on a GPU. Computed, not measured: what no one can be faster than."""

from dataclasses import dataclass

from .costs import Cost


@dataclass(frozen=True)
class Gpu:
    name: str
    copy: float  # bytes a second, read and written, that a copy of large tensors reaches


# 90 % of what the data sheets say of HBM3 and HBM3e, 3.35 and 4.8 TB/s
# (https://www.nvidia.com/en-us/data-center/h100, h200). CUB's reductions reach 91 and 90 % of it
# (https://github.com/NVIDIA/cccl/pull/2944, 9722).
GPUS = (Gpu("H100", 0.9 * 3.35e12), Gpu("H200", 0.9 * 4.8e12))

# The same of both. https://resources.nvidia.com/en-us-tensor-core (the whitepaper of the H100): 132
# multiprocessors, each with 4 schedulers that issue one instruction a clock.
MULTIPROCESSORS = 132
SCHEDULERS = 4
CLOCK = 1.755e9  # sustained, below the 1.98e9 of the data sheet's peak rates
# Of the slots that kernels of such a mix can use: half of the integer operations run at half rate
# (CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions", 9.0). Assumed.
USABLE = 0.75
# Of a load in seconds, while memory is busy; about 0.35e-6 while it is not
# (https://arxiv.org/abs/2402.13499, https://chipsandcheese.com, on the H100). Assumed.
TRIP = 0.6e-6
# From the begin of a launch to the end of an empty kernel, and of one that follows in the stream
# (https://github.com/NVIDIA/cccl/pull/9722: 5.0 and 7.4 us of one and two kernels on an H200).
FIRST_LAUNCH, NEXT_LAUNCH = 5.0e-6, 2.4e-6


@dataclass(frozen=True)
class Time:
    """In seconds, of a case at some size on some GPU."""

    memory: float  # to move the sectors
    issue: float  # to issue the instructions
    latency: float  # of the trips to memory, as many blocks at a time as fit
    launches: float
    of_copy: float  # what a copy of the bytes that must move takes of all this

    @property
    def bound(self) -> str:
        times = {name: getattr(self, name) for name in ("memory", "issue", "latency", "launches")}
        return max(times, key=times.__getitem__)


def time(cost: Cost, elements: int, gpu: Gpu) -> Time:
    """Of a call on so many elements: all but its launches grows with them."""
    scale = elements / cost.elements
    memory = elements * cost.moved / gpu.copy
    slots = scale * sum(kernel.slots for kernel in cost.kernels)
    issue = slots / (MULTIPROCESSORS * SCHEDULERS * CLOCK * USABLE)
    latency = TRIP * sum(
        kernel.trips * max(1.0, scale * kernel.blocks / (MULTIPROCESSORS * kernel.resident))
        for kernel in cost.kernels
    )
    launches = FIRST_LAUNCH + NEXT_LAUNCH * (cost.launches - 1)
    copy = FIRST_LAUNCH + elements * cost.bytes / gpu.copy
    of_copy = copy / (launches + max(memory, issue, latency))
    return Time(memory, issue, latency, launches, of_copy)
