"""A patch, or a full copy, of named tensors; as bytes and as files in a folder."""

import contextlib
import io
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from dct_kernels import checks
from dct_parallel.groups import raising_together, timeout_of

from . import folder as folders
from .part import Part, checksums
from .tensor_files import logger, replacing, write_tensors

FORMAT = 1
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
        """Return the patch as bytes, in safetensors' format.

        Raises:
            ValueError: the tensors are sharded. `save` works with shards.
        """
        require_unsharded("WeightPatch.to_bytes", self)
        file = io.BytesIO()
        self._write(file, "bytes")
        return file.getvalue()

    @staticmethod
    def from_bytes(data: bytes) -> "WeightPatch":
        """Return the patch of which `to_bytes` returned these bytes. They may be untrusted.

        Raises:
            ValueError, TypeError: the bytes are damaged, or from another version of the library.
        """
        import safetensors

        op = "WeightPatch.from_bytes"
        checks.require_type(op, "data", data, bytes, "bytes")
        try:
            raw = {name: bytearray(entry["data"]) for name, entry in safetensors.deserialize(data)}
            size = int.from_bytes(data[:8], "little")
            header = json.loads(data[8 : 8 + size])["__metadata__"][KEY]
            tensors = [_tensor(raw[str(index)]) for index in range(len(raw))]
        except (safetensors.SafetensorError, ValueError, KeyError) as error:
            fail_damaged(op, "data", error)
        return from_header(op, "data", header, tensors)

    def save(self, folder: str | PathLike[str], keep: int | None = None) -> None:
        """Add the patch to a folder, from which subscribers read it (`WeightSubscriber.update`).

        The first entry of a folder is a full copy. A patch replaces the folder's last patch if both
        have the same base, because the publisher has forgotten the last one. Files are written
        under a temporary name, so a crash or an error leaves the folder with its old versions. If
        the tensors are sharded, all ranks call this method with the same folder.

        Args:
            folder: it is created if it does not exist. Only one publisher may write to it.
            keep: number of last patches that stay, >= 0, together with the full copy before them.
                Older files are removed. Default: all files stay.

        Raises:
            ValueError, TypeError: an argument is invalid, or the patch does not follow the folder's
                last version.
            OSError: writing failed, for example because the disk is full.
            RuntimeError: another rank raised an error.
        """
        rank, ranks = (0, 1) if self.group is None else (self.group.rank(), self.group.size())
        kind = "full" if self.is_full else "patch"
        files = [folders.file_name(self.version, self.id, kind, r) for r in range(ranks)]
        op = "WeightPatch.save"
        with self._together(op):
            path = folders.folder_path(op, folder)
            if keep is not None:
                checks.require_int(op, "keep", keep, 0, 2**31)
            path.mkdir(parents=True, exist_ok=True)
            old = folders.read_index(path)
            new = folders.with_files(op, old, self.version, self.id, self.base, files)
            with replacing(path / files[rank]) as file:
                self._write(file, str(path / files[rank]))
        with self._together(op):  # every rank has written its file
            if rank == 0:
                kept = new if keep is None else folders.pruned(new, keep)
                folders.write_index(path, kept)
                folders.remove_files(path, folders.all_files(old) - folders.all_files(kept))
                logger.info("saved version %d (%s) in %s", self.version, self.id, path)

    @staticmethod
    def load(folder: str | PathLike[str], after: str | None = None) -> "WeightPatch | None":
        """Read from a folder the patch that follows the version with the id `after`.

        Returns:
            The patch. None if `after` is the last version. The last full copy if the folder does
            not have `after`, because it is None, too old, or was forgotten.

        Raises:
            FileNotFoundError: the folder has no full copy, or lacks a file.
            ValueError: a file is damaged.
        """
        op = "WeightPatch.load"
        path = folders.folder_path(op, folder)
        if after is not None:
            checks.require_type(op, "after", after, str, "the id of a version, or None")
        while True:
            versions = folders.read_index(path)
            if not versions:
                raise FileNotFoundError(f"dct::{op}: folder must have a full copy, got {path}")
            step = folders.next_step(versions, after)
            if step is None:
                return None
            try:
                pieces = [_read(op, path / name) for name in step.files]
            except FileNotFoundError:
                if folders.read_index(path) == versions:
                    raise
                continue  # the publisher has removed the files after the index was read
            found = {(piece.id, piece.base, piece.version) for piece in pieces}
            if found != {(step.id, step.base, step.version)}:
                rule = f"{(step.id, step.base, step.version)} as in its index"
                checks.fail(op, "folder", rule, found, verb="have")
            parts = [part for piece in pieces for part in piece.parts]
            return WeightPatch(step.id, step.base, step.version, parts)

    def header(self) -> str:
        """Everything except the data: a checksum of 8 digits, and JSON."""
        data = [part.data for part in self.parts]
        rows = zip(self.parts, checksums(data), strict=True)
        content = {
            "format": FORMAT,
            "id": self.id,
            "base": self.base,
            "version": self.version,
            "parts": [part.to_json() for part in self.parts],
            "data": [[part.data.numel(), check] for part, check in rows],
        }
        text = json.dumps(content)
        return f"{zlib.crc32(text.encode()):08x}{text}"

    def _write(self, file: BinaryIO, name: str) -> None:
        tensors = {str(index): part.data for index, part in enumerate(self.parts)}
        write_tensors(file, tensors, {KEY: self.header()}, name)

    def _together(self, op: str) -> Any:
        """A context manager in which an error of one rank is raised on all ranks."""
        if self.group is None:
            return contextlib.nullcontext()
        device = self.parts[0].data.device if self.parts else torch.device("cpu")
        return raising_together(op, self.group, timeout_of(self.group, device))


def require_unsharded(op: str, patch: WeightPatch) -> None:
    if patch.group is not None:
        got = f"the shards of 1 of {patch.group.size()} ranks"
        checks.fail(op, "patch", "of whole tensors (save works with shards)", got)


def from_header(op: str, arg: str, header: str, data: Sequence[Tensor]) -> WeightPatch:
    """Build a patch from its header and data. If one is damaged, raise an error that names `arg`.

    Args:
        data: uint8 tensors, in the order of the header.
    """
    try:
        if f"{zlib.crc32(header[8:].encode()):08x}" != header[:8]:
            raise ValueError("a header with another checksum")
        content = json.loads(header[8:])
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}")
        found = [[*pair] for pair in zip(map(Tensor.numel, data), checksums([*data]), strict=True)]
        if found != content["data"]:
            raise ValueError("data with other checksums than those in its header")
        rows = zip(content["parts"], data, strict=True)
        parts = [Part.from_json(entry, tensor) for entry, tensor in rows]
        patch = WeightPatch(content["id"], content["base"], content["version"], parts)
        if type(patch.id) is not str or type(patch.version) is not int:
            raise ValueError(f"id {patch.id!r} and version {patch.version!r}")
        if any((part.old is None) != patch.is_full for part in parts):
            raise ValueError(f"base {patch.base!r}, which differs from its entries")
    except (ValueError, TypeError, KeyError) as error:
        fail_damaged(op, arg, error)
    return patch


def fail_damaged(op: str, arg: str, error: Exception) -> NoReturn:
    rule = f"an undamaged patch of format {FORMAT}"
    raise ValueError(f"dct::{op}: {arg} must be {rule}, got {error}") from error


def _read(op: str, path: Path) -> WeightPatch:
    import safetensors

    if not path.exists():
        raise FileNotFoundError(f"dct::{op}: folder must have the file {path.name}, got {path}")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            found = [file.get_tensor(str(index)) for index in range(len(file.keys()))]
            header = file.metadata()[KEY]
    except (safetensors.SafetensorError, TypeError, KeyError) as error:
        fail_damaged(op, str(path), error)
    data = [tensor.view(torch.uint8).clone() for tensor in found]
    return from_header(op, str(path), header, data)


def _tensor(raw: bytearray) -> Tensor:
    if not raw:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(raw, dtype=torch.uint8)  # without a copy
