"""Objects exchanged between ranks outside of training."""

from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def from_all_ranks(value: T) -> list[T]:
    """Every rank's value, in rank order. Collective."""
    values: list[T] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
