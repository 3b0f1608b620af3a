"""--optimizer: the weights that torch's optimizer gives by hand, over the tables' SGD."""

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from dlrm import arguments, loop
from dlrm.data import dataset
from dlrm.data.features import table_rows
from dlrm.models.dlrm import DLRM

SMALL = ["--rows", "600", "--batch-size", "64", "--hash-size", "50", "--embedding-dim", "4"]
SMALL += ["--bottom", "8", "--top", "32", "--lr", "0.003", "--embedding-lr", "0.1"]

BY_HAND = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.003),
    "momentum": lambda weights: torch.optim.SGD(weights, lr=0.003, momentum=0.9),
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.003),
}


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("name", BY_HAND)
def test_weights_are_those_of_torchs_optimizer(name):
    options = arguments.parse([*SMALL, "--optimizer", name])
    data = dataset.load(options)
    trained, result = loop.train("dense", 3, data, options, lambda step: None)

    torch.manual_seed(3)
    model = DLRM(table_rows(50), 4, options.bottom, options.top)
    tables = torch.optim.SGD(model.tables.parameters(), lr=0.1)
    mlps = BY_HAND[name]([*model.bottom.parameters(), *model.top.parameters()])
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(3))
    batches = order.split(64)[: len(result.loss)]
    for batch in map(data.train.take, batches):
        model.zero_grad()
        logits = model(batch.ints, batch.ids)
        binary_cross_entropy_with_logits(logits, batch.labels.float()).backward()
        tables.step()
        mlps.step()
    assert len(batches) >= 5
    for ours, expected in zip(trained.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-7)
