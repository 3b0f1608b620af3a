"""Safetensors files of bytes, which appear under their name only when they are complete."""

import contextlib
import json
import logging
import os
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

logger = logging.getLogger("dct_patches")

SECONDS_BETWEEN_LOGS = 10.0


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file for writing. At the end, it is renamed to `path`.

    If an error is raised inside, the temporary file is removed, and `path` does not change.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Write renamed files of a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_tensors(
    file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], name: str
) -> None:
    """Write tensors in safetensors' format, one after the other, and log the progress.

    Args:
        tensors: uint8 [nbytes] tensors on any device.
        name: the name of the file, for the log.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    total = 0
    for key, tensor in tensors.items():
        offsets = [total, total + tensor.numel()]
        header[key] = {"dtype": "U8", "shape": [tensor.numel()], "data_offsets": offsets}
        total += tensor.numel()
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    file.write(struct.pack("<Q", len(raw)) + raw)
    done, logged = 0, time.monotonic()
    for tensor in tensors.values():
        file.write(memoryview(tensor.cpu().numpy()))
        done += tensor.numel()
        if time.monotonic() - logged >= SECONDS_BETWEEN_LOGS:
            logger.info("wrote %.2f of %.2f GB of %s", done / 1e9, total / 1e9, name)
            logged = time.monotonic()
