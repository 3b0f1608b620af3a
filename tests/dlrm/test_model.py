"""DLRM: sizes, initialization, and the interaction compared with a loop."""

import math

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


def test_tables_have_a_row_per_value_up_to_the_hash_size():
    assert table_rows(600)[:4] == (600, 583, 600, 600)
    assert table_rows(2) == (2,) * 26
    assert sum(table_rows(10**9)) == 33_762_577


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


def test_initialization():
    torch.manual_seed(0)
    model = DLRM([2500, 400], 16, [300], [200])
    for table, bound in zip(model.tables, (1 / 50, 1 / 20), strict=True):
        assert table.weight.abs().max() <= bound
        assert table.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    for layer in (model.bottom[0], model.bottom[2], model.top[0]):
        fan = layer.in_features + layer.out_features
        assert layer.weight.std().item() == pytest.approx(math.sqrt(2 / fan), rel=0.05)
    bias = model.bottom[0].bias
    assert bias.std().item() == pytest.approx(math.sqrt(1 / 300), rel=0.2)
