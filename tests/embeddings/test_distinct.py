"""Distinct rows of a batch, and the sums of their gradients."""

import pytest
import torch

from dct_embeddings.distinct import distinct, repeat


@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (7, 1), (64, 5)])
def test_wanted_and_inverse_restore_the_ids(shape):
    ids = torch.randint(0, 6, shape, dtype=torch.int32)
    ids[:, -1] += 2**31 - 10  # close to the largest int32
    wanted, inverse, counts = distinct(ids, torch.arange(shape[1]), shape[1])
    assert wanted.dtype == torch.int32 and inverse.shape == ids.shape
    assert torch.equal(wanted[inverse], ids)
    columns = wanted.split(counts.tolist())
    assert len(columns) == shape[1]
    for table, column in enumerate(columns):
        assert column.tolist() == sorted(set(ids[:, table].tolist()))


def test_gradients_are_summed_in_sample_order():
    """1e8 + 1 - 1e8 is 0 in float32, but 1e8 - 1e8 + 1 is 1."""
    inverse = torch.tensor([[1], [0], [1], [1]])
    for grads, total in (([1e8, 5.0, 1.0, -1e8], 0.0), ([1e8, 5.0, -1e8, 1.0], 1.0)):
        rows = torch.zeros(3, 1, requires_grad=True)
        repeat(rows, inverse).backward(torch.tensor(grads).view(4, 1, 1))
        assert rows.grad.tolist() == [[5.0], [total], [0.0]]
