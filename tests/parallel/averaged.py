"""Ranks that take local steps: what tests of DCTAverager share."""

import torch

from ranks import batch, mlp, train_step


def uneven(rank=0):
    """Equal in shape, not in weights: the averager makes them equal."""
    model = mlp(32, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += rank
    return model


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model, optimizer, averager, rank, steps):
    for step in steps:
        train_step(model, optimizer, *batch(step, rank, 32))
        averager.average_parameters()
