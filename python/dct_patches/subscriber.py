"""The side that receives weights."""

from os import PathLike

import torch

from dct_kernels import checks

from .part import checksums, require_equal, to_host
from .patch import WeightPatch, require_unsharded
from .shards import NamedTensors, named

LOAD = "(else load a full copy)"


class WeightSubscriber:
    """Applies patches to tensors, in place, after it has checked them.

    Args:
        named_tensors: {name: tensor} or pairs, for example `model.named_parameters()`, with the
            names, shapes and dtypes of the patches. Names may share one tensor (tied weights).

    Attributes:
        id, version: of the version that the tensors have. None before `load`, and after an error
            that left them with other values.
    """

    def __init__(self, named_tensors: NamedTensors) -> None:
        op = "WeightSubscriber"
        self._tensors = named(op, named_tensors)
        for name, tensor in self._tensors.items():
            checks.require_plain(op, f"named_tensors[{name!r}]", tensor)
        self.id: str | None = None
        self.version: int | None = None

    def load(self, patch: WeightPatch) -> None:
        """Set all tensors to a full copy. Raises the errors of `apply`."""
        op = "WeightSubscriber.load"
        checks.require_type(op, "patch", patch, WeightPatch, "a WeightPatch")
        if not patch.is_full:
            checks.fail(op, "patch", "a full copy (publisher.full())", f"{patch.id}, a patch")
        self._write(op, patch)

    def apply(self, patch: WeightPatch) -> None:
        """Apply the patch that follows the tensors' version.

        Before anything is written, all checks must pass: the id of the base, names, shapes, dtypes,
        the checksums of the tensors against those of the base, and the content of every payload.

        Raises:
            ValueError, TypeError: a check failed. No tensor changed.
            RuntimeError: the tensors have other bits than the publisher's afterwards. Patches raise
                errors until `load`.
        """
        op = "WeightSubscriber.apply"
        checks.require_type(op, "patch", patch, WeightPatch, "a WeightPatch")
        if patch.is_full or self.id is None or patch.base != self.id:
            rule = (
                f"a patch with base {self.id}, the version of the tensors (else load a full copy)"
            )
            checks.fail(op, "patch", rule, f"{patch.id} with base {patch.base}")
        self._write(op, patch)

    def update(self, folder: str | PathLike[str]) -> int:
        """Continue to the last version in a folder, and return its number.

        Applies the patches after the tensors' version, or loads the last full copy if the folder
        does not have this version. Raises the errors of `WeightPatch.load` and `apply`.
        """
        while (patch := WeightPatch.load(folder, self.id)) is not None:
            (self.load if patch.is_full else self.apply)(patch)
        assert self.version is not None
        return self.version

    @torch.no_grad()
    def _write(self, op: str, patch: WeightPatch) -> None:
        """Check a patch, write it, and compare the checksums of the result."""
        require_unsharded(op, patch)
        self._require_fit(op, patch)
        flat = {name: tensor.contiguous().view(-1) for name, tensor in self._tensors.items()}
        parts = {(part.name, part.offset, part.numel): part for part in patch.parts}
        ranges = {key: flat[key[0]][part.offset :][: part.numel] for key, part in parts.items()}
        valid = to_host([part.on(ranges[key].device).is_valid() for key, part in parts.items()])
        good = {key: bool(one) for key, one in zip(parts, valid, strict=True)}
        require_equal(op, "patch", f"undamaged data {LOAD}", dict.fromkeys(parts, True), good)
        if not patch.is_full:
            old = {key: part.old for key, part in parts.items()}
            require_equal(op, "patch", f"the present values as base {LOAD}", checksums(ranges), old)
        self.id = self.version = None  # until the result is verified
        places = {(r.data_ptr(), r.numel()): (parts[key], r) for key, r in ranges.items()}
        for part, target in places.values():  # tied weights are written once
            part.write(target)
        for name, tensor in self._tensors.items():
            if flat[name].data_ptr() != tensor.data_ptr():  # a copy, of a non-contiguous tensor
                tensor.copy_(flat[name].view(tensor.shape))
        new, rule = {key: part.new for key, part in parts.items()}, f"the new values {LOAD}"
        require_equal(op, "patch", rule, new, checksums(ranges), RuntimeError)
        self.id, self.version = patch.id, patch.version

    def _require_fit(self, op: str, patch: WeightPatch) -> None:
        """Raise unless the patch has each element of each tensor once."""
        expected = {n: (tuple(t.shape), t.dtype, t.numel()) for n, t in self._tensors.items()}
        found: dict[str, tuple[tuple[int, ...], torch.dtype, int]] = {}
        for part in sorted(patch.parts, key=lambda part: (part.offset, part.numel)):
            before = found.get(part.name, (part.shape, part.dtype, 0))
            adjoins = before == (part.shape, part.dtype, part.offset)
            end = part.offset + part.numel if adjoins else -1
            found[part.name] = part.shape, part.dtype, end
        require_equal(op, "patch", "shape, dtype and elements", expected, found)
