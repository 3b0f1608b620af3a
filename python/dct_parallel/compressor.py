"""Compresses one flat tensor on one device: residual, thresholds and payload.

The method is the data-parallel part of Dynamic Communication Thresholding (arXiv 2010.08899). The
payload contains the entries that reach a threshold. All other entries stay in the residual (error
feedback). The threshold is a quantile of sampled entries. The paper samples a new threshold once
in thousands of steps. By default, `Compressor` samples a new threshold in every step.
"""

import functools
import math
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import dct_kernels
from dct_kernels import checks
from dct_kernels.layout import (
    FLAGS_BYTE,
    HEADER_BYTES,
    VALUE_DTYPE_CODES,
    payload_layout,
    range_bounds,
)

from .user_warnings import warn_user

HEADROOM = 1.25  # capacity divided by the expected number of entries above the threshold
# At least LEAST_PICKS entries are sampled, and enough that PICKS_THAT_PASS samples are expected
# above the threshold. So the standard error of the density of a step is at most about a quarter of
# the density, 1 / sqrt(16). Losses match those of exact top-k (docs/results/thresholds.md).
LEAST_PICKS, PICKS_THAT_PASS = 4096, 16

_sample_threshold = torch.ops.dct.sample_threshold.default
_mask_pack = torch.ops.dct.mask_pack.default
_scatter_unpack: Callable[..., Tensor] = torch.ops.dct.scatter_unpack.default


def default_capacity(numel: int, density: float) -> int:
    """The capacity for `numel` elements: 1.25 * density * numel, and at most `numel`."""
    return max(1, min(numel, math.ceil(HEADROOM * density * numel)))


def default_samples(density: float) -> int:
    """The number of samples for a threshold: 4,096, or 16 / density below a density of 0.39 %."""
    return min(max(LEAST_PICKS, math.ceil(PICKS_THAT_PASS / density)), 2**31 - 1)


class Compressor:
    """Packs a flat gradient into a payload of fixed size, and keeps the rest as a residual.

    `pack` samples a threshold from residual + gradient in every `refresh_every`-th step; the paper
    does so once in thousands of steps (arXiv 2010.08899). Entries that do not fit into the payload
    stay in the residual. If too many samples are not finite, the sampled threshold is infinite. If
    `refresh_every` is above 1, the last threshold is kept then; otherwise, only non-finite entries
    are packed. If the non-zero fraction of the samples is below `density`, or the density is 1, all
    non-zero entries pass, up to the capacity. The class is deterministic and does not synchronize.
    A CUDA graph captures the value of `step`, which seeds the samples.

    Args:
        numel: number of elements of the flat tensor.
        density: fraction of each range to send per step, in (0, 1].
        value_dtype: dtype of the values in the payload, torch.bfloat16 or torch.float32.
        refresh_every: steps between samples of the threshold.
        capacity: maximum entries per payload; default 1.25 * density * numel of the largest range.
        ranges: number of equal ranges of whole blocks. Each has its own threshold and payload.
        max_samples: samples per range; default 4,096, or 16 / density below a density of 0.39 %.
        row_of: if this tensor is one of several ranges, the number of elements of the longest
            range, which then determines the size of the payload.
        device: the device of all tensors.

    Attributes:
        residual: float32 [numel], entries not sent yet, in units of the unscaled gradient.
        threshold: float32 [ranges], the thresholds of the last `pack`.
        seen: int32 [ranges], the number of entries that passed in the last `pack`.
        payload: uint8 [nbytes], or [ranges, nbytes] with several ranges; `pack` overwrites it.
        step: number of calls of `pack`.

    Raises:
        ValueError, TypeError: an argument is out of range.

    >>> c = Compressor(4, density=0.25, value_dtype=torch.float32)
    >>> payload = c.pack(torch.tensor([0.1, -3.0, 0.2, 0.5]))
    >>> c.residual
    tensor([0.1000, 0.0000, 0.2000, 0.5000])
    >>> out = torch.empty(4)
    >>> c.unpack(payload.unsqueeze(0), out), out
    (tensor([0], dtype=torch.int32), tensor([ 0., -3.,  0.,  0.]))
    """

    @checks.names_keywords
    def __init__(
        self,
        numel: int,
        density: float = 0.005,
        *,
        value_dtype: torch.dtype = torch.bfloat16,
        refresh_every: int = 1,
        capacity: int | None = None,
        ranges: int = 1,
        max_samples: int | None = None,
        row_of: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        check_settings("Compressor", density, refresh_every)
        checks.require_dtype("Compressor", "value_dtype", value_dtype, tuple(VALUE_DTYPE_CODES))
        checks.require_int("Compressor", "numel", numel, 0, 2**63 - 1)
        checks.require_int("Compressor", "ranges", ranges, 1, 2**31 - 1)
        if max_samples is None:
            max_samples = default_samples(density)
        checks.require_int("Compressor", "max_samples", max_samples, 1, 2**31 - 1)
        if row_of is not None:
            checks.require_int("Compressor", "row_of", row_of, numel, 2**63 - 1)
        device = checks.require_device("Compressor", device)
        warn_if_eager(device.type)
        if capacity is None:
            capacity = default_capacity(range_bounds(numel, ranges, 0)[1], density)

        self.density, self.value_dtype = density, value_dtype
        self.refresh_every = refresh_every
        self.capacity, self.max_samples = capacity, max_samples
        self.step = 0
        start = 0.0 if density == 1 else math.inf
        self.threshold = torch.full((ranges,), start, dtype=torch.float32, device=device)
        self.seen = torch.zeros(ranges, dtype=torch.int32, device=device)
        self.residual = torch.zeros(numel, dtype=torch.float32, device=device)
        self._layout = payload_layout(numel, capacity, value_dtype, ranges)
        shape = (ranges, self._layout.nbytes) if ranges > 1 else (self._layout.nbytes,)
        self.payload = torch.zeros(shape, dtype=torch.uint8, device=device)
        # All ranks send rows with the layout of the longest range. The payload of a shorter range
        # has fewer block starts, so its positions begin at a lower offset.
        row = self._layout if row_of is None else payload_layout(row_of, capacity, value_dtype)
        self._row = self.payload.new_zeros(row.nbytes) if row != self._layout else None
        # The slices of a row into which `_to_send` copies the two halves of the payload.
        self._cuts = slice(self._layout.positions), slice(row.positions, row.nbytes)
        self._sampled = False

    def pack(self, grad: Tensor, inv_scale: Tensor | None = None) -> Tensor:
        """Add `grad` to the residual, and pack the entries that reach the threshold.

        Mutates all attributes of this object.

        Args:
            grad: float32, bfloat16 or float16 [numel], not mutated.
            inv_scale: float32 with one element on the device, by which to multiply `grad` (AMP), or
                None.

        Returns:
            `payload`, which the next `pack` overwrites.

        Raises:
            ValueError, TypeError: an argument has a wrong shape or dtype. Nothing has changed.
        """
        checks.require_tensor("Compressor.pack", "grad", grad, checks.FLOATS)
        if grad.shape != self.residual.shape:
            rule, got = f"shape [{len(self.residual)}]", list(grad.shape)
            checks.fail("Compressor.pack", "grad", rule, got, verb="have")
        _require_scale("Compressor.pack", "inv_scale", inv_scale)
        if self.density < 1:
            self._sample(grad, inv_scale)
        _mask_pack(
            self.residual,
            grad,
            self.threshold,
            self.payload,
            self.seen,
            self.capacity,
            self.value_dtype,
            inv_scale,
        )
        self.step += 1
        return self._to_send()

    def unpack(self, payloads: Tensor, out: Tensor, out_scale: Tensor | None = None) -> Tensor:
        """Write the mean of P payloads into `out`. Sums are deterministic, in the given order.

        Args:
            payloads: uint8 [P, nbytes] or [P, ranges, nbytes], from compressors with the same
                arguments.
            out: float32, bfloat16 or float16 [numel]; every element is overwritten.
            out_scale: float32 with one element on the device, by which to multiply the mean (AMP),
                or None.

        Returns:
            status int32 [P], not 0 for a damaged payload; see `dct_kernels.scatter_unpack`.

        Raises:
            ValueError, TypeError: an argument has a wrong shape or dtype. Nothing is written.
        """
        checks.require_tensor("Compressor.unpack", "payloads", payloads, (torch.uint8,), (2, 3))
        checks.require_type("Compressor.unpack", "out", out, Tensor, "a tensor")
        _require_scale("Compressor.unpack", "out_scale", out_scale)
        if len(payloads) == 0:
            checks.fail("Compressor.unpack", "payloads", "at least 1 payload", 0, verb="have")
        if self._row is not None:
            payloads = torch.cat([payloads[..., cut] for cut in self._cuts], dim=-1)
        return self._unpack(payloads, out, out_scale)

    def take_back(self, mean: Tensor | None = None) -> None:
        """Return the last payload's values to the residual, as if they had not been sent.

        Use it for a step that was exchanged but not applied. The result is exact for finite
        entries, because packed value + residual is the accumulated value. Non-finite entries are
        dropped. Without `mean`, a second call does nothing, because the first call clears the
        header. The call allocates about 11 bytes per element.

        Args:
            mean: what the last `pack` added to the residual, to be subtracted again; or None.
        """
        # If both flags of a header are set, unpacking writes a NaN to the first element.
        self.payload[..., FLAGS_BYTE].zero_()
        sent = torch.empty_like(self.residual)
        self._unpack(self.payload.unsqueeze(0), sent)
        self.residual += torch.where(sent.isfinite(), sent, 0.0)
        if mean is not None:
            self.residual -= torch.where(mean.isfinite(), mean, 0.0)
        self.payload[..., :HEADER_BYTES].zero_()
        self._sampled = False  # sample again, because the last samples may have been infinite

    def _to_send(self) -> Tensor:
        """The payload in the layout of the longest range's payload."""
        if self._row is None:
            return self.payload
        sizes = [len(self._row[cut]) for cut in self._cuts]
        for cut, part in zip(self._cuts, self.payload.split(sizes), strict=True):
            self._row[cut] = part
        return self._row

    def _unpack(self, payloads: Tensor, out: Tensor, out_scale: Tensor | None = None) -> Tensor:
        return _scatter_unpack(
            payloads, out, self.capacity, self.value_dtype, 1 / payloads.shape[0], out_scale
        )

    def _sample(self, grad: Tensor, inv_scale: Tensor | None) -> None:
        """Sample new thresholds in every `refresh_every`-th step, and after `take_back`."""
        if self._sampled and self.step % self.refresh_every:
            return
        sampled = _sample_threshold(
            grad,
            self.residual,
            self.density,
            len(self.threshold),
            self.max_samples,
            self.step,  # the seed, so that each call samples different entries
            inv_scale,
        )
        if self.refresh_every > 1:
            sampled = torch.where(sampled.isfinite(), sampled, self.threshold)
            # In place: a different stream may still read this memory, so it must not be freed.
            self.threshold.copy_(sampled)
        else:
            self.threshold = sampled
        self._sampled = True


def _require_scale(op: str, arg: str, scale: Tensor | None) -> None:
    checks.require_type(op, arg, scale, (Tensor, type(None)), "a tensor or None")


@functools.cache  # once per process
def warn_if_eager(device_type: str) -> None:
    """Warn if the ops use the eager backend on this device type and DCT_BACKEND is not set."""
    if dct_kernels.backend_of(device_type) == "eager" and "DCT_BACKEND" not in os.environ:
        warn_user(
            f"DCT: backend eager on {device_type}, which is for correctness only: on a CPU it is "
            "about 100 times slower than compiled kernels. `python -m dct_kernels` says what is "
            f"missing; this installation is in {Path(dct_kernels.__file__).parent}."
        )


def check_settings(owner: str, density: float, refresh_every: int) -> None:
    """Raise an error unless these arguments are valid for a Compressor."""
    checks.require_density(owner, density)
    checks.require_int(owner, "refresh_every", refresh_every, 1, 2**63 - 1)
