"""The state of a parameter, which moves with it from bucket to bucket and through checkpoints."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

# Keys of checkpoints.
RESIDUAL, OWNER_RESIDUAL = "residual", "owner_residual"


@dataclasses.dataclass(frozen=True)
class SegmentState:
    """A segment of a flat tensor, which is a parameter or a part of one.

    Attributes:
        residual: float32 [numel], entries that this rank has not sent yet.
        owner: those that it has not sent as the owner of a range of the bucket, in units of the
            mean: as long as the segment, 0 outside of the range. None: it owns nothing here.
    """

    residual: Tensor
    owner: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> "SegmentState":
        """A state with `change` applied to each tensor."""
        owner = None if self.owner is None else change(self.owner)
        return SegmentState(change(self.residual), owner)

    def with_owner(self) -> "SegmentState":
        """The same; if it owns nothing, with zeros."""
        nothing = torch.zeros_like(self.residual)
        return SegmentState(self.residual, nothing if self.owner is None else self.owner)

    def share(self, ranks: int) -> Tensor:
        """The contribution of one of so many ranks to the sum of gradients that sends all of it."""
        if self.owner is None:
            return self.residual
        return self.residual + ranks * self.owner

    def as_dict(self) -> dict[str, Any]:
        """As a checkpoint of one rank holds it.

        The owner's is in a tuple, or an empty one is there: torch.distributed.checkpoint takes a
        tuple as it is, so that a state of either transport is read into one of the other.
        """
        owner = () if self.owner is None else (self.owner,)
        return {RESIDUAL: self.residual, OWNER_RESIDUAL: owner}

    @staticmethod
    def from_dict(saved: Mapping[str, Any]) -> "SegmentState":
        """From a checkpoint."""
        return SegmentState(saved[RESIDUAL], *saved[OWNER_RESIDUAL])
