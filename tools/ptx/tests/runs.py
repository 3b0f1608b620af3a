"""Runs of every op that go where mutants differ, and what shows that something is wrong.

Each takes a backend and returns what the op left behind.
"""

from types import SimpleNamespace

import torch
from conformance import samples

from dct_kernels import payload_layout, quantized_payload_bytes, reference
from dct_kernels.layout import FLAGS_BYTE, HEADER_BYTES, QUANTIZED_CODES
from dct_kernels.row_layout import FORMATS

from ..backend import Executor


def mask_pack(backend):
    """Two ranges of five tiles together, the last one short. There is room for what is kept of the
    first range, and none for all of the second, where about half of the warps fill their slots.
    """
    numel, capacity, ranges = 9 * 4096 + 77, 1000, 2
    nbytes = payload_layout(numel, capacity, torch.float32, ranges).nbytes
    residual, payload = samples.normal(numel), torch.zeros(ranges, nbytes, dtype=torch.uint8)
    seen = torch.full((ranges,), 7, dtype=torch.int32)
    tensors = samples.normal(numel, seed=1), torch.tensor([3.0, 2.25]), payload, seen
    backend.mask_pack(residual, *tensors, capacity, torch.float32)
    return residual, payload, seen


def scatter_unpack(backend):
    """Dense enough that some fifty positions are in all three payloads: their order shows."""
    numel, capacity = 20001, 3000
    payloads = []
    for seed in range(3):
        nbytes = payload_layout(numel, capacity, torch.float32, 1).nbytes
        payload, seen = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
        tensors = torch.zeros(numel), samples.normal(numel, seed=seed), torch.tensor([1.5])
        reference.mask_pack(*tensors, payload, seen, capacity, torch.float32)
        payloads.append(payload)
    out = torch.zeros(numel)
    status = backend.scatter_unpack(torch.stack(payloads), out, capacity, torch.float32)
    return out, status


def sample_threshold(backend):
    """More picks than one block takes, and as many as one does."""
    grad, residual = samples.normal(30000), torch.zeros(30000)
    return tuple(
        backend.sample_threshold(grad, residual, 0.01, ranges, picks)
        for ranges, picks in ((1, 20000), (1, 5000), (3, 5000))
    )


def quantize_pack(backend):
    """Two rows and a part of one; a sum that is not finite, and one that almost is not. With a
    gradient, and without a residual."""
    numel, results = 2 * 1024 + 77, []
    grad = samples.normal(numel, seed=1)
    grad[100], grad[1500] = torch.inf, torch.finfo(torch.float32).max
    for format in QUANTIZED_CODES:
        residual = samples.normal(numel)
        payload = torch.zeros(2, quantized_payload_bytes(numel, format), dtype=torch.uint8)
        backend.quantize_pack(residual, grad, payload[0], format, torch.tensor(0.5))
        backend.quantize_pack(None, grad, payload[1], format)
        results += [residual, payload]
    return results


def _quantized(numel, format, ranks, ranges):
    """Payloads, that of the second rank with a wrong header."""
    nbytes = quantized_payload_bytes(numel, format, ranges)
    payloads = torch.zeros(ranks, ranges, nbytes, dtype=torch.uint8)
    for seed, payload in enumerate(payloads):
        reference.quantize_pack(None, samples.normal(numel, seed=seed), payload, format)
    payloads[1, -1, FLAGS_BYTE] |= 1
    return payloads


def dequantize_sum(backend):
    """The last block has two rows and a part of one. A byte is none of a ternary payload."""
    numel, results = 16384 + 2 * 1024 + 77, []
    for ranges, format in zip((1, 2, 1, 2, 1), QUANTIZED_CODES, strict=True):
        out, payloads = torch.zeros(numel), _quantized(numel, format, 6, ranges)
        payloads[0, 0, HEADER_BYTES + 7] = 125
        results += [backend.dequantize_sum(payloads, out, format, 0.3), out]
    return results


def dequantize_sum_pack(backend):
    numel, results = 2 * 1024 + 77, []
    for format in QUANTIZED_CODES:
        residual, payloads = samples.normal(numel, seed=9), _quantized(numel, format, 3, 1)[:, 0]
        residual[1500] = torch.nan
        payload = torch.zeros(quantized_payload_bytes(numel, format), dtype=torch.uint8)
        status = backend.dequantize_sum_pack(payloads, residual, payload, format, 0.3)
        results += [status, residual, payload]
    return results


def row_pack(backend):
    """Ties; a narrow kernel, and that of rows too wide for a warp."""
    narrow, wide = ((samples.normal(3 * d).view(3, d) * 4).round() for d in (77, 1100))
    return (
        *backend.row_pack(narrow, 20, torch.float32),
        *backend.row_pack(wide, 200, torch.float32),
    )


def row_gather(backend):
    """The last column of the narrow rows is one past the end; the wide one is a block's."""
    narrow, wide = samples.normal(3 * 77).view(3, 77), samples.normal(5000).view(1, 5000)
    _, positions = reference.row_pack(narrow, 5, torch.float32)
    positions[-1, -1] = 77
    _, of_wide = reference.row_pack(wide, 300, torch.float32)
    return (
        backend.row_gather(narrow, positions, 5, torch.float32),
        backend.row_gather(wide, of_wide, 300, torch.float32),
    )


def row_unpack(backend):
    values, positions = reference.row_pack(samples.normal(40 * 77).view(40, 77), 5, torch.float32)
    return (backend.row_unpack(values, positions, 77, torch.float32),)


def row_quantize(backend):
    narrow, wide = samples.normal(5 * 50).view(5, 50), samples.normal(2 * 1100).view(2, 1100)
    return tuple(backend.row_quantize(x, format) for x in (narrow, wide) for format in FORMATS)


def row_dequantize(backend):
    """Rows wider than what 32 lanes take at a time."""
    return tuple(
        backend.row_dequantize(
            reference.row_quantize(samples.normal(2 * 1500).view(2, 1500), format),
            1500,
            format,
            torch.float32,
        )
        for format in FORMATS
    )


def findings(run, backend: SimpleNamespace, executor: Executor, seed: int) -> str:
    """What shows that something is wrong, or ''."""
    executor.configure(seed)
    try:
        results = run(backend)
    except RuntimeError as error:
        return str(error)
    same = map(torch.equal, results, run(reference))
    return "" if all(same) else "wrong"
