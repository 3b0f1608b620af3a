"""torch.library.opcheck of the registered ops: schema, fake, autograd registration, AOT dynamic.

opcheck does not compare values with the oracle; the other test files do. The ops run on the
dispatcher's backend for the CPU. test_backends.py runs this file again with eager forced.
"""

import pytest
import torch
from torch import empty
from torch._subclasses import FakeTensorMode

import dct_kernels
from conformance import samples
from conformance.arguments import BF16, F16, F32, I32, NBYTES, NUMEL, OPS, U8, arguments
from dct_kernels import row_layout


def check(op, args):
    torch.library.opcheck(getattr(torch.ops.dct, op).default, (), args)


def u8(*shape):
    return torch.zeros(*shape, dtype=U8)


NOTHING = dct_kernels.payload_layout(0, 10, F32).nbytes
RANGES = u8(2, dct_kernels.quantized_payload_bytes(40000, "int4", ranges=2) + 16)
BF16_GRAD, BF16_OUT = samples.normal(40000, BF16), empty(40000, dtype=BF16)
MATRIX, ROWS = samples.normal(2 * 999).view(2, 999), empty(2, 20001, dtype=BF16)
CASES = [(op, {}) for op in OPS]
# Omitted optional tensors, other dtypes, other numbers of dimensions, longer payloads.
CASES += [
    ("sample_threshold", {"grad": samples.normal(NUMEL, F16), "inv_scale": None}),
    ("mask_pack", {"payload": u8(NBYTES), "threshold": torch.ones(1), "seen": empty(1, dtype=I32)}),
    ("mask_pack", {"grad": samples.normal(NUMEL, F16), "inv_scale": None}),
    ("scatter_unpack", {"payloads": u8(3, 1, NBYTES), "out": empty(NUMEL, dtype=F16)}),
    ("scatter_unpack", {"out_scale": None}),
    ("quantize_pack", {"residual": None, "inv_scale": None}),
    ("quantize_pack", {"residual": None, "grad": BF16_GRAD, "payload": RANGES, "format": "int4"}),
    ("quantize_pack", {"residual": MATRIX, "grad": MATRIX.clone(), "payload": RANGES}),
    ("dequantize_sum", {"payloads": RANGES.repeat(3, 1, 1), "out": BF16_OUT, "format": "int4"}),
    ("dequantize_sum", {"payloads": RANGES.repeat(3, 1, 1), "out": ROWS, "format": "int4"}),
    ("dequantize_sum", {"out_scale": None}),
    ("diff_pack", {"weights": torch.zeros(NUMEL, dtype=BF16), "checksums": None}),
    ("patch_check", {"patch": u8(7), "numel": 2**40}),
    ("patch_apply", {"patch": u8(0), "weights": empty(NUMEL, dtype=F16)}),
]
# Empty tensors, tensors without rows, and the rows of a single rank.
CASES += [
    ("sample_threshold", {"grad": empty(0), "residual": empty(0)}),
    ("mask_pack", {"residual": empty(0), "grad": empty(0), "payload": u8(2, NOTHING)}),
    ("scatter_unpack", {"out": empty(0), "payloads": u8(2, NOTHING)}),
    ("quantize_pack", {"residual": empty(0), "grad": empty(0), "payload": u8(64)}),
    ("dequantize_sum", {"out": empty(0), "payloads": u8(2, 64)}),
    ("diff_pack", {"weights": empty(0), "snapshot": empty(0, dtype=F16), "patch": u8(96)}),
    ("checksum", {"weights": empty(0, dtype=F16)}),
    ("row_pack", {"x": empty(0, 50)}),
    ("row_pack", {"x": empty(0, 50), "k": 20}),  # a bitmap
    ("row_gather", {"x": empty(0, 50), "positions": u8(0, 4)}),
    ("row_gather", {"x": empty(0, 50), "positions": u8(0, 7), "k": 20}),
    ("row_unpack", {"values": empty(0, 4), "positions": u8(0, 4)}),
    ("row_unpack", {"values": empty(0, 20), "positions": u8(0, 7)}),
    ("row_quantize", {"x": empty(0, 50)}),
    ("row_dequantize", {"rows": u8(0, 52)}),
    ("row_dequantize_sum", {"rows": u8(2, 0, 52)}),
    ("row_dequantize_sum", {"rows": u8(1, 3, 9), "format": "sign", "dtype": F16}),
]


@pytest.mark.parametrize(("op", "changes"), CASES)
def test_opcheck(op, changes):
    check(op, arguments(op) | changes)


@pytest.mark.parametrize(
    ("dtype", "value_dtype", "width", "k"),
    [(F32, BF16, 50, 4), (BF16, F32, 50, 20), (F16, F16, 600, 5)],
)
def test_row_ops_requiring_gradients(dtype, value_dtype, width, k):
    """Each case has a different encoding."""
    x = samples.normal(5 * width, dtype).view(5, width)
    values, positions = dct_kernels.row_pack(x, k, value_dtype)
    x.requires_grad_()
    values.requires_grad_()
    check("row_pack", {"x": x, "k": k, "value_dtype": value_dtype})
    check("row_gather", {"x": x, "positions": positions, "k": k, "value_dtype": value_dtype})
    check("row_unpack", {"values": values, "positions": positions, "width": width, "dtype": dtype})


@pytest.mark.parametrize("format", row_layout.FORMATS)
def test_quantized_rows(format):
    """The input requires grad; the quantized bytes do not."""
    x = samples.normal(5 * 33, BF16).view(5, 33).requires_grad_()
    check("row_quantize", {"x": x, "format": format})
    rows = dct_kernels.row_quantize(x, format)
    assert not rows.requires_grad
    check("row_dequantize", {"rows": rows, "width": 33, "format": format, "dtype": F16})


@pytest.mark.filterwarnings("error:Accessing the data pointer")
@pytest.mark.parametrize("entry", [dct_kernels, torch.ops.dct], ids=["public", "raw"])
@pytest.mark.parametrize("op", OPS)
def test_fake_and_meta_tensors_give_the_shapes(op, entry):
    fake, real = FakeTensorMode(), arguments(op)
    for convert in (fake.from_tensor, lambda tensor: tensor.to("meta")):
        args = {n: convert(v) if isinstance(v, torch.Tensor) else v for n, v in real.items()}
        expected, shapes = getattr(entry, op)(**real), getattr(entry, op)(**args)
        if expected is None:
            assert shapes is None
            continue
        expected = expected if isinstance(expected, tuple) else (expected,)
        shapes = shapes if isinstance(shapes, tuple) else (shapes,)
        for tensor, shape in zip(expected, shapes, strict=True):
            for attribute in ("shape", "dtype"):
                assert getattr(shape, attribute) == getattr(tensor, attribute)
            assert shape.stride() == tensor.stride()
