"""The content of payloads: the interface between compression and transports.

Buckets, plans and transports use what both codecs have: the largest entries (Compressor) and every
entry in few bits (quantized). A third needs a payload that begins with the header of
dct_kernels.layout, and a case in Settings.
"""

import dataclasses
from collections.abc import Sequence

import torch

from dct_kernels import checks
from dct_kernels.layout import payload_layout

from ..compressor import Compressor, check_settings, default_capacity
from . import quantized

# Packs a flat tensor, or each of its ranges, and keeps the residual.
Codec = Compressor | quantized.QuantizedRows


@dataclasses.dataclass(frozen=True)
class Settings:
    """The user's settings, for every bucket alike; makes the codec, and knows its sizes.

    Raises:
        ValueError, TypeError: one of them is out of its range; the text names it.
    """

    density: float
    refresh_every: int
    policy: str
    value_dtype: torch.dtype | str
    op: dataclasses.InitVar[str] = "Settings"  # for errors

    def __post_init__(self, op: str) -> None:
        check_settings(
            op,
            self.density,
            self.refresh_every,
            self.policy,
            self.value_dtype,
            quantized.FORMATS,
        )
        if self.in_rows and self.density < 1:
            rule = f"1 with value_dtype {self.value_dtype!r}, which sends every entry"
            checks.fail(op, "density", rule, self.density)
        object.__setattr__(self, "density", float(self.density))  # frozen from here on

    def as_told(self) -> dict[str, str]:
        """The settings as texts, for ranks to compare."""
        return {k: str(v).removeprefix("torch.") for k, v in dataclasses.asdict(self).items()}

    @property
    def in_rows(self) -> bool:
        """Whether every entry is sent, in few bits."""
        return self.value_dtype in quantized.FORMATS

    def capacity(self, numel: int) -> int:
        """Entries of room in the payload of a range of so many elements."""
        return default_capacity(numel, self.density)

    def payload_bytes(self, numel: int, ranges: int, longest: int) -> int:
        """Bytes of the payload of one range; the longest has so many elements."""
        if isinstance(self.value_dtype, str):
            return quantized.payload_bytes(longest, self.value_dtype)
        return payload_layout(numel, self.capacity(longest), self.value_dtype, ranges).nbytes

    def codec(
        self, bounds: Sequence[int], device: torch.device, step: int, row_of: int | None = None
    ) -> Codec:
        """A codec that goes on at `step`.

        Args:
            bounds: of the ranges, from 0 to numel; each has a payload and a threshold of its own.
            row_of: if the tensor is itself a range, the elements of the longest one.
        """
        made: Codec
        if self.in_rows:
            made = quantized.QuantizedRows(
                bounds[-1], str(self.value_dtype), len(bounds) - 1, row_of, device
            )
        else:
            assert isinstance(self.value_dtype, torch.dtype)  # the others are rows
            made = Compressor(
                bounds[-1],
                bounds,
                self.density,
                refresh_every=self.refresh_every,
                policy=self.policy,
                value_dtype=self.value_dtype,
                capacity=self.capacity(bounds[1] if row_of is None else row_of),
                ranges=len(bounds) - 1,
                row_of=row_of,
                device=device,
            )
        made.step = step
        return made
