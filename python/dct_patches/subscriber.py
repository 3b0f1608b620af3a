"""The side that receives weights."""

from collections.abc import Iterator
from os import PathLike

import torch

from dct_kernels import checks

from .part import Part, checksums, to_host
from .patch import WeightPatch, require_unsharded
from .shards import NamedTensors, named


class WeightSubscriber:
    """Applies patches to tensors, in place, after it has checked them.

    Args:
        named_tensors: {name: tensor} or pairs, for example `model.named_parameters()`, with the
            names, shapes and dtypes of the patches. Names may share one tensor (tied weights).

    Attributes:
        id: the id of the version that the tensors have. None before `load`, and after an error that
            left them with other values.
        version: its number, or None.

    Raises:
        ValueError, TypeError: the argument is invalid.

    >>> subscriber = WeightSubscriber(model.named_parameters())
    >>> subscriber.update(folder)
    """

    def __init__(self, named_tensors: NamedTensors) -> None:
        op = "WeightSubscriber"
        self._tensors = named(op, named_tensors)
        for name, tensor in self._tensors.items():
            checks.require_plain(op, f"named_tensors[{name!r}]", tensor)
        self.id: str | None = None
        self.version: int | None = None

    def load(self, patch: WeightPatch) -> None:
        """Set all tensors to a full copy. Nothing is written before all checks have passed.

        Raises:
            ValueError, TypeError: it is not a full copy, it is damaged, or its names, shapes or
                dtypes differ.
            RuntimeError: the tensors have other bits afterwards. `id` is None then.
        """
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
            RuntimeError: the tensors have other bits than the publisher's afterwards. `id` is None,
                and patches raise errors until `load`.
        """
        op = "WeightSubscriber.apply"
        checks.require_type(op, "patch", patch, WeightPatch, "a WeightPatch")
        got = f"{patch.id} with base {patch.base}"
        if patch.is_full:
            checks.fail(op, "patch", "a patch (load sets full copies)", got)
        if self.id is None:
            checks.fail(op, "patch", "preceded by a full copy (load publisher.full())", got)
        if patch.id == self.id:
            checks.fail(op, "patch", "new", f"{patch.id}, which was applied")
        if patch.base != self.id:
            rule = f"based on {self.id}, the version of the tensors (load a full copy to continue)"
            checks.fail(op, "patch", rule, got)
        self._write(op, patch)

    def update(self, folder: str | PathLike[str]) -> int:
        """Continue to the last version in a folder, and return its number.

        Applies the patches after the tensors' version, or loads the last full copy if the folder
        does not have this version. It raises the errors of `WeightPatch.load`, `load` and `apply`.
        Then the tensors have an older version.
        """
        while (patch := WeightPatch.load(folder, self.id)) is not None:
            if patch.is_full:
                self.load(patch)
            else:
                self.apply(patch)
        assert self.version is not None
        return self.version

    @torch.no_grad()
    def _write(self, op: str, patch: WeightPatch) -> None:
        """Check a patch, write it, and compare the checksums of the result."""
        require_unsharded(op, patch)
        self._require_fit(op, patch)
        flat = {name: tensor.contiguous().view(-1) for name, tensor in self._tensors.items()}
        ranges = [flat[part.name][part.offset :][: part.numel] for part in patch.parts]
        pairs = list(zip(patch.parts, ranges, strict=True))
        valid = to_host([part.is_valid(target.device) for part, target in pairs])
        if not all(valid):
            wrong = _names(part for part, good in zip(patch.parts, valid, strict=True) if not good)
            checks.fail(op, "patch", "undamaged (load a full copy)", f"invalid data for {wrong}")
        if not patch.is_full:
            sums = checksums(ranges)
            wrong = _names(p for p, s in zip(patch.parts, sums, strict=True) if s != p.old)
            if wrong:
                rule = "applied to unchanged weights (load a full copy)"
                checks.fail(op, "patch", rule, f"other values of {wrong} than those of the base")
        self.id = self.version = None  # until the result is verified
        written = set()
        for part, target in pairs:
            place = target.data_ptr(), target.numel()
            if target.numel() and place not in written:  # tied weights are written once
                part.write(target)
                written.add(place)
        for name, tensor in self._tensors.items():
            if flat[name].data_ptr() != tensor.data_ptr():  # a copy, of a non-contiguous tensor
                tensor.copy_(flat[name].view(tensor.shape))
        sums = checksums(ranges)
        wrong = _names(part for part, s in zip(patch.parts, sums, strict=True) if s != part.new)
        if wrong:
            raise RuntimeError(
                f"dct::{op}: the tensors must have the publisher's bits after {patch.id}, got "
                f"other bits of {wrong}: load a full copy (publisher.full())"
            )
        self.id, self.version = patch.id, patch.version

    def _require_fit(self, op: str, patch: WeightPatch) -> None:
        """Raise unless the patch has all elements of all tensors."""
        by_name: dict[str, list[Part]] = {}
        for part in patch.parts:
            by_name.setdefault(part.name, []).append(part)
        different = sorted(by_name.keys() ^ self._tensors.keys())
        if different:
            got = f"{len(different)} in only one of both, first {different[:3]}"
            checks.fail(op, "patch", "the names of named_tensors", got, verb="have")
        for name, tensor in self._tensors.items():
            parts, end = sorted(by_name[name], key=lambda part: (part.offset, part.numel)), 0
            for part in parts:
                found, expected = (part.shape, part.dtype), (tuple(tensor.shape), tensor.dtype)
                if found != expected:
                    rule = f"shape and dtype {expected} for {name!r}"
                    checks.fail(op, "patch", rule, found, verb="have")
                end = end + part.numel if part.offset == end else -1
            if end != tensor.numel():
                got = f"ranges {[(p.offset, p.numel) for p in parts]}"
                rule = f"each of the {tensor.numel()} elements of {name!r} once"
                checks.fail(op, "patch", rule, got, verb="have")


def _names(parts: Iterator[Part]) -> str:
    """The first names of some parts, as text."""
    names = sorted({part.name for part in parts})
    return ", ".join(names[:10]) + (f" and {len(names) - 10} others" if len(names) > 10 else "")
