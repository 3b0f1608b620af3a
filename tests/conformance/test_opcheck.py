"""torch.library.opcheck of the registered ops: schema, fake, autograd registration, AOT dynamic.

It compares no values with the contract; the other files do. The ops run on whatever backend the
dispatcher picks for the CPU; test_backends.py runs this file once more with eager forced.
"""

import pytest
import torch
from torch._subclasses import FakeTensorMode

import dct_kernels
from conformance import bits, samples
from conformance.arguments import OPS, arguments
from dct_kernels import layout, row_layout

floats = pytest.mark.parametrize("dtype", bits.FLOATS, ids=bits.name)


def check(op, args):
    torch.library.opcheck(getattr(torch.ops.dct, op).default, (), args)


@pytest.mark.parametrize("op", OPS)
def test_contiguous(op):
    check(op, arguments(op))


ABSENT = [
    ("sample_threshold", ("residual", "inv_scale")),
    ("mask_pack", ("grad", "inv_scale", "status")),
    ("scatter_unpack", ("out_scale",)),
    ("quantize_pack", ("residual", "inv_scale", "status")),
    ("quantize_pack", ("grad",)),
    ("dequantize_sum", ("out_scale",)),
]


@pytest.mark.parametrize(("op", "absent"), ABSENT)
def test_without_the_optional_tensors(op, absent):
    check(op, arguments(op) | dict.fromkeys(absent))


def test_mask_pack_into_ranges():
    nbytes = dct_kernels.payload_layout(40000, 50, torch.bfloat16, ranges=2).nbytes
    check(
        "mask_pack",
        {
            "residual": samples.normal(40000),
            "grad": None,
            "segments": torch.tensor([0, 0, 30000, 40000]),
            "threshold": torch.tensor([1.0, 2.0, -1.0]),
            "payload": torch.zeros(2, nbytes, dtype=torch.uint8),
            "seen": torch.zeros(3, dtype=torch.int32),
            "capacity": 50,
            "value_dtype": torch.bfloat16,
        },
    )


@floats
def test_sample_threshold_of_every_dtype(dtype):
    check("sample_threshold", arguments("sample_threshold") | {"x": samples.normal(100, dtype)})


@floats
def test_scatter_unpack_of_ranges_accumulating(dtype):
    nbytes = dct_kernels.payload_layout(40000, 50, torch.bfloat16, ranges=2).nbytes
    check(
        "scatter_unpack",
        {
            "payloads": torch.zeros(3, 2, nbytes, dtype=torch.uint8),
            "out": samples.normal(40000, dtype),
            "capacity": 50,
            "value_dtype": torch.bfloat16,
            "scale": 0.5,
            "accumulate": True,
        },
    )


@pytest.mark.parametrize("format", layout.QUANTIZED_CODES)
@floats
def test_every_entry_of_ranges(dtype, format):
    nbytes = dct_kernels.quantized_payload_bytes(40000, format, ranges=2) + 16
    payload = torch.zeros(2, nbytes, dtype=torch.uint8)
    grad = samples.normal(40000, dtype)
    check("quantize_pack", {"residual": None, "grad": grad, "payload": payload, "format": format})
    payloads = {"payloads": torch.stack([payload] * 3), "out": grad}
    check("dequantize_sum", payloads | {"format": format, "scale": 0.5})


NBYTES_OF_NOTHING = dct_kernels.payload_layout(0, 10, torch.float32).nbytes
EMPTY = {
    "sample_threshold": {"x": torch.empty(0), "residual": None, "segments": torch.tensor([0])},
    "mask_pack": {
        **dict.fromkeys(("residual", "grad", "threshold"), torch.empty(0)),
        **{"segments": torch.tensor([0]), "seen": torch.empty(0, dtype=torch.int32)},
        "payload": torch.zeros(NBYTES_OF_NOTHING, dtype=torch.uint8),
    },
    "scatter_unpack": {
        "out": torch.empty(0),
        "payloads": torch.zeros(2, NBYTES_OF_NOTHING, dtype=torch.uint8),
    },
    "quantize_pack": {
        **dict.fromkeys(("residual", "grad"), torch.empty(0)),
        "payload": torch.zeros(64, dtype=torch.uint8),
    },
    "dequantize_sum": {"out": torch.empty(0), "payloads": torch.zeros(2, 64, dtype=torch.uint8)},
    "dequantize_sum_pack": {
        "payloads": torch.zeros(0, 64, dtype=torch.uint8),
        "residual": torch.empty(0),
        "payload": torch.zeros(64, dtype=torch.uint8),
    },
    "row_pack": {"x": torch.empty(0, 50)},
    "row_gather": {"x": torch.empty(0, 50), "positions": torch.empty(0, 4, dtype=torch.uint8)},
    "row_unpack": {"values": torch.empty(0, 4), "positions": torch.empty(0, 4, dtype=torch.uint8)},
    "row_quantize": {"x": torch.empty(0, 50)},
    "row_dequantize": {"rows": torch.empty(0, 52, dtype=torch.uint8)},
}


@pytest.mark.parametrize("op", OPS)
def test_empty(op):
    check(op, arguments(op) | EMPTY[op])


def test_an_empty_batch_with_a_bitmap():
    positions = {"positions": torch.empty(0, 7, dtype=torch.uint8)}
    check("row_pack", {"x": torch.empty(0, 50), "k": 20, "value_dtype": torch.float32})
    check("row_gather", arguments("row_gather") | EMPTY["row_gather"] | positions | {"k": 20})
    values = {"values": torch.empty(0, 20)}
    check("row_unpack", arguments("row_unpack") | values | positions)


@pytest.mark.parametrize("value_dtype", bits.FLOATS, ids=bits.name)
@floats
def test_row_ops_requiring_gradients(dtype, value_dtype):
    differentiate(dtype, value_dtype, 50, 4)


@pytest.mark.parametrize(("width", "k"), [(50, 20), (600, 5)])
def test_row_ops_requiring_gradients_in_other_encodings(width, k):
    differentiate(torch.float32, torch.bfloat16, width, k)


def differentiate(dtype, value_dtype, width, k):
    x = samples.normal(5 * width, dtype).view(5, width)
    values, positions = dct_kernels.row_pack(x, k, value_dtype)
    x.requires_grad_()
    values.requires_grad_()
    check("row_pack", {"x": x, "k": k, "value_dtype": value_dtype})
    check("row_gather", {"x": x, "positions": positions, "k": k, "value_dtype": value_dtype})
    check("row_unpack", {"values": values, "positions": positions, "width": width, "dtype": dtype})


@pytest.mark.parametrize("format", row_layout.FORMATS)
@floats
def test_quantized_rows(dtype, format):
    """Of what requires a gradient, too: the bytes have none."""
    x = samples.normal(5 * 33, dtype).view(5, 33).requires_grad_()
    check("row_quantize", {"x": x, "format": format})
    rows = dct_kernels.row_quantize(x, format)
    assert not rows.requires_grad
    check("row_dequantize", {"rows": rows, "width": 33, "format": format, "dtype": dtype})


@pytest.mark.filterwarnings("error:Accessing the data pointer")
@pytest.mark.parametrize("entry", [dct_kernels, torch.ops.dct], ids=["public", "raw"])
@pytest.mark.parametrize("kind", ["meta", "fake"])
@pytest.mark.parametrize("op", OPS)
def test_tensors_without_memory_give_the_shapes(op, kind, entry):
    """As large as anybody likes."""
    fake = FakeTensorMode()

    def without_memory(tensor):
        return fake.from_tensor(tensor) if kind == "fake" else tensor.to("meta")

    real = arguments(op)
    meta = {n: without_memory(v) if isinstance(v, torch.Tensor) else v for n, v in real.items()}
    call = getattr(entry, op)
    expected, shapes = call(**real), call(**meta)
    expected = expected if isinstance(expected, tuple) else (expected,)
    shapes = shapes if isinstance(shapes, tuple) else (shapes,)
    for tensor, shape in zip(expected, shapes, strict=True):
        if tensor is None:
            assert shape is None
        else:
            assert (shape.shape, shape.dtype, shape.stride()) == (
                tensor.shape,
                tensor.dtype,
                tensor.stride(),
            )
