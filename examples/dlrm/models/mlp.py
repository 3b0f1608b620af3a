"""Fully connected layers."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def layers(widths: Sequence[int]) -> list[nn.Module]:
    """A Linear and a ReLU for each pair of consecutive widths."""
    made: list[nn.Module] = []
    for width_in, width_out in pairwise(widths):
        made += [nn.Linear(width_in, width_out), nn.ReLU()]
    return made
