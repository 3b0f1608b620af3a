"""DLRM: the logits compared with a loop."""

import pytest
import torch

from dlrm.models.dlrm import DLRM


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
