"""DLRM: sizes, initialization, and the interaction compared with a loop."""

import pytest
import torch

from dlrm.data.features import table_rows
from dlrm.models.dlrm import DLRM


def test_parameters_of_the_kaggle_setup():
    rows = table_rows(2000)
    model = DLRM(rows, 16, [512, 256, 64], [512, 256])
    bottom = 13 * 512 + 512 + 512 * 256 + 256 + 256 * 64 + 64 + 64 * 16 + 16
    top = 367 * 512 + 512 + 512 * 256 + 256 + 256 * 1 + 1
    parameters = sum(p.numel() for p in model.parameters())
    assert parameters == 16 * sum(rows) + bottom + top == 16 * 31187 + 475_985


def test_logits_match_a_loop():
    torch.manual_seed(1)
    model = DLRM([7, 5, 3], 4, [6], [9]).double()
    ints = torch.randn(5, 13, dtype=torch.float64)
    ids = torch.tensor([[6, 4, 2], [0, 0, 0], [1, 2, 0], [3, 3, 1], [5, 1, 2]], dtype=torch.int32)
    logits = model(ints, ids)
    assert logits.shape == (5,)
    for row in range(5):
        x = ints[row]
        for layer in (0, 2):
            x = (model.bottom[layer].weight @ x + model.bottom[layer].bias).clamp(min=0)
        vectors = [x] + [model.tables[t].weight[ids[row, t]] for t in range(3)]
        pairs = [vectors[i] @ vectors[j] for i in range(4) for j in range(i)]
        z = torch.cat([x, torch.stack(pairs)])
        z = (model.top[0].weight @ z + model.top[0].bias).clamp(min=0)
        expected = model.top[2].weight[0] @ z + model.top[2].bias[0]
        assert logits[row].item() == pytest.approx(expected.item(), rel=1e-12)
