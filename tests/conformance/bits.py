"""Converts tensors for the oracle, and compares results bit for bit."""

import numpy as np
import torch
from oracle import floats

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
PAYLOAD_VALUES = (torch.float32, torch.bfloat16)
_INTEGER = {2: torch.int16, 4: torch.int32}


def name(dtype):
    return str(dtype).removeprefix("torch.")


def raw(tensor):
    """Raw bits of a float tensor, as numpy unsigned integers."""
    integers = tensor.detach().cpu().contiguous().view(_INTEGER[tensor.dtype.itemsize])
    return integers.numpy().view(floats.BITS[name(tensor.dtype)])


def numbers(tensor):
    """A float tensor (or None) as float32 numbers."""
    return None if tensor is None else floats.widen(raw(tensor), name(tensor.dtype))


def from_raw(bits, dtype):
    """The tensor of `dtype` with these raw bits."""
    bits = np.ascontiguousarray(bits, floats.BITS[name(dtype)])
    return torch.from_numpy(bits.view(f"int{8 * dtype.itemsize}").copy()).view(dtype)


def assert_equal(actual, expected, what):
    """Fail unless the arrays are equal; show the first difference in hexadecimal."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, not {expected.shape}"
    different = np.argwhere(actual != expected)
    if len(different):
        at = tuple(int(i) for i in different[0])
        raise AssertionError(
            f"{what}: {len(different)} of {actual.size} differ, first at {list(at)}: "
            f"{int(actual[at]):#x}, expected {int(expected[at]):#x}"
        )


def assert_floats(actual, expected_bits, what, any_nan=False):
    """Fail unless a tensor has these raw bits; with `any_nan`, all NaNs are equal."""
    dtype, bits = name(actual.dtype), raw(actual)
    if any_nan:
        bits, expected_bits = _one_nan(bits, dtype), _one_nan(expected_bits, dtype)
    assert_equal(bits, expected_bits, what)


def _one_nan(bits, dtype):
    return np.where(np.isnan(floats.widen(bits, dtype)), floats.NAN[dtype], bits)
