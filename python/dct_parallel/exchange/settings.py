"""The user's settings. They create the codec, the interface between compression and transports.

There are two codecs. `Compressor` sends the largest entries, and `Quantized` sends all entries. A
new codec must pack a payload that begins with the header of `dct_kernels.layout`, and requires a
case in `Settings`.
"""

import dataclasses

import torch

from dct_kernels import checks, quantized_payload_bytes
from dct_kernels.layout import payload_layout

from ..compressor import Compressor, check_settings, default_capacity
from ..formats import DTYPES, require_format
from ..user_warnings import warn_user
from . import quantized

FORMATS = quantized.FORMATS
DENSITY, FORMAT = 0.005, "bfloat16"  # defaults; the density is for formats without quantization
TRANSPORTS = ("all_gather", "reduce_scatter")

# A codec packs a flat tensor, or each of its ranges, and keeps the residual.
Codec = Compressor | quantized.Quantized


@dataclasses.dataclass(frozen=True)
class Settings:
    """The user's settings, the same for every bucket. Creates codecs, computes payload sizes.

    Attributes:
        format: one of FORMATS.
        transport: one of TRANSPORTS, or None, in which case `plan_bucket` chooses.
        has_residual: whether codecs keep rounding errors; False requires density 1.
    """

    density: float
    format: str
    refresh_every: int = 1
    transport: str | None = None
    has_residual: bool = True

    @staticmethod
    def checked(
        op: str,
        density: float | None,
        format: str | torch.dtype | None,
        transport: str | None = None,
        refresh_every: int = 1,
    ) -> "Settings":
        """Check the arguments of the entry point `op` and return Settings.

        Args:
            density: None: 1 for quantized formats, otherwise 0.005.
            format: None: "bfloat16". With this default, density 1 warns, because the user may have
                meant 1 %, and because quantized formats send fewer bytes. A density whose
                messages are larger than in bfloat16 also warns.
        """
        if transport not in (None, *TRANSPORTS):
            rule = f"None, {' or '.join(map(repr, TRANSPORTS))}"
            checks.fail(op, "transport", rule, repr(transport))
        named = format is not None
        format = require_format(op, "format", FORMAT if format is None else format, FORMATS)
        is_quantized = format in quantized.QUANTIZED_FORMATS
        if density is None:
            density = 1.0 if is_quantized else DENSITY
        check_settings(op, density, refresh_every)
        if is_quantized and density < 1:
            checks.fail(op, "density", f"1 with format {format}, which sends all entries", density)
        if density == 1 and not named:
            warn_user(
                f"DCT: density is a fraction, and 1 sends all entries in {FORMAT}; 1 % is 0.01. "
                f'If you mean 1, pass format="{FORMAT}"; "int4" sends a quarter of its bytes.'
            )
        settings = Settings(float(density), format, refresh_every, transport)
        numel = 2**20  # the ratio of the sizes is nearly the same for all large buckets
        if density < 1 and settings.payload_bytes(numel, 1, numel) > 2 * numel:
            warn_user(
                f"DCT: density {density} means {100 * density:g} %, and its messages are larger "
                f"than the gradients in bfloat16; for {density:g} % write {density / 100:g}."
            )
        return settings

    def to_compare(self) -> dict[str, str]:
        """The settings as strings, which must be the same on every rank."""
        return {name: str(value) for name, value in dataclasses.asdict(self).items()}

    @property
    def every_entry(self) -> bool:
        """Whether payloads are dense: all entries, without positions."""
        return self.density == 1

    def capacity(self, numel: int) -> int:
        """The capacity of the payload of a range with `numel` elements."""
        return default_capacity(numel, self.density)

    def payload_bytes(self, numel: int, ranges: int, longest: int) -> int:
        """The size of one range's payload. The longest range has `longest` elements."""
        if self.every_entry:
            return quantized_payload_bytes(longest, self.format)
        capacity, dtype = self.capacity(longest), DTYPES[self.format]
        return payload_layout(numel, capacity, dtype, ranges).nbytes

    def codec(
        self, numel: int, ranges: int, device: torch.device, step: int, row_of: int | None = None
    ) -> Codec:
        """Create a codec that resumes at `step`.

        Args:
            numel: number of elements of the flat tensor.
            ranges: number of equal ranges of whole blocks, each with a payload and a threshold.
            row_of: if the tensor is itself a range, the number of elements of the longest range.
        """
        codec: Codec
        if self.every_entry:
            codec = quantized.Quantized(
                numel, self.format, ranges, row_of, device, self.has_residual
            )
        else:
            codec = Compressor(
                numel,
                density=self.density,
                value_dtype=DTYPES[self.format],
                refresh_every=self.refresh_every,
                capacity=None if row_of is None else self.capacity(row_of),
                ranges=ranges,
                row_of=row_of,
                device=device,
            )
        codec.step = step
        return codec
