"""The changes of one tensor, or of a range of its elements."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import dct_kernels
from dct_kernels import checks

SIXTEEN_BITS = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class Part:
    """The changes of a tensor, or of a range of its elements.

    Attributes:
        shape, dtype: of the whole tensor.
        offset, numel: the range, in elements.
        whole: whether `data` are the new values of the range, instead of a payload of `diff_pack`.
        old: the checksum of the range in the base. None in a full copy.
        new: the checksum of the range with the changes.
        data: uint8 [nbytes].
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    numel: int
    whole: bool
    old: int | None
    new: int
    data: Tensor

    @property
    def values(self) -> Tensor:
        """`data` as the new values of the range, if `whole`."""
        return self.data.view(self.dtype)

    def on(self, device: torch.device) -> "Part":
        """The part with `data` on a device, at an address that the ops accept."""
        data = self.data.to(device)
        return replace(self, data=data.clone() if data.data_ptr() % 16 else data)

    def is_valid(self) -> Tensor:
        """Whether `data` can be written, without a look at the weights: bool [1]."""
        if self.whole:
            return checksum(self.values) == self.new
        return dct_kernels.patch_check(self.data, self.numel, self.dtype) == 0

    def write(self, flat: Tensor) -> None:
        """Write valid data to this range of the tensor, [numel]."""
        part = self.on(flat.device)
        if self.whole:
            flat.copy_(part.values)
        else:
            dct_kernels.patch_apply(part.data, flat)


def checksum(flat: Tensor) -> Tensor:
    """The checksum of a contiguous tensor [n] of any dtype: int64 [1]."""
    if flat.dtype not in SIXTEEN_BITS:
        raw = flat.view(torch.uint8)
        if raw.numel() % 2 or raw.storage_offset() % 2:
            raw = nn.functional.pad(raw, (0, raw.numel() % 2))  # a copy
        flat = raw.view(torch.bfloat16)
    return dct_kernels.checksum(flat)


def checksums(tensors: Mapping[Any, Tensor]) -> dict[Any, int]:
    sums = to_host([checksum(tensor) for tensor in tensors.values()])
    return {key: int(number) for key, number in zip(tensors, sums, strict=True)}


def to_host(tensors: list[Tensor]) -> list[Tensor]:
    """Copy tensors of one shape to the host, with one synchronization if they are on one device."""
    return list(torch.stack([t.to(tensors[0].device) for t in tensors]).cpu()) if tensors else []


def require_equal(
    op: str,
    arg: str,
    rule: str,
    expected: Mapping[Any, Any],
    found: Mapping[Any, Any],
    error: Any = ValueError,
) -> None:
    """Raise an error that names the keys whose values differ."""
    keys = sorted(expected.keys() | found.keys())
    if wrong := [key for key in keys if expected.get(key) != found.get(key)]:
        got = f"{found.get(wrong[0])}; {len(wrong)} differ: {', '.join(map(str, wrong[:10]))}"
        checks.fail(op, arg, f"{rule}: {expected.get(wrong[0])} for {wrong[0]}", got, error, "have")
