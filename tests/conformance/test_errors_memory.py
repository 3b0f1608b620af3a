"""Arguments that share memory, are on another device, or have a wrong Python type."""

import pytest
import torch

import dct_kernels
from conformance.arguments import (
    BF16,
    F16,
    F32,
    I32,
    I64,
    NBYTES,
    NUMEL,
    OPS,
    PATCH_BYTES,
    QUANTIZED_BYTES,
    U8,
    arguments,
    placed,
    raises,
    refused,
)
from dct_kernels.layout import HEADER, MAGIC

# (op, argument that the error names, {argument: (dtype, first byte, elements) in one buffer}).
VECTOR = (F32, 0, NUMEL)
ROW = (U8, 384, QUANTIZED_BYTES)
HALF, PATCH = (BF16, 64, NUMEL), (U8, 0, PATCH_BYTES)
OVERLAPS = [
    ("mask_pack", "grad", {"residual": VECTOR, "grad": VECTOR}),
    ("mask_pack", "grad", {"residual": VECTOR, "grad": (F32, 4 * NUMEL - 4, NUMEL)}),
    ("mask_pack", "payload", {"residual": VECTOR, "payload": (U8, 384, 2 * NBYTES)}),
    ("mask_pack", "grad", {"payload": (U8, 384, 2 * NBYTES), "grad": VECTOR}),
    ("mask_pack", "seen", {"residual": VECTOR, "seen": (I32, 4 * NUMEL - 4, 2)}),
    ("mask_pack", "threshold", {"seen": (I32, 0, 2), "threshold": (F32, 4, 2)}),
    ("mask_pack", "inv_scale", {"residual": VECTOR, "inv_scale": (F32, 200, 1)}),
    ("mask_pack", "threshold", {"payload": (U8, 0, 2 * NBYTES), "threshold": (F32, 64, 2)}),
    ("scatter_unpack", "payloads", {"out": VECTOR, "payloads": (U8, 384, 2 * NBYTES)}),
    ("scatter_unpack", "out_scale", {"out": VECTOR, "out_scale": (F32, 4 * NUMEL - 4, 1)}),
    ("quantize_pack", "grad", {"residual": VECTOR, "grad": VECTOR}),
    ("quantize_pack", "payload", {"residual": VECTOR, "payload": ROW}),
    ("quantize_pack", "inv_scale", {"residual": VECTOR, "inv_scale": (F32, 200, 1)}),
    ("quantize_pack", "grad", {"payload": ROW, "grad": VECTOR}),
    ("quantize_pack", "inv_scale", {"payload": ROW, "inv_scale": (F32, 400, 1)}),
    ("dequantize_sum", "payloads", {"out": VECTOR, "payloads": (U8, 384, 2 * QUANTIZED_BYTES)}),
    ("dequantize_sum", "out_scale", {"out": VECTOR, "out_scale": (F32, 4 * NUMEL - 4, 1)}),
    ("diff_pack", "weights", {"weights": VECTOR, "patch": (U8, 384, PATCH_BYTES)}),
    ("diff_pack", "snapshot", {"snapshot": HALF, "patch": PATCH}),
    ("diff_pack", "checksums", {"checksums": (I64, 8, 2), "patch": PATCH}),
    ("diff_pack", "snapshot", {"snapshot": HALF, "checksums": (I64, 64 + 2 * NUMEL - 8, 2)}),
    ("diff_pack", "weights", {"weights": VECTOR, "checksums": (I64, 0, 2)}),
    ("patch_apply", "patch", {"weights": HALF, "patch": PATCH}),
]


def sharing(op, windows, device="cpu"):
    """Valid arguments; the arguments named in `windows` share one buffer."""
    memory = torch.zeros(4096, dtype=U8, device=device)
    args = {name: placed(value, device) for name, value in arguments(op).items()}
    for name, (dtype, start, count) in windows.items():
        window = memory[start : start + count * dtype.itemsize].view(dtype).view(args[name].shape)
        args[name] = window.copy_(args[name])
    return args


@pytest.mark.parametrize(("op", "named", "windows"), OVERLAPS)
def test_overlapping_arguments(backend, op, named, windows):
    refused(backend, op, sharing(op, windows, backend.device), named, ValueError)


def test_adjacent_arguments_do_not_overlap(backend):
    end = 4 * NUMEL
    windows = {"residual": VECTOR, "grad": (F32, end, NUMEL), "seen": (I32, 2 * end, 2)}
    windows |= {"threshold": (F32, 2 * end + 8, 2), "payload": (U8, 2 * end + 16, 2 * NBYTES)}
    args = sharing("mask_pack", windows, backend.device)
    backend.mask_pack(**args)
    assert args["seen"].tolist() == [NUMEL, 0]


def test_read_only_arguments_may_share_memory(backend):
    args = sharing("sample_threshold", {"grad": VECTOR, "residual": VECTOR}, backend.device)
    assert backend.sample_threshold(**args)[0] == 0


def test_payload_and_grad_must_not_overlap_without_a_residual(backend):
    args = sharing("quantize_pack", {"payload": ROW, "grad": VECTOR}, backend.device)
    refused(backend, "quantize_pack", args | {"residual": None}, "grad", ValueError)


DEVICES = [
    ("sample_threshold", "grad", ("residual", "inv_scale")),
    ("mask_pack", "residual", ("grad", "threshold", "payload", "seen", "inv_scale")),
    ("scatter_unpack", "out", ("payloads", "out_scale")),
    ("quantize_pack", "payload", ("residual", "grad", "inv_scale")),
    ("dequantize_sum", "out", ("payloads", "out_scale")),
    ("row_gather", "x", ("positions",)),
    ("row_unpack", "values", ("positions",)),
    ("diff_pack", "snapshot", ("weights", "patch", "checksums")),
    ("patch_apply", "weights", ("patch",)),
]


@pytest.mark.parametrize(("op", "first", "others"), DEVICES)
def test_arguments_on_two_devices(op, first, others):
    for other in others:
        args = arguments(op)
        args[other] = args[other].to("meta")
        text = raises(getattr(dct_kernels, op), args, op, other, ValueError)
        assert text == f"dct::{op}: {other} must be on cpu like {first}, got meta"


# tests/test_arguments.py tries None, lists and other objects for every argument.
WRONG_TYPES = [
    ("sample_threshold", [("density", "0.1"), ("max_samples", 1.0), ("max_samples", True)]),
    ("mask_pack", [("capacity", 10.0), ("value_dtype", "float32"), ("inv_scale", 0.5)]),
    ("quantize_pack", [("residual", 1.0), ("format", 8), ("inv_scale", 0.5)]),
    ("row_pack", [("x", [[1.0]]), ("k", 4.0), ("k", False)]),
    ("diff_pack", [("checksums", 1), ("capacity", 1.0)]),
    ("patch_check", [("numel", 1.0), ("dtype", "bfloat16")]),
    ("row_dequantize_sum", [("width", "50"), ("format", 8), ("dtype", "float32")]),
]


@pytest.mark.parametrize(("op", "cases"), WRONG_TYPES)
def test_wrong_python_types(op, cases):
    for arg, value in cases:
        raises(getattr(dct_kernels, op), arguments(op) | {arg: value}, op, arg, TypeError)


@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr"])
@pytest.mark.parametrize("entry", [dct_kernels, torch.ops.dct], ids=["public", "raw"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_tensors_raise(entry, layout):
    args = arguments("row_pack")
    sparse = args["x"].to_sparse(layout=getattr(torch, layout))
    with pytest.raises(TypeError) as caught:
        entry.row_pack(**args | {"x": sparse})
    assert str(caught.value) == f"dct::row_pack: x must be dense, got {layout}"


SIZES = [
    ("payload_layout", {"numel": 10, "capacity": 5, "value_dtype": F32, "ranges": 1}),
    ("quantized_payload_bytes", {"numel": 10, "format": "int8", "ranges": 1}),
    ("patch_bytes", {"numel": 10, "capacity": 5}),
]
WRONG_SIZES = [("numel", -1, ValueError), ("numel", 1.0, TypeError), ("capacity", 0, ValueError)]
WRONG_SIZES += [("capacity", 2**32, ValueError), ("ranges", 0, ValueError)]
WRONG_SIZES += [("ranges", None, TypeError), ("value_dtype", F16, TypeError)]
WRONG_SIZES += [("value_dtype", "float32", TypeError)]
WRONG_SIZES += [("format", "sign", ValueError), ("format", F32, TypeError)]


@pytest.mark.parametrize(("name", "valid"), SIZES)
def test_wrong_arguments_of_payload_sizes(name, valid):
    for arg, value, error in WRONG_SIZES:
        if arg in valid:
            raises(getattr(dct_kernels, name), valid | {arg: value}, name, arg, error)


def test_payload_info_checks_shape_and_dtype():
    for shape, dtype in [(63, U8), ((2, 64), U8), (64, F32), (64, U8)]:
        args = {"payload": torch.zeros(shape, dtype=dtype)}
        raises(dct_kernels.payload_info, args, "payload_info", "payload", ValueError)
        raises(
            dct_kernels.patch_info, {"patch": args["payload"]}, "patch_info", "patch", ValueError
        )


@pytest.mark.parametrize(("version", "code"), [(2, 3), (3, 4), (4, 2), (1, 4), (5, 1)])
def test_payload_info_names_the_versions_that_it_reads(version, code):
    """Versions 2 and 3 are no longer supported, and their numbers are not reused."""
    raw = HEADER.pack(MAGIC, version, code, 0, 9, 5, 0, bytes(40))
    header = torch.frombuffer(bytearray(raw), dtype=U8)
    with pytest.raises(ValueError, match=r"version 1 or 4 \(patch_info reads 5; 2 and 3"):
        dct_kernels.payload_info(header)


@pytest.mark.parametrize("op", OPS)
def test_valid_arguments_are_accepted(backend, op):
    """If valid arguments raised errors, the tests above could pass for the wrong reason."""
    args = {name: placed(value, backend.device) for name, value in arguments(op).items()}
    getattr(backend, op)(**args)
    getattr(dct_kernels, op)(**arguments(op))
