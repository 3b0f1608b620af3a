"""A patch, or a full copy, of named tensors; as bytes and as files in a folder."""

import contextlib
import io
import itertools
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, BinaryIO

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor

from dct_kernels import checks
from dct_parallel import groups

from . import files
from .part import Part, checksums
from .shards import device_of

KEY = "dct_patch"  # in the metadata of a safetensors file


@dataclass(frozen=True, eq=False)
class WeightPatch:
    """The changes from one version of the weights to the next, or a full copy of one version.

    Attributes:
        id: the random id of the version that the patch leads to.
        base: the id of the version that the patch applies to. None for a full copy.
        version: the number of the version. Patches that were not confirmed do not count.
        parts: the changes of each tensor.
        group: if the tensors are sharded, the ranks that hold the parts. Else None.
    """

    id: str
    base: str | None
    version: int
    parts: Sequence[Part] = field(repr=False)
    group: dist.ProcessGroup | None = None

    @property
    def is_full(self) -> bool:
        return self.base is None

    @property
    def nbytes(self) -> int:
        """Bytes of the data on this rank, without names and checksums."""
        return sum(part.data.numel() for part in self.parts)

    def to_bytes(self) -> bytes:
        """Return the patch as bytes, in safetensors' format. Shards raise a ValueError."""
        require_unsharded("WeightPatch.to_bytes", self)
        self._write(file := io.BytesIO())
        return file.getvalue()

    @staticmethod
    def from_bytes(data: bytes) -> "WeightPatch":
        """The inverse of `to_bytes`. Damaged bytes raise a ValueError."""
        op = "WeightPatch.from_bytes"
        checks.require_type(op, "data", data, bytes, "bytes")
        with files.reading(op, "data"):
            tensors = safetensors.torch.load(data)
            outer = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            ordered = [tensors[str(index)] for index in range(len(tensors))]
            return from_header(outer["__metadata__"][KEY], ordered)

    def save(self, folder: str | PathLike[str], keep: int | None = None) -> None:
        """Add the patch to a folder, from which subscribers read it (`WeightSubscriber.update`).

        The first entry of a folder is a full copy. A patch follows the last version, or replaces it
        if both have the same base, because the publisher has forgotten the last one.

        Args:
            folder: it is created if it does not exist. Only one publisher may write to it.
            keep: number of last patches that stay, together with the full copy before them.
                Default: all files stay.

        Raises:
            ValueError, TypeError: an argument is invalid, or the patch does not follow.
            OSError: writing failed. The folder has its old versions.
            RuntimeError: another rank of sharded tensors raised an error.
        """
        op = "WeightPatch.save"
        rank, ranks = (0, 1) if self.group is None else (self.group.rank(), self.group.size())
        start = f"{self.version:06d}-{self.id[:12]}-{'full' if self.is_full else 'patch'}"
        names = [f"{start}-{r}.safetensors" for r in range(ranks)]
        with self._together(op):
            path = files.folder_path(op, folder)
            if keep is not None:
                checks.require_int(op, "keep", keep, 0, 2**31)
            path.mkdir(parents=True, exist_ok=True)
            patch, full = (None, names) if self.is_full else (names, None)
            version = files.Version(self.version, self.id, patch, full)
            versions = files.with_files(op, files.read_index(op, path), version, self.base)
            with files.replacing(path / names[rank]) as temporary, open(temporary, "wb") as file:
                self._write(file)
        with self._together(op):  # every rank has written its file
            if rank == 0:
                files.write_index(path, versions, keep)
                files.logger.info("saved version %d (%s) in %s", self.version, self.id, path)

    @staticmethod
    def load(folder: str | PathLike[str], after: str | None = None) -> "WeightPatch | None":
        """Read from a folder the patch that follows the version with the id `after`.

        Returns the last full copy if the folder does not have `after`, because it is None, too old,
        or was forgotten. Returns None if `after` is the last version.

        Raises:
            FileNotFoundError: the folder has no full copy, or lacks a file.
            ValueError, TypeError: an argument is invalid, or a file is damaged.
        """
        op = "WeightPatch.load"
        path = files.folder_path(op, folder)
        if after is not None:
            checks.require_type(op, "after", after, str, "the id of a version, or None")
        while versions := files.read_index(op, path):
            if after == versions[-1].id:
                return None
            full = [version for version in versions if version.full][-1]
            following = {v.id: (v.id, new, new.patch) for v, new in itertools.pairwise(versions)}
            base, new, names = following.get(after or "", (None, full, full.full))
            parts: list[Part] = []
            try:
                for name in names or []:
                    with files.reading(op, str(path / name)):
                        with safetensors.safe_open(path / name, framework="pt") as file:
                            keys = map(str, range(len(file.keys())))
                            tensors = [file.get_tensor(key).clone() for key in keys]
                            read = from_header(file.metadata()[KEY], tensors)
                        if (read.id, read.base, read.version) != (new.id, base, new.version):
                            raise ValueError(f"{read}, which is not {new.id} as in the index")
                    parts += read.parts
            except FileNotFoundError:
                if files.read_index(op, path) == versions:
                    raise
                continue  # the publisher has removed the files after the index was read
            return WeightPatch(new.id, base, new.version, parts)
        raise FileNotFoundError(f"dct::{op}: folder must have a full copy, got {path}")

    def header(self) -> str:
        """Everything except the data: a checksum of 8 digits, and JSON."""
        content: dict[str, Any] = {"format": files.FORMAT, "id": self.id, "base": self.base}
        content["version"] = self.version
        content["parts"] = [{k: v for k, v in vars(p).items() if k != "data"} for p in self.parts]
        content["data"] = _sizes_and_checksums([part.data for part in self.parts])
        text = json.dumps(content, default=lambda dtype: str(dtype).removeprefix("torch."))
        return f"{zlib.crc32(text.encode()):08x}{text}"

    def _write(self, file: BinaryIO) -> None:
        tensors = {str(index): part.data for index, part in enumerate(self.parts)}
        files.write_tensors(file, tensors, {KEY: self.header()})

    def _together(self, op: str) -> Any:
        """A context manager in which an error of one rank is raised on all ranks."""
        if self.group is None:
            return contextlib.nullcontext()
        timeout = groups.timeout_of(self.group, device_of(self.group))
        return groups.raising_together(op, self.group, timeout)


def require_unsharded(op: str, patch: WeightPatch) -> None:
    if patch.group is not None:
        got = f"the shards of 1 of {patch.group.size()} ranks"
        checks.fail(op, "patch", "of whole tensors (save works with shards)", got)


def from_header(header: str, tensors: list[Tensor]) -> WeightPatch:
    """The patch with this header, and the data of its parts. Raises an error for damaged ones."""
    content, data = json.loads(header[8:]), [tensor.view(torch.uint8) for tensor in tensors]
    good = f"{zlib.crc32(header[8:].encode()):08x}" == header[:8]
    if not good or content["data"] != _sizes_and_checksums(data):
        raise ValueError("content with other checksums")
    parts = []
    for entry, raw in zip(content["parts"], data, strict=True):
        fields = {"dtype": vars(torch)[entry["dtype"]], "shape": tuple(entry["shape"])}
        part = Part(**{**entry, **fields}, data=raw)
        sized = raw.numel() == part.numel * part.dtype.itemsize
        good = good and (sized if part.whole else content["base"] is not None)
        parts.append(part)
    if not good or content["format"] != files.FORMAT or not str(content["id"]).isalnum():
        raise ValueError(f"format {content['format']!r} with invalid entries")
    return WeightPatch(content["id"], content["base"], content["version"], parts)


def _sizes_and_checksums(data: list[Tensor]) -> list[list[int]]:
    sums = checksums(dict(enumerate(data)))
    return [[tensor.numel(), sums[index]] for index, tensor in enumerate(data)]
