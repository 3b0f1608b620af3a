"""Patches in the formats of inference engines."""

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dct_kernels import checks

from .tensor_files import logger, replacing, sync_folder, write_tensors

INDEX = "model.safetensors.index.json"


class Change(NamedTuple):
    """A range of a tensor before and after a patch: contiguous tensors [n]."""

    name: str
    shape: tuple[int, ...]
    offset: int
    old: Tensor
    new: Tensor


class SparseValues(NamedTuple):
    """The fields of vLLM's `SparseWeightPatch`, in its order.

    Attributes:
        name: the name of the tensor.
        indices: int32 [n], positions in the flattened tensor, ascending.
        values: [n], the new values, in the tensor's dtype.
        full_shape: the shape of the whole tensor.
    """

    name: str
    indices: Tensor
    values: Tensor
    full_shape: tuple[int, ...]


def indices_and_values(op: str, changes: Iterable[Change]) -> list[SparseValues]:
    found = []
    for name, shape, offset, old, new in changes:
        differs = (_bytes(old) != _bytes(new)).view(-1, old.itemsize).any(1)
        index = differs.nonzero().flatten()
        if not index.numel():
            continue
        if not new.is_floating_point():
            checks.fail(op, "patch", f"of floating-point tensors, like {name!r}", new.dtype)
        if torch.Size(shape).numel() >= 2**31:
            rule = f"fewer than 2**31 elements per tensor, like {name!r}"
            checks.fail(op, "patch", rule, torch.Size(shape).numel(), verb="have")
        values = new[index]
        if values.isnan().any():
            at = int(index[values.isnan()][0]) + offset
            checks.fail(op, "patch", "values without NaN", f"NaN in {name!r} at {at}", verb="have")
        found.append(SparseValues(name, (index + offset).int(), values, shape))
    return found


def save_delta(
    op: str, changes: Iterable[Change], version: int, folder: Path, encoding: str
) -> None:
    """Write the folder of one version, under another name, and rename it."""
    path = folder / f"weight_v{version:06d}"
    temporary = folder / f".{path.name}.tmp"
    if path.exists():
        rule = "no folder of this version (an engine may have read it; confirm a saved patch)"
        checks.fail(op, "folder", rule, path, FileExistsError, verb="have")
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was stopped
    temporary.mkdir(parents=True)
    try:
        tensors, sums = {}, {}
        for change in changes:
            encoded = _encoded(op, change, encoding)
            if encoded is not None:
                tensors[change.name], sums[change.name] = encoded
        file_name = "model-00000-of-00001.safetensors"
        with replacing(temporary / file_name) as file:
            write_tensors(file, tensors, sums, str(path))
        metadata = {
            "version": f"{version:06d}",
            "base_version": f"{version - 1:06d}",
            "delta_encoding": encoding,
            "compression_format": "zstd",
            "checksum_format": "xxh3-128",
        }
        index = {"metadata": metadata, "weight_map": dict.fromkeys(tensors, file_name)}
        with replacing(temporary / INDEX) as file:
            file.write(json.dumps(index).encode())
        os.rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(folder)
    logger.info("saved delta checkpoint %s", path)


def _encoded(op: str, change: Change, encoding: str) -> tuple[Tensor, str] | None:
    """(the compressed difference, the checksum of the new bytes). None if nothing changed."""
    import xxhash
    import zstandard

    old, new = (_bytes(tensor).cpu() for tensor in (change.old, change.new))
    difference = old ^ new
    index = difference.nonzero().flatten()
    if not index.numel():
        return None
    if encoding == "overwrite":
        if new.numel() >= 2**32:
            rule = f"tensors of less than 4 GiB, like {change.name!r} (use encoding='xor')"
            checks.fail(op, "patch", rule, f"{new.numel()} bytes", verb="have")
        count = torch.tensor([index.numel()], dtype=torch.int64, device="cpu")
        numbers = torch.cat([count, index]).to(torch.uint32)
        difference = torch.cat([numbers.view(torch.uint8), new[index]])
    raw = zstandard.ZstdCompressor(level=1).compress(memoryview(difference.numpy()))
    compressed = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return compressed, xxhash.xxh3_128_hexdigest(memoryview(new.numpy()))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)
