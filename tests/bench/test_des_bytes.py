"""bench/experiments/des_bytes.py: what the systems send, by formula; a line of its table."""

import pytest
import torch
import torch.distributed as dist

from dct_embeddings import FeatureRows
from dlrm import arguments
from dlrm.data import dataset
from dlrm.launch import launch
from dlrm.models.factorised import FACTORISED
from experiments import des_bytes

BATCH, DIM = 32, 4


def _sends():
    options = arguments.parse(["--rows", "400", "--multi-hot", "3", "--batch-size", "32"])
    data = dataset.load(options)
    logits = []
    for system, of in des_bytes.SYSTEMS.items():
        torch.manual_seed(0)
        model = of(FACTORISED["fm"](data.tables, 13, DIM, []))
        owned = FeatureRows(torch.zeros(sum(data.tables), 1)).ids()
        foreign = dict.fromkeys(des_bytes.SYSTEMS, 0.0)
        for step in range(des_bytes.STEPS):
            part = data.train.take(slice(step * BATCH, (step + 1) * BATCH))
            ids = model._bags(part.ids)[0]
            others = ids[~torch.isin(ids, owned)]
            foreign[des_bytes.PS] += len(others) / des_bytes.STEPS
            foreign[des_bytes.ONCE] += len(others.unique()) / des_bytes.STEPS
        sent, outputs = des_bytes._sent(model, data.train, BATCH)
        logits.append(outputs)
        # A rank asks for ids and sends back gradients; and sends the rows that the other asked for.
        row = 4 * (1 + DIM)
        if system == des_bytes.DES:
            partial = 4 * BATCH * (1 + DIM + 1)
            expected = 48 + 4 * 26 * BATCH + 4 * foreign[des_bytes.PS] + 2 * partial
        else:
            expected = 8 + (4 + 2 * row) * foreign[system]
        both = torch.tensor([sent, expected], dtype=torch.float64)
        dist.all_reduce(both)
        assert both[0] == pytest.approx(float(both[1]))
    for others in logits[1:]:
        torch.testing.assert_close(others, logits[0])


def test_bytes_by_formula():
    launch(_sends, 2)


def test_a_line():
    cells = "| fm | 1,024 | 26 | 2,000 | 500 | 1,000 | 50.0% (-100.0%) |"
    assert des_bytes.line("fm", 1024, 26.0, 2000, 500, 1000) == cells
