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
# Integer additions, logic, shifts, comparisons and minima: 64 lanes a clock and multiprocessor,
# half of what is issued (CUDA C++ Programming Guide, "Throughput of Native Arithmetic
# Instructions", 9.0).
HALF_RATE = 0.5
# What kernels use of that pipe: fitted to times measured on an H100, at this clock. row_quantize
# (ternary) came to 96 %, row_pack, whose warps vote and shuffle round after round, to 63 to 72 %.
USABLE, USABLE_IN_ROUNDS = 0.95, 0.72
IN_ROUNDS = "row_pack_narrow_kernel"
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
    issue: float  # to issue the instructions, one a clock
    half_rate: float  # to execute those of the pipe of half rate
    latency: float  # of the trips to memory, as many blocks at a time as fit
    launches: float
    of_copy: float  # what a copy of the bytes that must move takes of all this

    @property
    def bound(self) -> str:
        parts = ("memory", "issue", "half_rate", "latency", "launches")
        times = {name.replace("_", " "): getattr(self, name) for name in parts}
        return max(times, key=times.__getitem__)


def time(cost: Cost, elements: int, gpu: Gpu) -> Time:
    """Of a call on so many elements: all but its launches grows with them."""
    scale = elements / cost.elements
    memory = elements * cost.moved / gpu.copy
    slots = scale * sum(kernel.slots for kernel in cost.kernels)
    issue = slots / (MULTIPROCESSORS * SCHEDULERS * CLOCK)
    half_rate = scale * sum(
        kernel.half_rate / (USABLE_IN_ROUNDS if kernel.name.startswith(IN_ROUNDS) else USABLE)
        for kernel in cost.kernels
    )
    half_rate /= MULTIPROCESSORS * SCHEDULERS * CLOCK * HALF_RATE
    latency = TRIP * sum(
        kernel.trips * max(1.0, scale * kernel.blocks / (MULTIPROCESSORS * kernel.resident))
        for kernel in cost.kernels
    )
    launches = FIRST_LAUNCH + NEXT_LAUNCH * (cost.launches - 1)
    copy = FIRST_LAUNCH + elements * cost.bytes / gpu.copy
    of_copy = copy / (launches + max(memory, issue, half_rate, latency))
    return Time(memory, issue, half_rate, latency, launches, of_copy)
