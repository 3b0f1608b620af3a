"""Exchanges Python objects between ranks outside of training."""

from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def from_all_ranks(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Gather the value of each rank of the group, in rank order. Collective."""
    values: list[T] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values
