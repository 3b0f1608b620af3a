"""torch.compile(fullgraph=True): equal results and mutations, one compilation for all sizes."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from conformance import samples
from dct_kernels import (
    checksum,
    dequantize_sum,
    diff_pack,
    mask_pack,
    patch_apply,
    patch_bytes,
    patch_check,
    payload_layout,
    quantize_pack,
    quantized_payload_bytes,
    row_dequantize,
    row_dequantize_sum,
    row_gather,
    row_pack,
    row_quantize,
    row_unpack,
    sample_threshold,
    scatter_unpack,
)
from dct_kernels.row_layout import FORMATS


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step(residual, grad, payload, seen, out, capacity):
    """A data-parallel step of one rank with all three sparse ops."""
    threshold = sample_threshold(grad, residual, 0.02, payload.shape[0], max_samples=100)
    mask_pack(residual, grad, threshold, payload, seen, capacity, torch.bfloat16)
    status = scatter_unpack(payload.unsqueeze(0), out, capacity, torch.bfloat16, 0.5)
    return threshold, status, residual + out


def step_arguments(numel, capacity, ranges=2):
    nbytes = payload_layout(numel, capacity, torch.bfloat16, ranges).nbytes
    return (
        samples.normal(numel),
        samples.normal(numel, torch.bfloat16, seed=1),
        torch.zeros(ranges, nbytes, dtype=torch.uint8),
        torch.zeros(ranges, dtype=torch.int32),
        torch.zeros(numel),
        capacity,
    )


def exchange(residual, grad, payload, out, format):
    """A dense exchange: each rank packs, the owner sums and repacks, and each rank decodes."""
    quantize_pack(residual, grad, payload, format)
    status = dequantize_sum(payload.unsqueeze(0), out, format, 0.5)
    quantize_pack(None, out, payload, format)
    return status, residual + out


def exchange_arguments(*shape, format="ternary"):
    nbytes, numel = quantized_payload_bytes(shape[-1], format), torch.Size(shape).numel()
    payload = torch.zeros(*shape[:-1], nbytes, dtype=torch.uint8)
    residual, grad = samples.normal(numel), samples.normal(numel, torch.bfloat16, seed=1)
    return residual.view(shape), grad.view(shape), payload, torch.empty(shape), format


def update(weights, snapshot, patch, checksums, capacity):
    """A publisher packs its changes, and a receiver with the same snapshot applies them."""
    diff_pack(weights, snapshot, patch, checksums, capacity)
    status = patch_check(patch, snapshot.numel(), snapshot.dtype) | patch_apply(patch, snapshot)
    return status, checksum(snapshot)


def update_arguments(numel, capacity):
    weights, snapshot = samples.normal(numel), samples.normal(numel, torch.float16)
    patch = torch.zeros(patch_bytes(numel, capacity), dtype=torch.uint8)
    return weights, snapshot, patch, torch.zeros(2, dtype=torch.int64), capacity


def rows(x, grad, k):
    """Pack, unpack, and the gather of the backward pass."""
    values, positions = row_pack(x, k, torch.bfloat16)
    y = row_unpack(values, positions, x.shape[1], torch.float32)
    gathered = row_gather(grad, positions, k, torch.bfloat16)
    return values, positions, y, gathered


def rows_arguments(batch, width, k):
    x, grad = (samples.normal(batch * width, seed=s).view(batch, width) for s in (0, 1))
    return x, grad, k


def quantized_rows(x):
    results, width = [], x.shape[1]
    for format in FORMATS:
        rows = row_quantize(torch.relu(x), format)
        results.append(row_dequantize(rows, width, format, torch.bfloat16))
        messages = rows.view(x.shape[0] // 5, 5, rows.shape[1])  # of 5 rows each
        results.append(row_dequantize_sum(messages, width, format, torch.bfloat16))
    return results


# All cases have the same encoding, because the shape of `positions` depends on the encoding.
ROWS = [(5, 64, 3), (31, 128, 7), (8, 250, 20), (100, 99, 2)]
SIZES = {
    step: [step_arguments(*sizes) for sizes in [(5000, 100), (40000, 300, 3), (999, 3, 5)]],
    exchange: [exchange_arguments(numel) for numel in (5000, 20000, 50021, 999)],
    update: [update_arguments(*sizes) for sizes in [(5000, 20000), (9000, 5), (4096, 8200)]],
    rows: [rows_arguments(*sizes) for sizes in ROWS],
    quantized_rows: [rows_arguments(5 * ranks, 63 + ranks, 1)[:1] for ranks in (3, 2, 20, 7)],
}


@pytest.mark.parametrize("function", SIZES)
def test_one_compilation_for_every_size(function):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    first, *others = SIZES[function]
    assert_same(compiled, function, first)
    compilations = counter.frame_count  # not always 1, because dynamo may retry
    for args in others:
        assert_same(compiled, function, args)
    assert counter.frame_count == compilations


def assert_same(compiled, function, args):
    """Compare results and every mutated tensor."""
    eager_args = tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)
    expected = function(*eager_args)
    actual = compiled(*args)
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)
    for a, e in zip(args, eager_args, strict=True):
        assert torch.equal(a, e) if isinstance(a, torch.Tensor) else a == e


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (step, step_arguments(40000, 300)),
        (exchange, exchange_arguments(20000, format="int4")),
        (exchange, exchange_arguments(3, 999, format="int4")),
        (update, update_arguments(5000, 11000)),
    ],
)
def test_inductor(function, args):
    """Mutations are in order and in place, although AOTAutograd functionalizes them first."""
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="inductor")
    assert_same(compiled, function, args)


def test_density_as_a_dynamic_argument():
    """Dynamo makes the density symbolic, so the checks of the density must be traceable."""
    compiled = torch.compile(sample_threshold, fullgraph=True, dynamic=True, backend="aot_eager")
    grad, residual = samples.normal(1000), samples.normal(1000, seed=1)
    for density in (0.01, 0.5, 1.0):
        expected = sample_threshold(grad, residual, density)
        assert torch.equal(compiled(grad, residual, density), expected)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_forward_and_backward(backend):
    """Inductor generates kernels around the ops. It must not reuse a buffer that backward needs."""

    def model(x, k):
        values, positions = row_pack(torch.tanh(x), k, torch.float32)
        return row_unpack(2 * values, positions, x.shape[1], torch.float32).square().sum()

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    x = (torch.arange(256.0).view(4, 64) % 37) / 8 - 2
    gradients = []
    for function in (model, compiled):
        leaf = x.clone().requires_grad_()
        function(leaf, 5).backward()
        gradients.append(leaf.grad)
    # Inductor's tanh differs slightly from torch's, so gradients are close and not equal.
    torch.testing.assert_close(gradients[1], gradients[0])
    assert torch.equal(gradients[1] != 0, gradients[0] != 0)


def test_invalid_arguments_raise_while_tracing():
    def wrong(x):
        return row_pack(x, 99, torch.float32)

    with pytest.raises(Exception, match=r"dct::row_pack: k must be in \[1, 10\], got 99"):
        torch.compile(wrong, fullgraph=True, backend="aot_eager")(torch.ones(3, 10))
