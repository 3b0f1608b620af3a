"""Results are bitwise equal for any number of threads, and in repeated calls."""

import pytest
import torch
from conftest import BACKENDS

from conformance import samples
from dct_kernels import patch_bytes, payload_layout, quantized_payload_bytes
from dct_kernels.layout import QUANTIZED_CODES
from dct_kernels.row_layout import FORMATS


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def run_all_ops(backend):
    """Run every op once on sizes that are split into many pieces; return all results as bytes."""
    device, numel, capacity, ranges = backend.device, 20 * 16384 + 77, 5000, 3
    residual = samples.normal(numel).to(device)
    grad = samples.hard(numel, torch.bfloat16, non_finite=False).to(device)
    threshold = backend.sample_threshold(grad, residual, 0.02, ranges, max_samples=5000)
    nbytes = payload_layout(numel, capacity, torch.bfloat16, ranges).nbytes
    payload = torch.zeros(ranges, nbytes, dtype=torch.uint8, device=device)
    seen = torch.empty(ranges, dtype=torch.int32, device=device)
    backend.mask_pack(residual, grad, threshold, payload, seen, capacity, torch.bfloat16)
    out = torch.empty_like(residual)
    payloads = torch.stack([payload, payload.flip(0), payload])
    status = backend.scatter_unpack(payloads, out, capacity, torch.bfloat16, 1 / 3)
    x = samples.normal(2000 * 200).view(2000, 200).to(device)
    values, positions = backend.row_pack(x, 9, torch.float16)
    gathered = backend.row_gather(x.flip(1), positions, 9, torch.float32)
    dense = backend.row_unpack(values, positions, 200, torch.bfloat16)
    rows = [backend.row_quantize(x, format) for format in FORMATS]
    coarse = [
        backend.row_dequantize(quantized, 200, format, torch.float16)
        for quantized, format in zip(rows, FORMATS, strict=True)
    ]
    coarse += [
        backend.row_dequantize_sum(quantized.view(4, 500, -1), 200, format, torch.float32)
        for quantized, format in zip(rows, FORMATS, strict=True)
    ]
    results = (threshold, payload, seen, residual, out, status, values, positions)
    results += (gathered, dense, *rows, *coarse)
    results += run_patch_ops(backend, residual, out.to(torch.bfloat16))
    for format in QUANTIZED_CODES:
        results += run_dense_ops(backend, residual, grad, format)
    return [result.cpu().contiguous().view(torch.uint8) for result in results]


def run_dense_ops(backend, residual, grad, format):
    """Run the ops on dense payloads of 10 blocks, with 3 ranges and with one."""
    residual, grad, ranges = residual[: 9 * 16384 + 77].clone(), grad[: 9 * 16384 + 77], 3
    numel, device = residual.numel(), residual.device
    nbytes = quantized_payload_bytes(numel, format, ranges)
    payload = torch.zeros(ranges, nbytes, dtype=torch.uint8, device=device)
    backend.quantize_pack(residual, grad, payload, format)
    out = torch.empty_like(residual)
    payloads = torch.stack([payload, payload, payload.flip(0)])
    status = backend.dequantize_sum(payloads, out, format, 1 / 3)
    flat = torch.zeros(quantized_payload_bytes(numel, format), dtype=torch.uint8, device=device)
    backend.quantize_pack(None, grad, flat, format)
    return residual, payload, out, status, flat


def run_patch_ops(backend, weights, snapshot):
    """Pack with sufficient capacity and with overflow in a later block; apply the first patch."""
    results = []
    for capacity in (2 * weights.numel(), weights.numel() // 2):
        size = patch_bytes(weights.numel(), capacity)
        patch = torch.zeros(size, dtype=torch.uint8, device=weights.device)
        checksums = torch.empty(2, dtype=torch.int64, device=weights.device)
        backend.diff_pack(weights, snapshot, patch, checksums, capacity)
        results += [patch, checksums]
    return *results, backend.patch_apply(results[0], snapshot), snapshot, backend.checksum(snapshot)


@pytest.mark.many_programs
def test_threads_and_repetitions_agree(backend, threads):
    """Only eager and cpp use torch's threads. Calls on other backends are repeated once."""
    threads(1)
    first = run_all_ops(backend)
    threaded = backend in (BACKENDS["eager"], BACKENDS.get("cpp"))
    for count in (1, 2, 5) if threaded else (1,):
        threads(count)
        for now, before in zip(run_all_ops(backend), first, strict=True):
            assert torch.equal(now, before)
