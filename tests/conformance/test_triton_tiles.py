"""Runs the Triton kernels with tiles as small as on a GPU, or smaller. In the interpreter, the
default tiles are larger, so most tensors of this suite fit in one tile."""

import importlib

import pytest
import torch
from conftest import BACKENDS
from oracle.payload import Geometry

from conformance import calls, patch_calls, samples

pytestmark = pytest.mark.skipif("triton" not in BACKENDS, reason="no Triton, or another backend")

NUMEL = 2 * 16384 + 9
TILES = {
    "mask_pack": {"TILE": 4096, "CHUNK": 4},
    "scatter_unpack": {"ENTRIES": 256, "ELEMENTS": 4096},
    "sample_threshold": {"PICKS": 256, "PROGRAMS": 4, "PER_RANGE": 1},
    "_patch": {"CHUNK": 2},
}


@pytest.fixture
def triton(monkeypatch):
    for op, sizes in TILES.items():
        for name, size in sizes.items():
            # By module path, because the package's attribute of this name is the function.
            monkeypatch.setattr(importlib.import_module(f"dct_kernels.triton.{op}"), name, size)
    return BACKENDS["triton"]


@pytest.mark.parametrize(
    ("ranges", "threshold", "value_dtype", "non_finite"),
    [(1, [0.5], torch.float32, True), (2, [0.5, -1.0], torch.bfloat16, False)],
)
def test_mask_pack(triton, ranges, threshold, value_dtype, non_finite):
    residual = samples.hard(NUMEL, non_finite=non_finite)
    grad = samples.hard(NUMEL, seed=1, non_finite=non_finite)
    packed = calls.mask_pack(
        triton, residual, grad, threshold, 6000, value_dtype=value_dtype, ranges=ranges
    )
    assert packed.contents[0].count == 6000  # the capacity is reached within a block


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16])
def test_scatter_unpack(triton, out_dtype):
    geometry = Geometry(NUMEL, 3000, "bfloat16")
    pool = samples.hard(5000, torch.bfloat16)
    payloads = [calls.random_payload(geometry, 0.05, seed, pool) for seed in range(3)]
    calls.scatter_unpack(triton, payloads, geometry, out_dtype, 0.25)


@pytest.mark.parametrize("max_samples", [3000, NUMEL])
def test_sample_threshold(triton, max_samples):
    grad, residual = samples.hard(NUMEL), samples.normal(NUMEL)
    calls.sample_threshold(triton, grad, residual, 0.01, 2, max_samples=max_samples, seed=3)


def test_patches(triton):
    old = samples.hard(4 * 4096 + 9, torch.bfloat16)
    sent, _ = patch_calls.diff_pack(triton, patch_calls.changed(old, 0.1), old)
    assert patch_calls.patch_apply(triton, sent, old)[0] == 0
    for block in range(5):
        raw = bytearray(sent)
        raw[64 + 4 * block] ^= 1  # a wrong number in any of the three chunks
        assert patch_calls.patch_apply(triton, raw, old)[0] in (2, 4)


@pytest.mark.parametrize(
    ("version", "capability", "valid"),
    [("3.6.0", 9, True), ("3.6.2", 10, False), ("3.7.0", 10, True), ("3.10.1", 12, True)],
)
def test_an_assembler_that_fuses_multiply_adds_is_refused(monkeypatch, version, capability, valid):
    launcher = importlib.import_module("dct_kernels.triton._launch")
    monkeypatch.setattr(launcher.triton, "__version__", version)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    require = launcher._require_sound_assembler.__wrapped__
    if valid:
        require(torch.device("cuda"))
    else:
        with pytest.raises(RuntimeError, match=f"triton must be >= 3.7 .*, got {version}"):
            require(torch.device("cuda"))
