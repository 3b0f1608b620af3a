"""The net holds: each of these faults, planted in a copy of the kernels, is caught.

What catches it is the native test of that kernel, under the same seeds as in `test_native.py`: by a
wrong result, a hang that the emulator reports, or an access that a sanitizer reports.
"""

import shutil
from dataclasses import dataclass

import pytest

from . import build
from .test_native import PROGRAMS, run


@dataclass
class Fault:
    name: str
    program: str
    file: str  # in csrc/cuda
    sound: str  # occurs once in it
    faulty: str
    sanitizer: str = "none"
    report: str = "FAILED"  # what stderr must say


FAULTS = [
    Fault(
        "missing barrier before the warps' counts are read",
        "mask_pack",
        "mask_pack.cu",
        "sum_rows(rows_total) << 1 | non_finite;\n  __syncthreads();",
        "sum_rows(rows_total) << 1 | non_finite;",
        "thread",
        "data race",
    ),
    Fault(
        "tile numbered by blockIdx instead of a ticket",
        "mask_pack",
        "detail/mask_pack_tile.cuh",
        "atomicAdd(ticket, 1u)",
        "blockIdx.x + 0 * *ticket",
        report="hang",
    ),
    Fault(
        "a tile takes the segments of the tile that its block's index names",
        "mask_pack",
        "detail/mask_pack_tile.cuh",
        "segment[0] <= bounds.begin &&\n      bounds.end <= segment[1]",
        "segment[0] <= segment[1]",
    ),
    Fault(
        "a tile never published",
        "mask_pack",
        "detail/look_back.cuh",
        "if (lane == 0) publish(&words[index], own, index == 0 ? kInclusive : kOwn);",
        "if (lane == 0 && index != 0) publish(&words[index], own, index == 0 ? kInclusive : kOwn);",
        report="hang",
    ),
    Fault(
        "status published before the count",
        "mask_pack",
        "detail/look_back.cuh",
        "  store_relaxed(word, ",
        "  store_relaxed(word, status);\n  store_relaxed(word, ",
    ),
    Fault(
        "look-back includes the tile beyond the nearest inclusive one",
        "mask_pack",
        "detail/look_back.cuh",
        "(inclusive & -inclusive) * 2 - 1",
        "(inclusive & -inclusive) * 4 - 1",
    ),
    Fault(
        "off by one at the edge of a tile",
        "mask_pack",
        "detail/range_tiles.cuh",
        "found.last ? range_end : found.bounds.begin + tile;",
        "found.last ? range_end : found.bounds.begin + tile - 1;",
    ),
    Fault(
        "no repair of the residual on overflow",
        "mask_pack",
        "mask_pack.cu",
        "args.residual[base + e] = acc;",
        ";",
    ),
    Fault(
        "scratch not cleared",
        "mask_pack",
        "mask_pack.cu",
        "cudaMemsetAsync(scratch, 0, mask_pack_scratch_bytes(args), stream)",
        "cudaMemsetAsync(scratch, 0, 8, stream)",
        "address",
        "AddressSanitizer",
    ),
    Fault(
        "missing barrier between checking and adding",
        "scatter_unpack",
        "scatter_unpack.cu",
        "    __syncthreads();\n    add<Value>",
        "    add<Value>",
        "thread",
        "ThreadSanitizer",  # a race, or what it made of a pointer
    ),
    Fault(
        "a position at the end of the block accepted",
        "scatter_unpack",
        "scatter_unpack.cu",
        "position[q] >= length",
        "position[q] > length",
    ),
    Fault(
        "ranks not added in order",
        "scatter_unpack",
        "scatter_unpack.cu",
        "const int64_t rank = begin + thread_index();",
        "const int64_t rank = begin + num_ranks - 1 - thread_index();",
    ),
    Fault(
        "last block does not acquire what the others counted",
        "thresholds",
        "sample_threshold.cu",
        "add_acquire_release(&state.done[pass], 1)",
        "atomicAdd(&state.done[pass], 1u)",
        "thread",
        "data race",
    ),
    Fault(
        "missing barrier between clearing a row and filling it",
        "rows",
        "row_unpack.cu",
        "make_uint4(0, 0, 0, 0);\n  __syncwarp();",
        "make_uint4(0, 0, 0, 0);",
        "thread",
        "data race",
    ),
    Fault(
        "one tie too many",
        "rows",
        "row_pack.cu",
        "left > 0 && tied != 0",
        "left >= 0 && tied != 0",
    ),
]


# Each is a build of its own: by default one is planted.
BY_DEFAULT = FAULTS[1:2]


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.name, marks=() if fault in BY_DEFAULT else pytest.mark.large)
        for fault in FAULTS
    ],
)
def test_fault_is_caught(fault, tmp_path):
    csrc = tmp_path / "csrc"
    for folder in ("common", "cuda"):
        shutil.copytree(build.CSRC / folder, csrc / folder)
    target = csrc / "cuda" / fault.file
    text = target.read_text()
    assert text.count(fault.sound) == 1, f"{fault.file} has changed: plant this fault anew"
    target.write_text(text.replace(fault.sound, fault.faulty))

    kernels = PROGRAMS[fault.program]
    binary = build.build(
        f"native/{fault.program}.cpp", kernels, sanitizer=fault.sanitizer, csrc=csrc
    )
    result = run(binary, fault.sanitizer)
    assert result.returncode != 0 and fault.report in result.stderr, result.stderr
