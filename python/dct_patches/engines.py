"""Patches in the formats of inference engines."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import xxhash
import zstandard
from torch import Tensor

from dct_kernels import checks

from .files import logger, replacing, write_tensors
from .part import Part

Changes = Iterable[tuple[Part, Tensor, Tensor]]  # the values before and after the patch, [numel]


class SparseValues(NamedTuple):
    """The fields of vLLM's `SparseWeightPatch`, in its order."""

    name: str
    indices: Tensor
    values: Tensor
    full_shape: tuple[int, ...]


def indices_and_values(op: str, changes: Changes) -> list[SparseValues]:
    found = []
    for part, old, new in changes:
        differs = (old.view(torch.uint8) != new.view(torch.uint8)).view(-1, old.itemsize).any(1)
        index = differs.nonzero().flatten()
        if not index.numel():
            continue
        if not new.is_floating_point():
            checks.fail(op, "patch", f"of floating-point tensors, like {part.name!r}", new.dtype)
        if (numel := torch.Size(part.shape).numel()) >= 2**31:
            rule = f"fewer than 2**31 elements per tensor, like {part.name!r}"
            checks.fail(op, "patch", rule, numel, verb="have")
        values = new[index]
        if values.isnan().any():
            got = f"NaN in {part.name!r} at {part.offset + int(index[values.isnan()][0])}"
            checks.fail(op, "patch", "values without NaN", got, verb="have")
        found.append(SparseValues(part.name, (index + part.offset).int(), values, part.shape))
    return found


def save_delta(op: str, changes: Changes, version: int, folder: Path, encoding: str) -> None:
    """Write the folder of one version."""
    path, file_name = folder / f"weight_v{version:06d}", "model-00000-of-00001.safetensors"
    if path.exists():
        rule = "no folder of this version (an engine may have read it; confirm a saved patch)"
        checks.fail(op, "folder", rule, path, FileExistsError, verb="have")
    tensors, sums = {}, {}
    for part, *pair in changes:
        old, new = (values.view(torch.uint8).cpu().numpy() for values in pair)
        index = np.flatnonzero(old != new)
        if not len(index):
            continue
        difference = (old ^ new).tobytes()
        if encoding == "overwrite":
            if len(new) >= 2**32:
                rule = f"tensors of less than 4 GiB, like {part.name!r} (use encoding='xor')"
                checks.fail(op, "patch", rule, f"{len(new)} bytes", verb="have")
            numbers = np.append(len(index), index).astype("<u4")
            difference = numbers.tobytes() + new[index].tobytes()
        raw = zstandard.ZstdCompressor(level=1).compress(difference)
        tensors[part.name] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        sums[part.name] = xxhash.xxh3_128_hexdigest(new.data)
    metadata = {"version": f"{version:06d}", "base_version": f"{version - 1:06d}"}
    metadata |= {"compression_format": "zstd", "checksum_format": "xxh3-128"}
    metadata["delta_encoding"] = encoding
    content = {"metadata": metadata, "weight_map": dict.fromkeys(tensors, file_name)}
    with replacing(path) as temporary:
        temporary.mkdir(parents=True, exist_ok=True)
        with open(temporary / file_name, "wb") as file:
            write_tensors(file, tensors, sums)
        (temporary / "model.safetensors.index.json").write_text(json.dumps(content))
    logger.info("saved delta checkpoint %s", path)
