"""experiments.few_bits: blocks are rows of row_quantize, E2M1 is what a table says."""

import pytest
import torch

from dct_kernels import row_dequantize, row_quantize
from dct_kernels.row_layout import row_bytes
from experiments import dp_methods, few_bits

SHAPES = [torch.Size(shape) for shape in ((40, 50), (50,), (7, 11))]
NUMEL = sum(shape.numel() for shape in SHAPES)


def _gradients(ranks=2):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(NUMEL, generator=generator) for _ in range(ranks)]


@pytest.mark.parametrize("format", ["int8", "int4", "ternary"])
@pytest.mark.parametrize("width", [64, 1024])
def test_blocks_are_rows(format, width):
    (x,) = _gradients(1)
    sent = few_bits.quantizer(format, width).apply(x)
    whole = len(x) // width * width
    rows = row_quantize(x[:whole].view(-1, width), format)
    rest = torch.zeros(1, width)
    rest[0, : len(x) - whole] = x[whole:]
    rest = row_dequantize(row_quantize(rest, format), width, format, torch.float32)[0]
    assert torch.equal(
        sent[:whole].view(-1, width), row_dequantize(rows, width, format, torch.float32)
    )
    assert torch.equal(sent[whole:], rest[: len(x) - whole])


def test_bytes_of_blocks():
    assert few_bits.quantizer("ternary", 1024).row_bytes == row_bytes(1024, "ternary")
    assert few_bits.quantizer("int4", 64).row_bytes == 16 * row_bytes(64, "int4")
    assert few_bits.quantizer("e2m1", 1024).nbytes(1025) == 2 * (512 + 64 + 2)


def test_e2m1_by_hand():
    """The row's scale is 1, so its first block has the scale 448, and others have their own."""
    x = torch.zeros(1024)
    x[:16] = 448 * torch.tensor(
        [6, -5.1, 4.9, -3.4, 2.4, 1.8, 1.7, 1.3, 1.2, -0.8, 0.7, *[0.2] * 5]
    )
    x[16:18] = torch.tensor([6 * 0.75, -0.2])  # times 1 / .75 it is -.27
    x[32:34] = torch.tensor([6 * 1.06, 6.0])  # the scale is rounded to 1, and 6 is the largest code
    x[48] = 2.0**-12  # below half the least scale
    sent = few_bits.by_two_scales(x)
    values = [6, -6, 4, -3, 2, 2, 1.5, 1.5, 1, -1, 0.5, *[0] * 5]
    assert sent[:16].tolist() == [448 * value for value in values]
    assert sent[16:18].tolist() == [4.5, -0.375]
    assert sent[32:34].tolist() == [6, 6]
    assert not sent[34:].any()


@pytest.mark.parametrize("format", ["int8", "int4", "ternary"])
def test_blocks_of_64_are_what_ranks_send(format):
    ours = dp_methods.method(f"blocks-{format},width=64")(SHAPES, 2)
    theirs = dp_methods.method(format)(SHAPES, 2)
    grads = _gradients()
    for step in range(6):
        moved = [(step + 1) * grad for grad in grads]
        assert torch.equal(ours([g.clone() for g in moved]), theirs([g.clone() for g in moved]))
    assert ours.sent == pytest.approx(theirs.sent, rel=0.1)  # headers


def test_vectors_may_go_exactly():
    exchange = dp_methods.method("blocks-ternary,width=64,exact=vectors")(SHAPES, 2)
    grads = _gradients()
    mean = exchange.mean(grads).split([shape.numel() for shape in SHAPES])[1]
    parts = [grad.split([shape.numel() for shape in SHAPES])[1] for grad in grads]
    torch.testing.assert_close(mean, (parts[0] + parts[1]) / 2, rtol=2**-7, atol=2**-7)
    matrices = NUMEL - 50
    rows = -(-matrices // 1024)
    assert exchange.sent == rows * few_bits.quantizer("ternary", 64).row_bytes + 2 * 50


def test_nothing_is_lost():
    """What was sent and what is owed are what was given."""
    feedback = few_bits.Feedback(2, NUMEL, few_bits.quantizer("e2m1", 1024))
    grads = _gradients()
    sent = sum(feedback.mean(grads) for _ in range(5))
    owed = sum(feedback.residuals) / 2
    torch.testing.assert_close(sent + owed, 5 * sum(grads) / 2, rtol=1e-5, atol=1e-5)


def test_the_error_of_a_mean_is_kept():
    exchange = dp_methods.method("blocks-int4,width=64")(SHAPES, 2)
    grads = _gradients()
    exchange.step = 10
    mean, true = exchange(grads), sum(grads) / 2
    error = (mean - true).square().sum() / true.square().sum()
    assert exchange.errors == {10: pytest.approx(error.item())}


def test_local_steps_in_blocks():
    models = [torch.nn.Linear(30, 30, bias=False) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    average = dp_methods.method("local-blocks-int8:x2,width=64")(models)
    for step, moves in enumerate([[0.5, 1.0], [1.5, 1.0]], start=1):
        with torch.no_grad():
            for model, move in zip(models, moves, strict=True):
                model.weight += move
        average(step)
    assert torch.equal(models[0].weight, models[1].weight)
    assert average.sent == few_bits.quantizer("int8", 64).row_bytes
