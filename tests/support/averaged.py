"""Models and training steps shared by the tests of DCTAverager."""

import torch

from support.ranks import batch, mlp, train_step


def uneven(rank=0):
    """Return an MLP with `rank` added to its initial weights."""
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
