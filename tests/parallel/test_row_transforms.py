"""torch.func and torch.compile through the functions and modules for rows."""

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
from ranks import on_ranks

WIDTH = 32
FEW_BITS = RowFormat("int4", backward="sign")


def _functions(x):
    return unpack_rows(*pack_rows(x, 4, torch.bfloat16), WIDTH, torch.float32)


def _pack_modules(x):
    return RowUnpack(WIDTH)(*RowPack(0.1)(x))


def _quantize_modules(x):
    return RowDequantize(WIDTH, FEW_BITS)(RowQuantize(FEW_BITS)(x))


CUTS = [_functions, _pack_modules, _quantize_modules]


def _loss(y):
    return (y.sin() * torch.arange(y.shape[-1])).sum()


def _autograd(function, x):
    x = x.clone().requires_grad_()
    y = function(x)
    _loss(y).backward()
    return y.detach(), x.grad


@pytest.mark.parametrize("cut", CUTS)
def test_grad_and_vjp_equal_autograd(cut):
    x = torch.randn(2, 3, WIDTH)
    y, gradient = _autograd(cut, x)
    assert gradient.count_nonzero() > 0
    assert torch.equal(torch.func.grad(lambda x: _loss(cut(x)))(x), gradient)
    result, pull_back = torch.func.vjp(cut, x)
    (cotangent,) = torch.func.vjp(_loss, result)[1](torch.tensor(1.0))
    assert torch.equal(result, y) and torch.equal(*pull_back(cotangent), gradient)


@pytest.mark.parametrize("cut", CUTS)
def test_compiled_without_a_graph_break(cut):
    torch._dynamo.reset()
    x = torch.randn(2, 3, WIDTH)
    y, gradient = _autograd(cut, x)
    found = _autograd(torch.compile(cut, backend="aot_eager", fullgraph=True), x)
    assert torch.equal(found[0], y) and torch.equal(found[1], gradient)


@pytest.mark.parametrize("dim", [0, 1])
def test_vmap_of_quantized_rows(dim):
    x = torch.randn(3, 4, WIDTH)
    _, gradient = _autograd(_quantize_modules, x)
    per_sample = torch.func.vmap(torch.func.grad(lambda x: _loss(_quantize_modules(x))), dim, dim)
    assert torch.equal(per_sample(x), gradient)
    jacobian = torch.func.jacrev(_quantize_modules)(x[0, 0])  # vmap of the backward pass alone
    one_hot = RowDequantize(WIDTH, "sign")(RowQuantize("sign")(torch.eye(WIDTH)))
    assert torch.equal(jacobian, one_hot)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_second_derivatives_and_forward_mode_of_quantized_rows_are_refused():
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


@pytest.mark.parametrize("format", [RowFormat(density=0.25), FEW_BITS], ids=str)
@on_ranks(2)
def test_exchanges_under_torch_func(rank, format):
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
