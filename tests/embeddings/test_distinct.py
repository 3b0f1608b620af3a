"""Distinct rows of a batch, and the sums of their gradients."""

import pytest
import torch

from dct_embeddings.distinct import distinct, repeat


@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (7, 1), (64, 5)])
def test_wanted_and_inverse_give_the_ids_back(shape):
    ids = torch.randint(0, 6, shape, dtype=torch.int32)
    ids[:, -1] += 2**31 - 10  # as large as a table may be
    wanted, inverse, counts = distinct(ids, torch.arange(shape[1]), shape[1])
    assert wanted.dtype == torch.int32 and inverse.shape == ids.shape
    assert torch.equal(wanted[inverse], ids)
    columns = wanted.split(counts.tolist())
    assert len(columns) == shape[1]
    for table, column in enumerate(columns):
        assert column.tolist() == sorted(set(ids[:, table].tolist()))


def test_gradients_are_summed_in_sample_order():
    """1e8 + 1 - 1e8 is 0 in float32, and 1 in another order."""
    rows = torch.zeros(3, 1, requires_grad=True)
    inverse = torch.tensor([[1], [0], [1], [1]])
    repeated = repeat(rows, inverse)
    assert repeated.shape == (4, 1, 1)
    repeated.backward(torch.tensor([1e8, 5.0, 1.0, -1e8]).view(4, 1, 1))
    assert rows.grad.tolist() == [[5.0], [0.0], [0.0]]
    rows.grad = None
    repeat(rows, inverse).backward(torch.tensor([1e8, 5.0, -1e8, 1.0]).view(4, 1, 1))
    assert rows.grad.tolist() == [[5.0], [1.0], [0.0]]


def test_repeat_is_indexing():
    rows = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    inverse = torch.randint(0, 9, (6, 3))
    assert torch.equal(repeat(rows, inverse), rows[inverse])
    grad = torch.randn(6, 3, 4, dtype=torch.float64)
    (expected,) = torch.autograd.grad(rows[inverse], rows, grad)
    (summed,) = torch.autograd.grad(repeat(rows, inverse), rows, grad)
    torch.testing.assert_close(summed, expected, rtol=1e-5, atol=1e-5)  # sums are float32


def test_no_rows_have_a_gradient():
    rows = torch.zeros(0, 4, requires_grad=True)
    repeated = repeat(rows, torch.zeros(0, 3, dtype=torch.int64))
    assert repeated.shape == (0, 3, 4)
    repeated.backward(torch.zeros(0, 3, 4))
    assert rows.grad.shape == (0, 4)
