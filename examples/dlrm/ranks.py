"""What ranks tell each other beside the training."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from .errors import UsageError

T = TypeVar("T")


def from_all_ranks(value: T) -> list[T]:
    """Every rank's value, in rank order. Collective."""
    values: list[T] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def all_or_none(work: Callable[[], T]) -> T:
    """What `work` returns, once every rank has done its own. Collective.

    Raises:
        UsageError: on every rank, where some rank's work raised one or an OSError; with its text.
    """
    result = failure = None
    try:
        result = work()
    except (UsageError, OSError) as error:
        failure = str(error)
    failures = [text for text in from_all_ranks(failure) if text is not None]
    if failures:
        raise UsageError(failures[0])
    return result
