"""Files of patches, which appear under their name only when they are complete, and their index."""

import contextlib
import itertools
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from torch import Tensor

from dct_kernels import checks

logger = logging.getLogger("dct_patches")

SECONDS_BETWEEN_LOGS = 10.0
INDEX, FORMAT = "index.json", 1


def folder_path(op: str, folder: str | os.PathLike[str]) -> Path:
    checks.require_type(op, "folder", folder, (str, os.PathLike), "a path")
    return Path(folder)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path for a file or folder. At the end, it is renamed to `path`.

    If an error is raised inside, the temporary file is removed, and `path` does not change.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        for written in (*temporary.glob("*"), temporary):
            _sync(written)
        os.replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_tensors(file: BinaryIO, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write uint8 [nbytes] tensors of any device in safetensors' format, and log the progress.

    `safetensors.torch.save_file` copies all tensors to the host first, raises no OSError, and
    writes files that other users cannot read.
    """
    ends = [0, *itertools.accumulate(tensor.numel() for tensor in tensors.values())]
    header: dict[str, object] = {"__metadata__": metadata}
    for key, (start, end) in zip(tensors, itertools.pairwise(ends), strict=True):
        header[key] = {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    file.write(len(raw).to_bytes(8, "little") + raw)
    logged = time.monotonic()
    for tensor, end in zip(tensors.values(), ends[1:], strict=True):
        file.write(memoryview(tensor.cpu().numpy()))
        if time.monotonic() - logged >= SECONDS_BETWEEN_LOGS:
            logger.info("wrote %.2f of %.2f GB", end / 1e9, ends[-1] / 1e9)
            logged = time.monotonic()


@contextlib.contextmanager
def reading(op: str, arg: str) -> Iterator[None]:
    """Raise a ValueError that names `arg` for any error of damaged content."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"dct::{op}: {arg} must exist, got no such file") from error
    except OSError:
        raise
    except Exception as error:
        rule = f"undamaged, of format {FORMAT} (load or save a full copy instead)"
        raise ValueError(f"dct::{op}: {arg} must be {rule}, got {error!r}") from error


class Version(NamedTuple):
    """An entry of an index: files of a patch of the version before it, of a full copy, or both."""

    version: int
    id: str
    patch: list[str] | None
    full: list[str] | None


def read_index(op: str, folder: Path) -> list[Version]:
    """The versions in a folder, oldest first. Empty if there is no index."""
    path = folder / INDEX
    if not path.exists():
        return []
    with reading(op, str(path)):
        content = json.loads(path.read_bytes())
        versions = [Version(**entry) for entry in content["versions"]]
        complete = versions[0].full and all(version.patch for version in versions[1:])
        inside = all(Path(name).name == name for name in _listed(versions))
        if content["format"] != FORMAT or not complete or not inside:
            raise ValueError(f"an index of format {content['format']!r} with invalid entries")
    return versions


def write_index(folder: Path, versions: list[Version], keep: int | None) -> None:
    """Write the index, and remove all files of other versions.

    With `keep`, it starts with the last full copy that precedes the last `keep` patches.
    """
    if keep is not None:
        starts = [i for i, v in enumerate(versions) if v.full and i < len(versions) - keep]
        first = starts[-1] if starts else 0
        versions = [versions[first]._replace(patch=None), *versions[first + 1 :]]
    content = {"format": FORMAT, "versions": [version._asdict() for version in versions]}
    with replacing(folder / INDEX) as temporary:
        temporary.write_text(json.dumps(content, indent=1))
    found = {*folder.glob("[0-9]*-*-*-*.safetensors"), *folder.glob(".[0-9]*.tmp")}
    for path in found - {folder / name for name in _listed(versions)}:
        path.unlink(missing_ok=True)


def _listed(versions: list[Version]) -> set[str]:
    return {name for version in versions for name in (version.patch or []) + (version.full or [])}


def with_files(op: str, versions: list[Version], new: Version, base: str | None) -> list[Version]:
    """The index with one more patch, which may replace the last one, or with a full copy."""
    ids = [version.id for version in versions]
    if base is None and (not ids or new.id == ids[-1]):
        patch = versions[-1].patch if versions else None
        return [*versions[:-1], new._replace(patch=patch)]
    if base in ids[-2:]:
        return [*versions[: ids.index(base) + 1], new]
    rule = f"the last version of the folder, {ids[-1] if ids else None}"
    rule += " (resume the publisher, or save publisher.full() in a new folder first)"
    checks.fail(op, "patch", rule, f"{new.id} with base {base}", verb="follow")
