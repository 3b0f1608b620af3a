"""As runs.py: runs of the Triton ops on every entry, of which a program takes four rows."""

import itertools

import torch
from conformance import samples

from dct_kernels import quantized_payload_bytes, reference
from dct_kernels.layout import QUANTIZED_CODES

ENTRIES = 4096 + 1024 + 77  # four rows, one more, and one that is not full


def quantize_pack(backend):
    """With an infinite entry at the beginning, then with one at the end."""
    results = []
    for format, infinite in itertools.product(QUANTIZED_CODES, (0, -1)):
        residual, grad = samples.normal(ENTRIES), samples.normal(ENTRIES, seed=1)
        grad[infinite] = torch.inf
        payload = torch.zeros(quantized_payload_bytes(ENTRIES, format), dtype=torch.uint8)
        backend.quantize_pack(residual, grad, payload, format)
        results += [residual, payload]
    return results


def _quantized(format):
    """Three payloads, of which the second is damaged."""
    payloads = torch.zeros(3, quantized_payload_bytes(ENTRIES, format), dtype=torch.uint8)
    for seed, payload in enumerate(payloads):
        reference.quantize_pack(None, samples.normal(ENTRIES, seed=seed), payload, format)
    payloads[1, 8] ^= 1
    return payloads


def dequantize_sum(backend):
    results = []
    for format in QUANTIZED_CODES:
        out = torch.zeros(ENTRIES)
        results += [backend.dequantize_sum(_quantized(format), out, format, 1 / 3), out]
    return results


def dequantize_sum_pack(backend):
    """With an infinite entry, as in quantize_pack."""
    results = []
    for format, infinite in itertools.product(QUANTIZED_CODES, (0, -1)):
        payloads, residual = _quantized(format), samples.normal(ENTRIES, seed=3)
        residual[infinite] = torch.inf
        payload = torch.zeros_like(payloads[0])
        status = backend.dequantize_sum_pack(payloads, residual, payload, format, 1 / 3)
        results += [status, residual, payload]
    return results
