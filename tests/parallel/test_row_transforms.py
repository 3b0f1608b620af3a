"""torch.func, torch.compile and torch.export with the functions and modules for rows."""

from functools import partial

import pytest
import torch
from torch.autograd import forward_ad

from dct_parallel import (
    RowDequantize,
    RowFormat,
    RowPack,
    RowQuantize,
    RowUnpack,
    all_gather_rows,
    all_to_all_rows,
    pack_rows,
    unpack_rows,
)
from dct_parallel.formats import ROW_FORMATS
from support.ranks import on_ranks

WIDTH = 32
INT4_SIGN = RowFormat("int4", backward="sign")


def _functions(x):
    return unpack_rows(*pack_rows(x, 4, torch.bfloat16), WIDTH, torch.float32)


def _pack_modules(x):
    return RowUnpack(WIDTH)(*RowPack(0.1)(x))


def _quantize_modules(x, format=INT4_SIGN):
    return RowDequantize(WIDTH, format)(RowQuantize(format)(x))


ROUND_TRIPS = [_functions, _pack_modules, _quantize_modules]
ROUND_TRIPS += [partial(_quantize_modules, format=format) for format in ROW_FORMATS]


def _loss(y):
    return (y.sin() * torch.arange(y.shape[-1])).sum()


def _autograd(function, x):
    x = x.clone().requires_grad_()
    y = function(x)
    _loss(y).backward()
    return y.detach(), x.grad


@pytest.mark.parametrize("round_trip", ROUND_TRIPS)
def test_grad_and_vjp_equal_autograd(round_trip):
    x = torch.randn(2, 3, WIDTH)
    y, gradient = _autograd(round_trip, x)
    assert gradient.count_nonzero() > 0
    assert torch.equal(torch.func.grad(lambda x: _loss(round_trip(x)))(x), gradient)
    result, pull_back = torch.func.vjp(round_trip, x)
    (cotangent,) = torch.func.vjp(_loss, result)[1](torch.tensor(1.0))
    assert torch.equal(result, y) and torch.equal(*pull_back(cotangent), gradient)


@pytest.mark.parametrize("round_trip", ROUND_TRIPS)
def test_compiles_without_a_graph_break(round_trip):
    torch._dynamo.reset()
    x = torch.randn(2, 3, WIDTH)
    y, gradient = _autograd(round_trip, x)
    found = _autograd(torch.compile(round_trip, backend="aot_eager", fullgraph=True), x)
    assert torch.equal(found[0], y) and torch.equal(found[1], gradient)


@pytest.mark.parametrize("round_trip", ROUND_TRIPS)
def test_exports_with_dynamic_sizes(round_trip):
    class Model(torch.nn.Module):
        def forward(self, x):
            return round_trip(x)

    sizes = {dim: torch.export.Dim(name, min=2, max=99) for dim, name in enumerate("ab")}
    exported = torch.export.export(Model(), (torch.randn(2, 3, WIDTH),), dynamic_shapes=(sizes,))
    x = torch.randn(5, 4, WIDTH)
    assert torch.equal(exported.module()(x), round_trip(x))


@pytest.mark.parametrize("exchange", [all_to_all_rows, all_gather_rows])
def test_compiled_exchanges_run_eagerly(one_rank, exchange):
    counts = ([4], [4]) if exchange is all_to_all_rows else ([WIDTH],)

    def round_trip(x):
        return exchange(x + 1, *counts, format=INT4_SIGN) * 2

    class Model(torch.nn.Module):
        def forward(self, x):
            return round_trip(x)

    torch._dynamo.reset()
    x = torch.randn(4, WIDTH)
    y, gradient = _autograd(round_trip, x)
    found = _autograd(torch.compile(round_trip, backend="aot_eager"), x)
    assert torch.equal(found[0], y) and torch.equal(found[1], gradient)
    rule = f"dct::{exchange.__name__}: the exchange must run eagerly"
    with pytest.raises(Exception, match=rf"{rule} \(torch.compile without fullgraph=True"):
        torch.compile(round_trip, backend="aot_eager", fullgraph=True)(x)
    with pytest.raises(RuntimeError, match=f"{rule}, got torch.export"):
        torch.export.export(Model(), (x,))
    for call in (round_trip, torch.func.grad(lambda x: _loss(round_trip(x)))):
        with pytest.raises(RuntimeError, match=f"{rule}, got torch.func.functionalize"):
            torch.func.functionalize(call)(x)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_transforms_of_quantized_rows_raise_inside_torch_compile(transform):
    """Without this error, dynamo would return a wrong gradient."""
    torch._dynamo.reset()
    call = transform(lambda x: _loss(_quantize_modules(x)))
    text = "dct::RowQuantize: the call must be outside of torch.func inside torch.compile"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=text):
        torch.compile(call, backend="aot_eager", fullgraph=True)(torch.randn(2, WIDTH))


@pytest.mark.parametrize("dim", [0, 1])
def test_vmap_of_quantized_rows(dim):
    x = torch.randn(3, 4, WIDTH)
    _, gradient = _autograd(_quantize_modules, x)
    per_sample = torch.func.vmap(torch.func.grad(lambda x: _loss(_quantize_modules(x))), dim, dim)
    assert torch.equal(per_sample(x), gradient)
    jacobian = torch.func.jacrev(_quantize_modules)(x[0, 0])  # vmap of only the backward pass
    one_hot = RowDequantize(WIDTH, "sign")(RowQuantize("sign")(torch.eye(WIDTH)))
    assert torch.equal(jacobian, one_hot)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_second_derivatives_and_forward_mode_of_quantized_rows_raise():
    x = torch.randn(2, WIDTH)

    def gradient(x):
        return torch.func.grad(lambda x: _loss(_quantize_modules(x)))(x).sum()

    text = "dct::Row(Deq|Q)uantize: the gradient must not be differentiated"
    with pytest.raises(RuntimeError, match=text):
        torch.func.grad(gradient)(x)
    y = x.clone().requires_grad_()
    (once,) = torch.autograd.grad(_loss(_quantize_modules(y)), y, create_graph=True)
    with pytest.raises(RuntimeError, match=text):
        once.sum().backward()
    text = "dct::RowQuantize: the input must have no tangent"
    with pytest.raises(ValueError, match=text):
        torch.func.jvp(_quantize_modules, (x,), (x,))
    with forward_ad.dual_level(), pytest.raises(ValueError, match=text):
        _quantize_modules(forward_ad.make_dual(x, x))


@pytest.mark.parametrize("format", [RowFormat(density=0.25), INT4_SIGN], ids=str)
@on_ranks(2)
def test_exchanges_with_torch_func(rank, format):
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))
    for exchange in (
        lambda x: all_to_all_rows(x, [1, 3], format=format),
        lambda x: all_gather_rows(x, format=format),
    ):
        y, gradient = _autograd(exchange, x)
        assert torch.equal(torch.func.grad(lambda x: _loss(exchange(x)))(x), gradient)  # noqa: B023
        result, pull_back = torch.func.vjp(exchange, x)
        (cotangent,) = torch.func.vjp(_loss, result)[1](torch.tensor(1.0))
        assert torch.equal(result, y) and torch.equal(*pull_back(cotangent), gradient)
        with pytest.raises(ValueError, match="_rows: the input must be a single tensor"):
            torch.func.vmap(exchange)(x[None])
        y = x.clone().requires_grad_()
        (once,) = torch.autograd.grad(_loss(exchange(y)), y, create_graph=True)
        with pytest.raises(RuntimeError, match="_rows: the gradient must not be differ"):
            once.sum().backward()
