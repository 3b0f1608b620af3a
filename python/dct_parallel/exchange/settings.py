"""The content of payloads: the interface between compression and transports.

Buckets, plans and transports use what both codecs have: the largest entries (Compressor) and every
entry (Quantized). A third needs a payload that begins with the header of
dct_kernels.layout, and a case in Settings.
"""

import dataclasses

import torch

from dct_kernels import quantized_payload_bytes
from dct_kernels.layout import payload_layout

from ..compressor import Compressor, check_settings, default_capacity
from ..formats import DTYPES, require_format
from ..user_warnings import warn_user
from . import quantized

# In the first two of them by default this fraction of the entries, in the others every one.
FORMATS = quantized.FORMATS
DENSITY, FORMAT = 0.005, "bfloat16"
TRANSPORTS = ("all_gather", "reduce_scatter")

# Packs a flat tensor, or each of its ranges, and keeps the residual.
Codec = Compressor | quantized.Quantized


@dataclasses.dataclass(frozen=True)
class Settings:
    """The user's settings, the same for every bucket. Makes the codec, and computes its sizes.

    Attributes:
        format: one of FORMATS.
        transport: one of TRANSPORTS; None: `plan_bucket` chooses.
    """

    density: float
    format: str
    policy: str = "fresh"
    refresh_every: int = 1000
    transport: str | None = None

    @staticmethod
    def checked(
        op: str,
        density: float | None,
        format: str | torch.dtype | None,
        transport: str | None = None,
        policy: str = "fresh",
        refresh_every: int = 1000,
    ) -> "Settings":
        """Check the arguments of an entry point, which errors call `op`.

        Args:
            density: None: the format's own, 1 in few bits and otherwise 0.005.
            format: None: "bfloat16". Density 1 then warns, because it saves less than few bits do
                and may have been meant as 1 %.

        Raises:
            ValueError, TypeError: an argument is out of its range; the text names it.
        """
        if transport not in (None, *TRANSPORTS):
            rule = f"None, {' or '.join(map(repr, TRANSPORTS))}"
            raise ValueError(f"dct::{op}: transport must be {rule}, got {transport!r}")
        named = format is not None
        format = require_format(op, "format", FORMAT if format is None else format, FORMATS)
        few_bits = format in quantized.FEW_BITS
        if density is None:
            density = 1.0 if few_bits else DENSITY
        check_settings(op, density, policy, refresh_every)
        if few_bits and density < 1:
            raise ValueError(
                f"dct::{op}: density must be 1 with format {format}, which sends every entry, got "
                f"{density}"
            )
        if density == 1 and not named:
            warn_user(
                f"DCT: density is a fraction, and 1 sends every entry in {FORMAT}; 1 % is 0.01. "
                f'If you mean 1, say format="{FORMAT}"; "int4" sends a quarter of its bytes.'
            )
        return Settings(float(density), format, policy, refresh_every, transport)

    def to_compare(self) -> dict[str, str]:
        """The settings as texts, which must be the same on every rank."""
        return {name: str(value) for name, value in dataclasses.asdict(self).items()}

    @property
    def every_entry(self) -> bool:
        """Whether every entry is sent, and no positions."""
        return self.density == 1

    def capacity(self, numel: int) -> int:
        """The most entries in the payload of a range of `numel` elements."""
        return default_capacity(numel, self.density)

    def payload_bytes(self, numel: int, ranges: int, longest: int) -> int:
        """Bytes of the payload of one range. The longest range has `longest` elements."""
        if self.every_entry:
            return quantized_payload_bytes(longest, self.format)
        capacity, dtype = self.capacity(longest), DTYPES[self.format]
        return payload_layout(numel, capacity, dtype, ranges).nbytes

    def codec(
        self, numel: int, ranges: int, device: torch.device, step: int, row_of: int | None = None
    ) -> Codec:
        """A codec that resumes at `step`.

        Args:
            numel: elements of the flat tensor.
            ranges: equal ranges of whole blocks; each has a payload and a threshold of its own.
            row_of: if the tensor is itself a range, the elements of the longest one.
        """
        made: Codec
        if self.every_entry:
            made = quantized.Quantized(numel, self.format, ranges, row_of, device)
        else:
            made = Compressor(
                numel,
                density=self.density,
                value_dtype=DTYPES[self.format],
                policy=self.policy,
                refresh_every=self.refresh_every,
                capacity=None if row_of is None else self.capacity(row_of),
                ranges=ranges,
                row_of=row_of,
                device=device,
            )
        made.step = step
        return made
