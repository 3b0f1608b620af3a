"""The changes of one tensor, or of a range of its elements."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import dct_kernels

SIXTEEN_BITS = (torch.bfloat16, torch.float16)
DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if type(d) is torch.dtype}


@dataclass(frozen=True, eq=False)
class Part:
    """The changes of a tensor, or of a range of its elements.

    Attributes:
        name: the name of the tensor.
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

    def is_valid(self, device: torch.device) -> Tensor:
        """Whether the data can be written, without a look at the weights: bool [1]."""
        if self.whole:
            return checksum(self._values(device)) == self.new
        return dct_kernels.patch_check(self._payload(device), self.numel, self.dtype) == 0

    def write(self, flat: Tensor) -> None:
        """Write valid data to this range of the tensor, [numel]."""
        if self.whole:
            flat.copy_(self._values(flat.device))
        else:
            dct_kernels.patch_apply(self._payload(flat.device), flat)

    def _values(self, device: torch.device) -> Tensor:
        return self._payload(device).view(self.dtype)

    def _payload(self, device: torch.device) -> Tensor:
        return aligned(self.data.to(device))

    def to_json(self) -> dict[str, Any]:
        """The attributes without the data."""
        dtype = str(self.dtype).removeprefix("torch.")
        return {name: value for name, value in vars(self).items() if name != "data"} | {
            "dtype": dtype
        }

    @staticmethod
    def from_json(entry: dict[str, Any], data: Tensor) -> "Part":
        """The inverse of `to_json`. Raises ValueError, TypeError or KeyError for bad content."""
        dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
        part = Part(**{**entry, "dtype": dtype, "shape": shape}, data=data)
        sums = [part.new] if part.old is None else [part.old, part.new]
        numbers = [part.offset, part.numel, *shape, *sums]
        good = all(type(n) is int and -(2**63) <= n < 2**63 for n in numbers)
        good = good and min(part.offset, part.numel, *shape) >= 0 and type(part.name) is str
        good = good and part.offset + part.numel <= math.prod(shape)
        if part.whole is True:
            good = good and data.numel() == part.numel * dtype.itemsize
        else:
            good = good and part.whole is False and dtype in SIXTEEN_BITS and part.old is not None
        if not good:
            raise ValueError(f"an invalid entry for {part.name!r}")
        return part


def checksum(flat: Tensor) -> Tensor:
    """The checksum of a contiguous tensor [n] of any dtype: int64 [1]."""
    if flat.dtype in SIXTEEN_BITS:
        return dct_kernels.checksum(flat)
    raw = flat.view(torch.uint8)
    if raw.numel() % 2 or raw.storage_offset() % 2:
        raw = nn.functional.pad(raw, (0, raw.numel() % 2))  # a copy
    return dct_kernels.checksum(raw.view(torch.bfloat16))


def checksums(tensors: list[Tensor]) -> list[int]:
    """The checksums of contiguous tensors, with one host synchronization if on one device."""
    return to_host([checksum(tensor) for tensor in tensors])


def to_host(numbers: list[Tensor]) -> list[int]:
    """Concatenate 1-D tensors, and copy them to the host."""
    if not numbers:
        return []
    found: list[int] = torch.cat([number.to(numbers[0].device) for number in numbers]).tolist()
    return found


def aligned(data: Tensor) -> Tensor:
    """`data`, or a copy at an address that the ops accept."""
    return data.clone() if data.data_ptr() % 16 else data
