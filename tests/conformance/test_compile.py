"""torch.compile(fullgraph=True): equal results, equal writes, one compilation for all sizes."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from conformance import samples
from dct_kernels import (
    dequantize_sum,
    dequantize_sum_pack,
    mask_pack,
    payload_layout,
    quantize_pack,
    quantized_payload_bytes,
    row_dequantize,
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


def step(residual, grad, segments, payload, seen, out, capacity):
    """A whole data-parallel step of one rank: all three 1-D ops, all their writes."""
    threshold = sample_threshold(grad, residual, segments, 0.02, max_samples=100)
    mask_pack(residual, grad, segments, threshold, payload, seen, capacity, torch.bfloat16)
    status = scatter_unpack(payload.unsqueeze(0), out, capacity, torch.bfloat16, 0.5)
    return threshold, status, residual + out


def test_a_density_that_is_an_argument():
    """Dynamo makes it symbolic: the checks must be traceable, and still check."""
    compiled = torch.compile(sample_threshold, fullgraph=True, dynamic=True)
    x, segments = samples.normal(1000), torch.tensor([0, 1000])
    for density in (0.01, 0.5, 1.0):
        expected = sample_threshold(x, None, segments, density)
        assert torch.equal(compiled(x, None, segments, density), expected)


def step_arguments(numel, capacity, count):
    nbytes = payload_layout(numel, capacity, torch.bfloat16).nbytes
    return (
        samples.normal(numel),
        samples.normal(numel, torch.bfloat16, seed=1),
        samples.segments(numel, count),
        torch.zeros(nbytes, dtype=torch.uint8),
        torch.zeros(count, dtype=torch.int32),
        torch.zeros(numel),
        capacity,
    )


def rows(x, grad, k):
    """Pack, unpack and the backward pass of both."""
    values, positions = row_pack(x, k, torch.bfloat16)
    y = row_unpack(values, positions, x.shape[1], torch.float32)
    back = row_gather(grad, positions, k, torch.bfloat16)
    return values, positions, y, back


def assert_one_compilation(function, calls):
    """Each of the calls does as eager does, and only the first one compiles."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    first, *others = calls
    assert_same(compiled, function, first)
    compilations = counter.frame_count  # not always 1: dynamo may try twice before it is done
    for args in others:
        assert_same(compiled, function, args)
    assert counter.frame_count == compilations


def assert_same(compiled, function, args):
    """Results and every written tensor."""
    eager_args = tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)
    expected = function(*eager_args)
    actual = compiled(*args)
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)
    for a, e in zip(args, eager_args, strict=True):
        assert torch.equal(a, e) if isinstance(a, torch.Tensor) else a == e


def test_a_step_compiles_once_for_every_size():
    sizes = [(5000, 100, 4), (20000, 300, 9), (50021, 77, 5), (999, 3, 2)]
    assert_one_compilation(step, [step_arguments(*size) for size in sizes])


def test_row_ops_compile_once_for_every_size():
    """As long as the encoding is the same one: it decides a shape."""
    calls = []
    for batch, width, k in [(5, 64, 3), (31, 128, 7), (8, 250, 20), (100, 99, 2)]:
        x, grad = (samples.normal(batch * width, seed=s).view(batch, width) for s in (0, 1))
        calls.append((x, grad, k))
    assert_one_compilation(rows, calls)


@pytest.mark.parametrize("format", FORMATS)
def test_quantized_rows_compile_once_for_every_size(format):
    def exchange(x, dtype):
        return row_dequantize(row_quantize(torch.relu(x), format), x.shape[1], format, dtype)

    calls = [
        (samples.normal(rows * width).view(rows, width), torch.bfloat16)
        for rows, width in [(5, 64), (31, 129), (8, 250), (100, 99)]
    ]
    assert_one_compilation(exchange, calls)


def exchange_all(residual, grad, payload, owned, out, format):
    """Every entry there and back: packed, summed and packed by its owner, summed by all."""
    quantize_pack(residual, grad, payload, format)
    damage = dequantize_sum_pack(payload.unsqueeze(0), owned, payload.clone(), format, 0.5)
    status = dequantize_sum(payload.unsqueeze(0), out, format, 0.5)
    quantize_pack(None, out, payload, format, None, status)
    return damage, status, residual + out


def exchange_arguments(numel, format):
    payload = torch.zeros(quantized_payload_bytes(numel, format), dtype=torch.uint8)
    residual, grad = samples.normal(numel), samples.normal(numel, torch.bfloat16, seed=1)
    return residual, grad, payload, torch.ones(numel), torch.empty(numel), format


@pytest.mark.parametrize("format", ["bfloat16", "ternary"])
def test_every_entry_compiles_once_for_every_size(format):
    """With a residual, and without one."""
    sizes = (5000, 20000, 50021, 999)
    assert_one_compilation(exchange_all, [exchange_arguments(size, format) for size in sizes])


def test_inductor_runs_an_exchange_of_every_entry():
    compiled = torch.compile(exchange_all, fullgraph=True, dynamic=True, backend="inductor")
    assert_same(compiled, exchange_all, exchange_arguments(20000, "int4"))


def test_without_a_gradient_and_into_ranges():
    def send(residual, segments, threshold, payload, seen, out, capacity):
        mask_pack(residual, None, segments, threshold, payload, seen, capacity, torch.float32)
        status = scatter_unpack(payload.unsqueeze(0), out, capacity, torch.float32)
        return status, seen.sum()

    calls = []
    for numel, capacity in [(40000, 50), (70001, 90)]:
        nbytes = payload_layout(numel, capacity, torch.float32, ranges=2).nbytes
        payload = torch.zeros(2, nbytes, dtype=torch.uint8)
        seen, segments = torch.zeros(1, dtype=torch.int32), torch.tensor([0, numel])
        residual, out = samples.normal(numel), torch.zeros(numel)
        calls.append((residual, segments, torch.tensor([2.0]), payload, seen, out, capacity))
    assert_one_compilation(send, calls)
    assert all(seen.item() > 0 for _, _, _, _, seen, _, _ in calls)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_forward_and_backward(backend):
    """Here Inductor compiles for real; x is used before and after, so nothing may be reused."""

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
    # Inductor's tanh is not torch's, so values are close; the mask is the same one.
    torch.testing.assert_close(gradients[1], gradients[0])
    assert torch.equal(gradients[1] != 0, gradients[0] != 0)


def test_inductor_runs_a_whole_step():
    """Writes happen in order and in place, though Inductor functionalises them first."""
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="inductor")
    assert_same(compiled, step, step_arguments(20000, 300, 9))


def test_checks_hold_while_tracing():
    def wrong(x):
        return row_pack(x, 99, torch.float32)

    with pytest.raises(Exception, match=r"dct::row_pack: k must be in \[1, 10\], got 99"):
        torch.compile(wrong, fullgraph=True, backend="aot_eager")(torch.ones(3, 10))
