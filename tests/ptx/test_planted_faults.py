"""The net holds: each of these faults, planted in a copy of the CUDA sources, is caught.

What catches it is a run of its op under a few seeds: the executor's report, or a wrong answer.
"""

import re
import shutil
from dataclasses import dataclass

import pytest
import torch
from conformance import samples
from emulation.backend import launchers

from dct_kernels import payload_layout, reference

from . import build
from .backend import Executor, executor

pytestmark = pytest.mark.skipif(
    build.missing() is not None, reason=f"not on this machine: {build.missing()}"
)
SEEDS = range(1, 6)


def mask_pack(backend):
    """Ten tiles, the last one short and overflowing; the residual is aligned to 8 bytes only."""
    numel, capacity = 9 * 4096 + 77, 6500
    residual = samples.normal(numel + 2)[2:].clone()
    grad = samples.normal(numel, seed=1)
    segments, threshold = torch.tensor([0, 9000, numel]), torch.tensor([1.5, 2.0])
    nbytes = payload_layout(numel, capacity, torch.float32, 1).nbytes
    payload = torch.zeros(nbytes, dtype=torch.uint8)
    seen = torch.zeros(2, dtype=torch.int32)
    left = torch.zeros(numel + 2)[2:]
    left.copy_(residual)
    backend.mask_pack(left, grad, segments, threshold, payload, seen, capacity, torch.float32)
    return left, payload, seen


def mask_pack_of_many_tiles(backend):
    """With all 200 resident, tiles look back over several windows of 32."""
    numel, capacity = 200 * 4096, 3000
    residual, segments = samples.normal(numel), torch.tensor([0, numel])
    nbytes = payload_layout(numel, capacity, torch.float32, 1).nbytes
    payload, seen = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
    threshold = torch.tensor([3.0])
    backend.mask_pack(residual, None, segments, threshold, payload, seen, capacity, torch.float32)
    return residual, payload, seen


def scatter_unpack(backend):
    numel, capacity = 20001, 3000
    payloads = []
    for seed in range(3):
        nbytes = payload_layout(numel, capacity, torch.float32, 1).nbytes
        payload, seen = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
        residual, segments = samples.normal(numel, seed=seed), torch.tensor([0, numel])
        reference.mask_pack(
            *(residual, None, segments, torch.tensor([2.0]), payload, seen, capacity),
            torch.float32,
        )
        payloads.append(payload)
    out = torch.zeros(numel)
    status = backend.scatter_unpack(torch.stack(payloads), out, capacity, torch.float32)
    return out, status


def sample_threshold(backend):
    x = samples.normal(30000)
    return (backend.sample_threshold(x, None, torch.tensor([0, 30000]), 0.01, 20000),)


def row_unpack(backend):
    values, positions = reference.row_pack(samples.normal(40 * 77).view(40, 77), 5, torch.float32)
    return (backend.row_unpack(values, positions, 77, torch.float32),)


RESIDENT_BLOCKS = {mask_pack_of_many_tiles: 200}  # else few: others wait until one of them ends


@dataclass
class Fault:
    name: str
    run: object  # one of the above
    report: str  # what is found: the executor's words, or "wrong"
    edits: list  # (file in csrc/cuda, what occurs once in it, what takes its place)


FAULTS = [
    Fault(
        "status and count in two relaxed words",
        mask_pack,
        "wrong|data race",  # of tiles that write the same entries
        [
            (
                "detail/look_back.cuh",
                "  store_relaxed(word, count.count << 3 | Word{count.non_finite} << 2 | status);",
                "  store_relaxed(word + 4096 * status, count.count << 3 | count.non_finite * 4);\n"
                "  store_relaxed(word, status);",
            ),
            (
                "detail/look_back.cuh",
                "seen[w] = tile >= 0 ? load_relaxed(&words[tile]) : kInclusive;",
                "seen[w] = tile >= 0 ? load_relaxed(&words[tile]) : kInclusive;\n"
                "      if (tile >= 0 && seen[w] != kNotYet) {\n"
                "        seen[w] |= load_relaxed(&words[tile] + 4096 * seen[w]);\n"
                "      }",
            ),
            (
                "mask_pack.cu",
                "(tiles + args.num_segments + 1)",
                "(tiles + args.num_segments + 12288)",
            ),
        ],
    ),
    Fault(
        "no barrier before pack",
        mask_pack,
        "data race|out of bounds",  # where another warp has not yet written what it reads
        [("mask_pack.cu", "  __syncthreads();\n  pack(", "  pack(")],
    ),
    Fault(
        "128-bit accesses at an alignment of 8 bytes",
        mask_pack,
        "16 bytes misaligned",
        [
            (
                "mask_pack.cu",
                "is_aligned(args.residual, kVectorElements * sizeof(float))",
                "is_aligned(args.residual, 8)",
            )
        ],
    ),
    Fault(
        "tile numbered by blockIdx instead of a ticket",
        mask_pack,
        "hang",
        [("detail/mask_pack_tile.cuh", "atomicAdd(ticket, 1u)", "blockIdx.x + 0 * *ticket")],
    ),
    Fault(
        "scratch not cleared",
        mask_pack,
        "out of bounds|wrong|hang|data race",
        [
            (
                "mask_pack.cu",
                "cudaMemsetAsync(scratch, 0, mask_pack_scratch_bytes(args), stream)",
                "cudaMemsetAsync(scratch, 0, 8, stream)",
            )
        ],
    ),
    Fault(
        "inclusive status ignored",
        mask_pack,
        "wrong|data race",
        [
            (
                "detail/look_back.cuh",
                "__ballot_sync(kFullWarp, status == kInclusive)",
                "__ballot_sync(kFullWarp, nearest - w * kWarpSize - lane < 0)",
            )
        ],
    ),
    Fault(
        "look-back leaves out a tile between two windows",
        mask_pack_of_many_tiles,
        "wrong|data race",
        [("detail/look_back.cuh", "nearest -= kWarpSize;", "nearest -= kWarpSize + 1;")],
    ),
    Fault(
        "last block does not acquire what the others counted",
        sample_threshold,
        "data race",
        [
            (
                "sample_threshold.cu",
                "add_acquire_release(&state.done[pass], 1)",
                "atomicAdd(&state.done[pass], 1u)",
            )
        ],
    ),
    Fault(
        "no bar.warp.sync between clearing a row and filling it",
        row_unpack,
        "data race",
        [
            (
                "row_unpack.cu",
                "make_uint4(0, 0, 0, 0);\n  __syncwarp();",
                "make_uint4(0, 0, 0, 0);",
            )
        ],
    ),
    Fault(
        "no bar.warp.sync between the ranks that are added",
        scatter_unpack,
        "data race",
        [("scatter_unpack.cu", "      }\n      __syncwarp();\n    }", "      }\n    }")],
    ),
    Fault(
        "a mask that differs between lanes",
        scatter_unpack,
        "deadlock",
        [
            (
                "scatter_unpack.cu",
                "__any_sync(kFullWarp, bad)",
                "__any_sync(lane_index() < 16 ? 0xffffu : kFullWarp, bad)",
            )
        ],
    ),
    Fault(
        "an address off by one element",
        scatter_unpack,
        "out of bounds",
        [("scatter_unpack.cu", "    out[i] = finish(", "    out[i + 1] = finish(")],
    ),
]


# Each is a build of its own. By default one of every op is planted, the last.
BY_DEFAULT = {fault.run: fault for fault in FAULTS}.values()


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
    for file, sound, faulty in fault.edits:
        target = csrc / "cuda" / file
        text = target.read_text()
        assert text.count(sound) == 1, f"{file} has changed: plant this fault anew"
        target.write_text(text.replace(sound, faulty))
    op = fault.run.__name__.removesuffix("_of_many_tiles")
    planted = Executor(build.build({op: csrc}))
    caught = next(filter(None, (findings(fault.run, planted, seed) for seed in SEEDS)), None)
    assert caught is not None and re.search(fault.report, caught), caught


@pytest.mark.parametrize("run", {fault.run: fault for fault in FAULTS})
@pytest.mark.parametrize("seeds", [SEEDS, pytest.param(range(100), marks=pytest.mark.large)])
def test_sound_sources_are_silent(run, seeds):
    assert {findings(run, executor(), seed) for seed in seeds} == {""}


def findings(run, planted, seed):
    """What shows that something is wrong, or ''."""
    planted.configure(seed, RESIDENT_BLOCKS.get(run, 3))
    try:
        results = run(launchers(planted.call))
    except RuntimeError as error:
        return str(error)
    same = map(torch.equal, results, run(reference))
    return "" if all(same) else "wrong"
