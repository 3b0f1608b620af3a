"""Gradients of the row ops, and autograd with the ops that mutate arguments."""

import pytest
import torch
from oracle import rows as oracle
from torch.autograd import forward_ad

import dct_kernels
from conformance import bits, samples
from conformance.arguments import OPS, arguments, raises
from dct_kernels import row_gather, row_pack, row_unpack

# (width, k) of each encoding: bitmap, uint8 columns, uint16 columns.
SHAPES = [(40, 6), (40, 3), (600, 5)]
shapes = pytest.mark.parametrize(("width", "k"), SHAPES)
F32, BF16, F16 = bits.FLOATS


def separated(rows, width):
    """Rows whose largest entries stay the largest after a small step."""
    order = torch.rand(rows, width).argsort(1)
    signs = torch.where(torch.rand(rows, width) < 0.5, -1.0, 1.0)
    return (signs * (order + 1) / 4).requires_grad_()


# The ops do not accept float64, so gradcheck uses float32 and a larger step than its default.
@pytest.mark.filterwarnings("ignore:Input .* requires gradient and is not a double")
@pytest.mark.parametrize(("width", "k"), [(12, 3), (40, 3), (300, 2)])
def test_gradcheck(width, k):
    x = separated(1, width)
    _, positions = row_pack(x, k, torch.float32)
    values = torch.randn(1, k, requires_grad=True)
    for function, argument in [
        (lambda x: row_pack(x, k, torch.float32)[0], x),
        (lambda x: row_gather(x, positions, k, torch.float32), x),
        (lambda v: row_unpack(v, positions, width, torch.float32), values),
    ]:
        assert torch.autograd.gradcheck(function, (argument,), eps=1e-2, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(("dtype", "value_dtype"), [(F32, BF16), (BF16, F16), (F16, F32)])
@shapes
def test_the_backward_ops_are_the_row_ops(width, k, dtype, value_dtype):
    """The backward pass uses the positions of the forward pass, and rounds to the input's dtype."""
    x = samples.normal(7 * width, dtype).view(7, width).requires_grad_()
    grad = samples.normal(7 * k, value_dtype, seed=1).view(7, k)
    values, positions = row_pack(x, k, value_dtype)
    assert values.requires_grad
    assert not positions.requires_grad
    (dx,) = torch.autograd.grad(values, x, grad)
    expected = oracle.row_unpack(bits.numbers(grad), positions.numpy(), width, bits.name(dtype))
    bits.assert_floats(dx, expected, "gradient of row_pack")

    (dx,) = torch.autograd.grad(row_gather(x, positions, k, value_dtype), x, grad)
    bits.assert_floats(dx, expected, "gradient of row_gather")

    values = values.detach().requires_grad_()
    grad = samples.normal(7 * width, dtype, seed=2).view(7, width)
    (dv,) = torch.autograd.grad(row_unpack(values, positions, width, dtype), values, grad)
    expected = oracle.row_gather(bits.numbers(grad), positions.numpy(), k, bits.name(value_dtype))
    bits.assert_floats(dv, expected, "gradient of row_unpack")


def _packed():
    x = samples.normal(60).view(2, 30)
    return x, *row_pack(x, 4, F32)


def test_expanded_gradients():
    """The gradient of a sum has stride 0, so backward must make it contiguous for the op."""
    x = samples.normal(90).view(3, 30).requires_grad_()
    values, positions = row_pack(x, 4, torch.float32)
    mask = row_unpack(torch.ones(3, 4), positions, 30, torch.float32)
    values.sum().backward()
    assert torch.equal(x.grad, mask)
    x.grad = None
    row_gather(x, positions, 4, torch.float32).mean().backward()
    assert torch.equal(x.grad, mask / 12)
    values = values.detach().requires_grad_()
    row_unpack(values, positions, 30, torch.float32).sum().backward()
    assert torch.equal(values.grad, torch.ones(3, 4))


def test_double_backward():
    x = samples.normal(60).view(2, 30).requires_grad_()
    values, positions = row_pack(x, 4, torch.float32)
    (dx,) = torch.autograd.grad((values**2).sum(), x, create_graph=True)
    (ddx,) = torch.autograd.grad(dx.sum(), x)
    assert torch.equal(ddx, 2 * row_unpack(torch.ones(2, 4), positions, 30, torch.float32))


def test_outputs_do_not_require_grad_in_no_grad_mode_or_for_detached_inputs():
    x = samples.normal(60).view(2, 30).requires_grad_()
    with torch.no_grad():
        assert not row_pack(x, 4, torch.float32)[0].requires_grad
    assert not row_pack(x.detach(), 4, torch.float32)[0].requires_grad


# The differentiable argument of each row op.
DIFFERENTIABLE = {"row_pack": "x", "row_gather": "x", "row_unpack": "values"}
entries = pytest.mark.parametrize("entry", [dct_kernels, torch.ops.dct], ids=["public", "raw"])


@entries
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_forward_mode_raises(entry, op):
    """Without this error, torch would silently use a tangent of zero."""
    args, call = arguments(op), getattr(entry, op)
    tensor = args[DIFFERENTIABLE[op]]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(tensor, torch.ones_like(tensor))
        raises(call, args | {DIFFERENTIABLE[op]: dual}, op, DIFFERENTIABLE[op], ValueError)
        call(**args)

    def derivative():
        torch.func.jvp(lambda t: call(**args | {DIFFERENTIABLE[op]: t}), (tensor,), (tensor,))

    raises(derivative, {}, op, DIFFERENTIABLE[op], ValueError)


def test_torch_func_gradients_raise():
    x, values, positions = _packed()
    for function, argument in (
        (lambda x: row_pack(x, 4, F32)[0], x),
        (lambda x: row_gather(x, positions, 4, F32), x),
        (lambda v: row_unpack(v, positions, 30, F32), values),
    ):
        with pytest.raises(RuntimeError, match="must override the setup_context"):
            torch.func.vjp(function, argument)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap warns once per op
def test_vmap_of_row_ops_equals_one_call():
    x, values, positions = _packed()
    one = x.clone().requires_grad_()
    found = torch.vmap(lambda row: row_pack(row.view(1, -1), 4, F32))(one)
    assert torch.equal(found[0][:, 0], values) and torch.equal(found[1][:, 0], positions)
    found[0].pow(2).sum().backward()
    assert torch.equal(one.grad, 2 * row_unpack(values, positions, 30, F32))


WRITTEN = {"mask_pack": {"residual", "payload", "seen"}, "scatter_unpack": {"out"}}
WRITTEN |= {"quantize_pack": {"residual", "payload"}, "dequantize_sum": {"out"}}
WRITTEN |= {"diff_pack": {"patch", "checksums"}, "patch_apply": {"weights"}}


@pytest.mark.parametrize("op", OPS)
def test_only_mutated_arguments_bump_their_version_counter(op):
    """Autograd and torch.compile rely on the version counters."""
    args = arguments(op)
    tensors = {name: value for name, value in args.items() if isinstance(value, torch.Tensor)}
    before = {name: tensor._version for name, tensor in tensors.items()}
    getattr(torch.ops.dct, op).default(**args)
    bumped = {name for name, tensor in tensors.items() if tensor._version > before[name]}
    assert bumped == WRITTEN.get(op, set())


@entries
@pytest.mark.parametrize(
    ("op", "arg"),
    [
        (op, arg)
        for op in WRITTEN
        for arg in sorted(WRITTEN[op])
        if arguments(op)[arg].is_floating_point()  # integers cannot require grad
    ],
)
def test_mutating_an_argument_that_requires_grad_raises(entry, op, arg):
    """Unless grad mode is off, ops raise an error for leaf and for non-leaf tensors."""
    args, call = arguments(op), getattr(entry, op)
    args[arg].requires_grad_()
    text = raises(call, args, op, arg, ValueError)
    assert "must not require grad outside torch.no_grad()" in text
    raises(call, args | {arg: args[arg] * 1}, op, arg, ValueError)
    with torch.no_grad():
        call(**args)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_ops_run_in_no_grad_and_inference_mode(op, mode):
    with mode():
        getattr(torch.ops.dct, op).default(**arguments(op))
