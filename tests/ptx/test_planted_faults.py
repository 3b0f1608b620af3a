"""The net holds: each of these faults, planted in a copy of the CUDA sources, is caught.

What catches it is a run of its op under a few seeds: the executor's report, or a wrong answer.
"""

import re

import planted
import pytest
import torch
from conformance import samples
from emulation.backend import launchers

from dct_kernels import payload_layout, reference
from dct_kernels.row_layout import SCALED_BY_ROW

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
    """With all 140 resident, tiles look back over several windows of 32; every other is skipped."""
    tiles, tile, capacity = 140, 4096, 2000
    residual, segments = samples.normal(tiles * tile), torch.arange(tiles + 1) * tile
    nbytes = payload_layout(tiles * tile, capacity, torch.float32, 1).nbytes
    payload, seen = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(tiles, dtype=torch.int32)
    threshold = torch.tensor([3.0, -1.0]).repeat(tiles // 2)
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


def track_threshold(backend):
    threshold, seen = torch.tensor([1.0, 2.0, -1.0]), torch.tensor([9, 1, 5], dtype=torch.int32)
    backend.track_threshold(threshold, seen, torch.full((3,), 4.0), torch.full((3,), 2.0))
    return (threshold,)


def row_pack(backend):
    """Ties; a narrow kernel, and that of rows too wide for a warp."""
    narrow, wide = ((samples.normal(3 * d).view(3, d) * 4).round() for d in (77, 1100))
    return (
        *backend.row_pack(narrow, 5, torch.float32),
        *backend.row_pack(wide, 200, torch.float32),
    )


def row_gather(backend):
    """The last column is one past the end."""
    x = samples.normal(3 * 77).view(3, 77)
    _, positions = reference.row_pack(x, 5, torch.float32)
    positions[-1, -1] = 77
    return (backend.row_gather(x, positions, 5, torch.float32),)


def row_unpack(backend):
    values, positions = reference.row_pack(samples.normal(40 * 77).view(40, 77), 5, torch.float32)
    return (backend.row_unpack(values, positions, 77, torch.float32),)


def row_quantize(backend):
    narrow, wide = samples.normal(5 * 50).view(5, 50), samples.normal(2 * 1100).view(2, 1100)
    return tuple(
        backend.row_quantize(x, format) for x in (narrow, wide) for format in SCALED_BY_ROW
    )


def row_dequantize(backend):
    """Rows wider than what 32 lanes take at a time."""
    return tuple(
        backend.row_dequantize(
            reference.row_quantize(samples.normal(2 * 1500).view(2, 1500), format),
            1500,
            format,
            torch.float32,
        )
        for format in SCALED_BY_ROW
    )


RESIDENT_BLOCKS = {mask_pack_of_many_tiles: 140}  # else few: others wait until one of them ends

# fault: (run, what is found: the executor's words, or "wrong")
CAUGHT = {
    # "data race": of tiles that write the same entries.
    "status and count in two relaxed words": (mask_pack, "wrong|data race"),
    "inclusive status ignored": (mask_pack, "wrong|data race"),
    "look-back leaves out a tile between two windows": (mask_pack_of_many_tiles, "wrong|data race"),
    "tile numbered by blockIdx instead of a ticket": (mask_pack, "hang"),
    "no barrier before the warps' counts are read": (mask_pack, "data race"),
    # Or where another warp has not yet written what it reads.
    "no barrier before pack": (mask_pack, "data race|out of bounds"),
    "scratch not cleared": (mask_pack, "out of bounds|wrong|hang|data race"),
    "128-bit accesses at an alignment of 8 bytes": (mask_pack, "16 bytes misaligned"),
    "no barrier between checking and adding": (scatter_unpack, "data race|out of bounds"),
    "no bar.warp.sync between the ranks that are added": (scatter_unpack, "data race"),
    "a mask that differs between lanes": (scatter_unpack, "deadlock"),
    "lanes that vote at two places": (scatter_unpack, "waits for it elsewhere"),
    "an address off by one element": (scatter_unpack, "out of bounds"),
    "last block does not acquire what the others counted": (sample_threshold, "data race"),
    "one thread more than segments": (track_threshold, "out of bounds"),
    "one tie too many": (row_pack, "wrong|out of bounds|data race"),
    "no barrier before the histogram's digit is looked for": (row_pack, "data race"),
    "a column at the end of the row accepted": (row_gather, "out of bounds"),
    "no bar.warp.sync between clearing a row and filling it": (row_unpack, "data race"),
    "no bar.warp.sync between codes and bytes": (row_quantize, "data race"),
    "no barrier before a block's rows leave": (row_quantize, "data race"),
    "a vector past the last row's end": (row_quantize, "out of bounds|wrong"),
    "no bar.warp.sync before the next codes": (row_dequantize, "data race"),
}
# Each is a build of its own: by default one of mask_pack, and those that build in seconds.
BY_DEFAULT = {
    "status and count in two relaxed words",
    "an address off by one element",
    "last block does not acquire what the others counted",
    "a column at the end of the row accepted",
    "no bar.warp.sync between clearing a row and filling it",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.large) for name in CAUGHT],
)
def test_fault_is_caught(name, tmp_path):
    run, report = CAUGHT[name]
    csrc = planted.plant(name, tmp_path)
    faulty = Executor(build.build({planted.FAULTS[name].op: csrc}))
    caught = next(filter(None, (findings(run, faulty, seed) for seed in SEEDS)), None)
    assert caught is not None and re.search(report, caught), caught


RUNS = dict.fromkeys(run for run, _ in CAUGHT.values())


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("seeds", [SEEDS, pytest.param(range(100), marks=pytest.mark.large)])
def test_sound_sources_are_silent(run, seeds):
    assert {findings(run, executor(), seed) for seed in seeds} == {""}


def findings(run, executor, seed):
    """What shows that something is wrong, or ''."""
    executor.configure(seed, RESIDENT_BLOCKS.get(run, 3))
    try:
        results = run(launchers(executor.call))
    except RuntimeError as error:
        return str(error)
    same = map(torch.equal, results, run(reference))
    return "" if all(same) else "wrong"
