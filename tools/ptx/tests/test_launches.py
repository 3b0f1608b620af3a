"""Counts the launches of each op on a GPU, with the executor's CUDA runtime."""

import pytest
import torch

from dct_kernels import patch_bytes, payload_layout, quantized_payload_bytes
from dct_kernels._ops import OPS
from support.launches import stated

from .. import build
from ..backend import BACKEND, executor

pytestmark = pytest.mark.skipif(
    build.missing() is not None, reason=f"not on this machine: {build.missing()}"
)

NUMEL, CAPACITY, F32 = 40_000, 50, torch.float32


def _arguments():
    residual, grad = torch.zeros(NUMEL), torch.randn(NUMEL)
    threshold, seen = torch.full((1,), 3.0), torch.zeros(1, dtype=torch.int32)
    payload = torch.zeros(payload_layout(NUMEL, CAPACITY, F32).nbytes, dtype=torch.uint8)
    x = torch.randn(3, 64)
    values, positions = torch.ops.dct.row_pack(x, 4, F32)
    rows = torch.ops.dct.row_quantize(x, "int8")
    quantized = torch.zeros(2, quantized_payload_bytes(NUMEL, "int4"), dtype=torch.uint8)
    half = torch.zeros(NUMEL, dtype=torch.bfloat16)
    patch = torch.zeros(patch_bytes(NUMEL, CAPACITY), dtype=torch.uint8)
    packed = (residual, grad, threshold, payload, seen, CAPACITY, F32)
    return {
        "sample_threshold": [(grad, residual, 0.01, 2, n) for n in (9, 4096)],
        "mask_pack": [packed, (*packed, torch.ones(1))],
        "scatter_unpack": [(payload.expand(3, -1).contiguous(), grad, CAPACITY, F32)],
        "quantize_pack": [
            (residual, grad, quantized[0], "int4"),
            (None, grad, quantized, "int4", torch.ones(1)),
        ],
        "dequantize_sum": [(quantized, grad, "int4")],
        "row_pack": [(x, 4, F32)],
        "row_gather": [(x, positions, 4, F32)],
        "row_unpack": [(values, positions, 64, F32)],
        "row_quantize": [(x, "int8")],
        "row_dequantize": [(rows, 64, "int8", F32)],
        "row_dequantize_sum": [(rows[None], 64, "int8", F32)],
        "diff_pack": [(grad, half, patch, None, CAPACITY)],
        "patch_check": [(patch, NUMEL, torch.bfloat16)],
        "patch_apply": [(patch, half)],
        "checksum": [(half,)],
    }


@pytest.mark.parametrize("op", OPS)
def test_an_op_launches_what_the_docs_state(op):
    for arguments in _arguments()[op]:
        executor().configure(0)
        getattr(BACKEND, op)(*arguments)
        assert executor().launches() == stated()[op]


@pytest.mark.parametrize("samples, launches", [(4_096, (1, 0)), (4_097, (2, 0))])
def test_more_samples_need_more_launches(samples, launches):
    grad, residual, *_ = _arguments()["sample_threshold"][0]
    executor().configure(0)
    BACKEND.sample_threshold(grad, residual, 0.01, max_samples=samples)
    assert executor().launches() == launches
