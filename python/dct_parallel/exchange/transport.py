"""How the payloads of all ranks become their mean on every rank: what transports have in common.

One transport a file: `all_gather` and `reduce_scatter`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .codec import Codec
from .plan import BucketPlan
from .results import ExchangeResult
from .segment_state import SegmentState


class Transport(ABC):
    """How one bucket's payloads become their mean.

    `reduce` leaves its raw status, which the caller brings to the host, and `result` reads it
    there. Nothing else knows how many payloads there are.

    Args:
        plan: of the bucket.
        codec: packs the payload and unpacks the mean.
        group: the ranks to average over.
    """

    name: str

    @staticmethod
    @abstractmethod
    def ranges(ranks: int) -> int:
        """How many payloads a rank packs, each of an equal range of the bucket."""

    @staticmethod
    @abstractmethod
    def wire_bytes(plan: BucketPlan) -> int:
        """Bytes that the rank which sends most sends in a step."""

    def __init__(self, plan: BucketPlan, codec: Codec, group: dist.ProcessGroup) -> None:
        self._numel = plan.numel
        self._codec = codec
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)  # as errors call them
        self._senders = torch.tensor(self._ranks, device=codec.payload.device)

    def start(self) -> None:  # noqa: B027  # by default nothing
        """Begin to send what the codec packed, as far as `reduce` need not wait for others."""

    @abstractmethod
    def reduce(self, out: Tensor, out_scale: Tensor | None = None) -> Sequence[Tensor]:
        """Write the mean of the payloads that all ranks' codecs hold into `out`.

        Returns:
            For `result`: int32 tensors on the device, to be copied before the next call.
        """

    @abstractmethod
    def result(self, raw_status: Sequence[Tensor]) -> ExchangeResult:
        """What the last `reduce` returned says, once it is on the host."""

    @abstractmethod
    def fault_flags(self, raw_status: Sequence[Tensor]) -> Tensor:
        """The verdict that `result` will find, int32 [3] on the device: see `fault_flags_of`."""

    @abstractmethod
    def announce_damage(self) -> None:
        """Take part in an exchange with no more than the word that what came last was damaged."""

    def take_back(self) -> None:
        """Undo what the last `reduce` did to residuals, for a step that was not applied."""
        self._codec.take_back()

    def owner_state(self, index: int) -> SegmentState | None:
        """A copy, on the CPU, of what this rank owes as an owner to one parameter."""
        return None

    def load_owner(self, index: int, owner: SegmentState) -> Tensor:
        """Go on from an `owner_state`, of this transport or another.

        Returns:
            What it owes to the mean of this parameter that this rank cannot keep.
        """
        return owner.residual
