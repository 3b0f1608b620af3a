"""One flat tensor, compressed: residual, thresholds and payload. Knows no network.

Dynamic Communication Thresholding, data-parallel side (arXiv 2010.08899): what is large goes into
the payload, the rest waits in the residual (error feedback), and the threshold between them is
sampled once in thousands of steps.
"""

import functools
import math
import operator
import os
import warnings
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

import dct_kernels
from dct_kernels import checks
from dct_kernels.layout import HEADER_BYTES, VALUE_DTYPE_CODES, payload_layout

POLICIES = ("tracked", "fixed")
HEADROOM = 1.25  # capacity over target; with less, the last segments of a bucket starve
LAST_EARLY_REFRESH = 512

_FLAGS_BYTE = 7  # of the payload's header

_sample_threshold = torch.ops.dct.sample_threshold.default
_track_threshold = torch.ops.dct.track_threshold.default
_mask_pack = torch.ops.dct.mask_pack.default
_scatter_unpack: Callable[..., Tensor] = torch.ops.dct.scatter_unpack.default


def default_capacity(numel: int, density: float, whole: int = 0) -> int:
    """Entries of room for `numel` compressed elements, and `whole` of which everything is sent.

    1.25 * density * numel, all at density 1, and room for each of the others.
    """
    return max(1, min(numel, math.ceil(HEADROOM * density * numel)) + whole)


def is_refresh_step(step: int, refresh_every: int) -> bool:
    """Whether thresholds are sampled at this step: 0, 1, 2, 4, ... 512 and every `refresh_every`.

    The early samples are there because a residual starts empty: a threshold found without one lets
    10 times its density pass in the first thousand steps.
    """
    early = step <= LAST_EARLY_REFRESH and step & (step - 1) == 0
    return early or step % refresh_every == 0


class Compressor:
    """Packs a flat gradient into a payload of fixed size and keeps what was not sent.

    A `pack` that samples no threshold costs one pass over memory, at most three launches and no
    host synchronisation. Between samples policy "tracked" nudges each threshold to hold the
    density, "fixed" leaves it (the paper's way; its overflow waits in the residual). A non-finite
    sample is discarded and the old threshold stays. At threshold 0, before the first finite sample
    or where the sample was 0, every non-zero passes, up to the capacity. At density 1 the threshold
    is 0 for good: everything is sent.

    There is one payload, overwritten by the next `pack`: finish sending it first. A second one
    would buy nothing, as the next gradient cannot exist before this one was exchanged.

    Args:
        numel: elements of the flat tensor.
        segments: S + 1 offsets ascending from 0 to numel, one segment per parameter; each has a
            threshold of its own.
        density: fraction of each segment to send per step, in (0, 1].
        refresh_every: steps between samples of the thresholds, after those at 0, 1, 2, 4, ... 512.
        policy: "tracked" or "fixed".
        value_dtype: of the values in the payload, torch.bfloat16 or torch.float32.
        skip: indices of segments that are not compressed (threshold -1: never read or written,
            zeros after `unpack`).
        whole: indices of segments of which everything is sent (threshold 0 for good).
        capacity: entries of room in the payload, or in each of its ranges; default 1.25 * density *
            the compressed numel, and all of the segments in `whole`.
        ranges: how many payloads there are, each of an equal range of whole 16,384-element blocks.
        max_samples: samples per segment.
        device: of every tensor here.

    Attributes:
        residual: float32 [numel], what is still to be sent, in unscaled units.
        threshold, reference, target: float32 [S]: magnitude that passes, its last sample, and how
            many entries should pass.
        seen: int32 [S], how many passed in the last `pack`.
        sampled_at: int32 [S], the step at which each threshold was sampled; before that, at which
            this started, or the segment was loaded.
        payload: uint8 [nbytes], or [ranges, nbytes] with several ranges, the last one packed.
        step: how many times `pack` was called.

    Raises:
        ValueError, TypeError: an argument is out of its range; the text names it.

    >>> c = Compressor(4, [0, 4], density=0.25, value_dtype=torch.float32)
    >>> payload = c.pack(torch.tensor([0.1, -3.0, 0.2, 0.5]))
    >>> c.residual
    tensor([0.1000, 0.0000, 0.2000, 0.5000])
    >>> out = torch.empty(4)
    >>> c.unpack(payload.unsqueeze(0), out), out
    (tensor([0], dtype=torch.int32), tensor([ 0., -3.,  0.,  0.]))
    """

    def __init__(
        self,
        numel: int,
        segments: Sequence[int] | Tensor,
        density: float = 0.005,
        *,
        refresh_every: int = 1000,
        policy: str = "tracked",
        value_dtype: torch.dtype = torch.bfloat16,
        skip: Collection[int] = (),
        whole: Collection[int] = (),
        capacity: int | None = None,
        ranges: int = 1,
        max_samples: int = 65536,
        device: torch.device | str = "cpu",
    ) -> None:
        check_settings("Compressor", density, refresh_every, policy, value_dtype)
        checks.require_int("Compressor", "numel", numel, 0, 2**63 - 1)
        checks.require_int("Compressor", "ranges", ranges, 1, 2**31 - 1)
        checks.require_int("Compressor", "max_samples", max_samples, 1, 2**31 - 1)
        bounds = _bounds(segments, numel)
        sizes = [high - low for low, high in pairwise(bounds)]
        for index in skip:
            checks.require_int("Compressor", "skip", index, 0, len(sizes) - 1)
        for index in whole:
            checks.require_int("Compressor", "whole", index, 0, len(sizes) - 1)
            if index in skip:
                checks.fail("Compressor", "whole", "of segments that are not skipped", index)
        warn_of_eager(torch.device(device).type)
        sampled = [index not in skip and index not in whole for index in range(len(sizes))]
        if capacity is None:
            compressed = sum(size for size, own in zip(sizes, sampled, strict=True) if own)
            everything = sum(sizes[index] for index in set(whole))
            capacity = default_capacity(compressed, density, everything)

        self.density = density
        self.refresh_every = refresh_every
        self.policy = policy
        self.value_dtype = value_dtype
        self.capacity = capacity
        self.max_samples = max_samples
        self.step = 0
        self.bounds = bounds
        self.segments = torch.tensor(bounds, dtype=torch.int64, device=device)
        start = [-1.0 if index in skip else 0.0 for index in range(len(sizes))]
        self.threshold = torch.tensor(start, dtype=torch.float32, device=device)
        self.reference = torch.zeros_like(self.threshold)
        target = [size if i in whole else density * size for i, size in enumerate(sizes)]
        self.target = torch.tensor(target, dtype=torch.float32, device=device)
        self.seen = torch.zeros(len(sizes), dtype=torch.int32, device=device)
        self.sampled_at = torch.zeros_like(self.seen)
        self.residual = torch.zeros(numel, dtype=torch.float32, device=device)
        nbytes = payload_layout(numel, capacity, value_dtype, ranges).nbytes
        shape = (ranges, nbytes) if ranges > 1 else (nbytes,)
        self.payload = torch.zeros(shape, dtype=torch.uint8, device=device)
        self._host_target = self.target.cpu()
        self._sampled = torch.tensor(sampled, device=device)
        self._sampling = density < 1 and any(sampled)
        self._sample_next = False

    def pack(
        self, grad: Tensor, inv_scale: Tensor | None = None, status: Tensor | None = None
    ) -> Tensor:
        """Add `grad` to the residual and move what passes into the payload, which is returned.

        Args:
            grad: float32, bfloat16 or float16 [numel].
            inv_scale: float32, one element on the device: grad is multiplied by it (AMP).
            status: what `unpack` returned of what `grad` was made from: if something was damaged,
                the payload says so to all who receive it.
        """
        checks.require_tensor("Compressor.pack", "grad", grad, checks.FLOATS)
        if grad.shape != self.residual.shape:
            checks.fail("Compressor.pack", "grad", f"[{len(self.residual)}]", list(grad.shape))
        refresh = self._sampling and (
            self._sample_next or is_refresh_step(self.step, self.refresh_every)
        )
        if refresh:
            self._sample(grad, inv_scale)
        _mask_pack(
            self.residual,
            grad,
            self.segments,
            self.threshold,
            self.payload,
            self.seen,
            self.capacity,
            self.value_dtype,
            inv_scale,
            status,
        )
        if self._sampling and not refresh and self.policy == "tracked":
            _track_threshold(self.threshold, self.seen, self.target, self.reference)
        self.step += 1
        return self.payload

    def pack_damage(self) -> Tensor:
        """A payload without entries that tells all who receive it: what I received was damaged.

        The residual and everything else stay as they are; the last payload is overwritten.
        """
        _mask_pack(
            self.residual,
            None,
            self.segments,
            torch.full_like(self.threshold, -1.0),
            self.payload,
            torch.empty_like(self.seen),
            self.capacity,
            self.value_dtype,
            None,
            self.seen.new_ones(1),
        )
        return self.payload

    def unpack(self, payloads: Tensor, out: Tensor, out_scale: Tensor | None = None) -> Tensor:
        """Write the mean of P payloads into `out`, summed in the order given.

        Args:
            payloads: uint8 [P, nbytes] or [P, ranges, nbytes], from compressors made like this one.
            out: float32, bfloat16 or float16 [numel]; every element is written.
            out_scale: float32, one element on the device: the mean is multiplied by it (AMP).

        Returns:
            status int32 [P]: non-zero where a payload was damaged, see `scatter_unpack`.
        """
        checks.require_tensor("Compressor.unpack", "payloads", payloads, (torch.uint8,), (2, 3))
        if len(payloads) == 0:
            checks.fail("Compressor.unpack", "payloads", "one or more", "none")
        return _scatter_unpack(
            payloads,
            out,
            self.capacity,
            self.value_dtype,
            1 / payloads.shape[0],
            False,
            out_scale,
        )

    def take_back(self) -> None:
        """Return the last payload's values to the residual, as if they had not been sent.

        For a step that was exchanged but not applied. Exact for every finite entry, as packed value
        + residual is what was accumulated; non-finite ones are dropped. Voids the payload, so a
        second call adds nothing. Allocates `numel` float32.
        """
        # With both flags set, unpacking would put a NaN over element 0.
        self.payload[..., _FLAGS_BYTE].zero_()
        sent = torch.empty_like(self.residual)
        self.unpack(self.payload.unsqueeze(0), sent)
        self.residual += torch.where(sent.isfinite(), sent, 0.0)
        self.payload[..., :HEADER_BYTES].zero_()

    def resample_if_flooded(self, seen: Tensor, threshold: Tensor) -> None:
        """Sample at the next `pack` if a zero threshold lets more than 1.25 x its target pass.

        Args:
            seen, threshold: copies on the host, of one of the last steps.
        """
        if self._sampling:
            limit = HEADROOM * self._host_target
            self._sample_next |= bool(((threshold == 0) & (seen > limit)).any())

    def segment_state(self, index: int) -> dict[str, Tensor]:
        """Copies, on the CPU, of what one segment must carry to go on elsewhere."""
        self._require_segment("segment_state", index)
        low, high = self.bounds[index], self.bounds[index + 1]
        return {
            "residual": self.residual[low:high].to("cpu", copy=True),
            "threshold": self.threshold[index].to("cpu", copy=True),
            "reference": self.reference[index].to("cpu", copy=True),
            "sample_next": torch.tensor(float(self._sample_next)),
        }

    def load_segment(self, index: int, state: dict[str, Tensor]) -> None:
        """Go on from a `segment_state` of the same size."""
        self._require_segment("load_segment", index)
        low, high = self.bounds[index], self.bounds[index + 1]
        self.residual[low:high].copy_(state["residual"])
        self.threshold[index].copy_(state["threshold"])
        self.reference[index].copy_(state["reference"])
        self.sampled_at[index] = self.step
        self._sample_next |= bool(state.get("sample_next", False))  # which early states leave out

    def _require_segment(self, op: str, index: int) -> None:
        checks.require_int(f"Compressor.{op}", "index", index, 0, len(self.bounds) - 2)

    def _sample(self, grad: Tensor, inv_scale: Tensor | None) -> None:
        sampled = _sample_threshold(
            grad,
            self.residual,
            self.segments,
            self.density,
            self.max_samples,
            self.step,  # as the seed: other picks at every refresh
            inv_scale,
        )
        usable = sampled.isfinite() & self._sampled
        self.threshold.copy_(torch.where(usable, sampled, self.threshold))
        self.reference.copy_(torch.where(usable, sampled, self.reference))
        self.sampled_at.masked_fill_(usable, self.step)
        self._sample_next = False


@functools.cache  # once per process
def warn_of_eager(device_type: str) -> None:
    """Warn if the ops run on eager PyTorch on such devices, unless DCT_BACKEND asks for that."""
    if dct_kernels.backend_of(device_type) == "eager" and "DCT_BACKEND" not in os.environ:
        warnings.warn(
            f"DCT: backend eager on {device_type}, which is for correctness only: on a CPU it is "
            "some hundred times slower than compiled kernels. Install dct_kernels again with a "
            f"C++ compiler (this one is in {Path(dct_kernels.__file__).parent}); `python -m "
            "dct_kernels` says what is missing.",
            stacklevel=3,
        )


def _bounds(segments: Sequence[int] | Tensor, numel: int) -> list[int]:
    given = segments.tolist() if isinstance(segments, Tensor) else segments
    try:
        bounds = [operator.index(bound) for bound in given]
    except TypeError:  # no sequence, or of something else
        bounds = []
    if not bounds or bounds[0] != 0 or bounds[-1] != numel or bounds != sorted(bounds):
        checks.fail("Compressor", "segments", f"integers ascending from 0 to {numel}", given)
    return bounds


def check_settings(
    owner: str, density: float, refresh_every: int, policy: str, value_dtype: torch.dtype
) -> None:
    """What a Compressor and everything built on it demand of these four."""
    checks.require_density(owner, density)
    checks.require_int(owner, "refresh_every", refresh_every, 1, 2**63 - 1)
    if policy not in POLICIES:
        checks.fail(owner, "policy", "'tracked' or 'fixed'", repr(policy))
    checks.require_dtype(owner, "value_dtype", value_dtype, tuple(VALUE_DTYPE_CODES))
