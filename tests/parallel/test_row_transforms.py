"""torch.compile, torch.export and torch.func with the functions and modules for rows."""

from functools import partial

import pytest
import torch

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


TRANSFORMS = {
    "vjp": lambda f: lambda x: torch.func.vjp(f, x),
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x,)),
    "vmap": torch.func.vmap,
    "functionalize": torch.func.functionalize,
}


def _loss(y):
    return (y.sin() * torch.arange(y.shape[-1])).sum()


def _autograd(function, x):
    x = x.clone().requires_grad_()
    y = function(x)
    _loss(y).backward()
    return y.detach(), x.grad


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
    for transform in TRANSFORMS.values():
        with pytest.raises(RuntimeError, match=f"{rule}, got a transform of torch.func"):
            transform(round_trip)(x)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_of_quantized_rows_raise(transform, compiled):
    """Without this error, dynamo would return a wrong gradient."""
    torch._dynamo.reset()
    call = transform(_quantize_modules)
    call = torch.compile(call, backend="aot_eager") if compiled else call
    text = "dct::RowQuantize: the call must be outside of torch.func"
    with pytest.raises(ValueError, match=text):
        call(torch.randn(2, WIDTH))


@on_ranks(2)
def test_second_derivatives_raise(rank):
    def all_to_all(x):
        return all_to_all_rows(x, [1, 3], format=INT4_SIGN)

    def all_gather(x):
        return all_gather_rows(x, format=RowFormat(density=0.25))

    for function in (_quantize_modules, all_to_all, all_gather):
        x = torch.randn(4, WIDTH, requires_grad=True)
        (once,) = torch.autograd.grad(_loss(function(x)), x, create_graph=True)
        with pytest.raises(RuntimeError, match="the gradient must not be differentiated"):
            once.sum().backward()
