"""Computes scores of predicted probabilities."""

from typing import NamedTuple

import numpy as np
import torch
from sklearn.metrics import log_loss, roc_auc_score
from torch import nn

from .data.features import Rows
from .ranks import from_all_ranks

_BATCH = 8192


class Scores(NamedTuple):
    """Calibration is the mean predicted probability divided by the mean label."""

    auc: float
    log_loss: float
    calibration: float


def score(labels: np.ndarray, probability: np.ndarray) -> Scores:
    """Score predicted probabilities of label 1."""
    calibration = probability.mean() / labels.mean()
    auc, loss = roc_auc_score(labels, probability), log_loss(labels, probability)
    return Scores(float(auc), float(loss), float(calibration))


def score_all_ranks(labels: np.ndarray, probability: np.ndarray) -> Scores:
    """Score the rows of all ranks together. All ranks return the score. Collective."""
    parts = from_all_ranks((labels, probability))
    return score(*(np.concatenate(part) for part in zip(*parts, strict=True)))


@torch.no_grad()
def evaluate(model: nn.Module, rows: Rows, filler: Rows) -> Scores:
    """Score the model on the rows of all ranks. All ranks return the score. Collective.

    Sets the model to eval mode. Sharded tables need the same number of rows on all ranks,
    so rows of `filler` are appended. Predictions for these rows are dropped.
    """
    model.eval()
    missing = max(from_all_ranks(len(rows))) - len(rows)
    padded = Rows.concatenate([rows, filler.take(torch.zeros(missing, dtype=torch.int64))])
    batches = map(padded.take, torch.arange(len(padded)).split(_BATCH))
    logits = torch.cat([model(batch.ints, batch.ids) for batch in batches])[: len(rows)]
    return score_all_ranks(rows.labels.numpy(), torch.sigmoid(logits.double()).numpy())
