"""The headers of payloads, as the host reads them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dct_kernels.layout import FLAG_NON_FINITE, FLAG_OVERFLOW, HEADER, HEADER_BYTES


class Header(NamedTuple):
    """Flags and count of a payload's header."""

    flags: int
    count: int  # type: ignore[assignment]  # in place of tuple.count

    @property
    def overflow(self) -> bool:
        return bool(self.flags & FLAG_OVERFLOW)

    @property
    def non_finite(self) -> bool:
        return bool(self.flags & FLAG_NON_FINITE)


def headers(payload: Tensor) -> list[Tensor]:
    """Views of the header of every row of `payload` [..., nbytes], int32 [16] each."""
    return list(payload.view(torch.int32).view(-1, payload.shape[-1] // 4)[:, : HEADER_BYTES // 4])


def read_headers(words: Sequence[Tensor]) -> list[Header]:
    """Views from `headers`, copied to the host, as numbers."""
    fields = HEADER.iter_unpack(bytes(torch.cat(list(words)).view(torch.uint8).tolist()))
    return [Header(flags, count) for _, _, _, flags, _, _, count, _ in fields]
