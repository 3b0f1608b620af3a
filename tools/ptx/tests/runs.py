"""Runs of ops that execute the mutated code, and a check of the results.

Each run takes a backend and returns the results of the op.
"""

from types import SimpleNamespace

import torch
from conformance import samples

from dct_kernels import payload_layout, reference

from ..backend import Executor


def mask_pack(backend):
    """Four tiles in the first range, which keeps more entries than the payload holds. A short tile
    in the second range, whose entries fit into the payload. Two of its warps fill their slots."""
    numel, capacity, ranges = 9 * 4096 + 77, 1000, 2
    nbytes = payload_layout(numel, capacity, torch.float32, ranges).nbytes
    residual, payload = samples.normal(numel), torch.zeros(ranges, nbytes, dtype=torch.uint8)
    seen = torch.full((ranges,), 7, dtype=torch.int32)
    tensors = samples.normal(numel, seed=1), torch.tensor([3.0, 2.25]), payload, seen
    backend.mask_pack(residual, *tensors, capacity, torch.float32)
    return residual, payload, seen


def scatter_unpack(backend):
    """About fifty positions are in all three payloads, so the order of additions matters."""
    numel, capacity = 20001, 3000
    payloads = []
    for seed in range(3):
        nbytes = payload_layout(numel, capacity, torch.float32, 1).nbytes
        payload, seen = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
        tensors = torch.zeros(numel), samples.normal(numel, seed=seed), torch.tensor([1.5])
        reference.mask_pack(*tensors, payload, seen, capacity, torch.float32)
        payloads.append(payload)
    out = torch.zeros(numel)
    return out, backend.scatter_unpack(torch.stack(payloads), out, capacity, torch.float32)


def sample_threshold(backend):
    """Calls with more samples than registers hold, with fewer, and with three ranges."""
    grad, residual, scale = samples.normal(30000), samples.normal(30000, seed=1), torch.tensor(0.3)
    return tuple(
        backend.sample_threshold(grad, residual, 0.01, ranges, most, inv_scale=scale)
        for ranges, most in ((1, 5000), (1, 4000), (3, 5000))
    )


def row_pack(backend):
    """Rows with ties, in part of a warp, in several warps, and too wide for registers."""
    shapes = ((3, 77, 20), (3, 1100, 200), (1, 8200, 300))
    return tuple(
        result
        for rows, width, k in shapes
        for result in backend.row_pack(
            (samples.normal(rows * width).view(rows, width) * 4).round(), k, torch.float32
        )
    )


def row_gather(backend):
    """The last position of the narrow rows is out of bounds. One block handles the wide row."""
    narrow, wide = samples.normal(3 * 77).view(3, 77), samples.normal(5000).view(1, 5000)
    _, positions = reference.row_pack(narrow, 5, torch.float32)
    positions[-1, -1] = 77
    _, wide_positions = reference.row_pack(wide, 300, torch.float32)
    return (
        backend.row_gather(narrow, positions, 5, torch.float32),
        backend.row_gather(wide, wide_positions, 300, torch.float32),
    )


def row_unpack(backend):
    values, positions = reference.row_pack(samples.normal(40 * 77).view(40, 77), 5, torch.float32)
    return (backend.row_unpack(values, positions, 77, torch.float32),)


def findings(run, backend: SimpleNamespace, executor: Executor, seed: int) -> str:
    """Return the error of a run, "wrong" if its results are wrong, or else ''."""
    executor.configure(seed)
    try:
        results = run(backend)
    except RuntimeError as error:
        return str(error)
    return "" if all(map(torch.equal, results, run(reference))) else "wrong"
