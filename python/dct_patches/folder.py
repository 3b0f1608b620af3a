"""The index of a folder: which files hold which version of the weights, in order."""

import itertools
import json
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from dct_kernels import checks

from .tensor_files import replacing

INDEX, FORMAT = "index.json", 1


class Version(NamedTuple):
    """A version of the weights. Its base is the version before it in the index.

    Attributes:
        version: its number.
        id: its random id.
        patch: the files of the patch from its base. None in the first version of an index.
        full: the files of a full copy, or None. The first version has a full copy.
    """

    version: int
    id: str
    patch: list[str] | None
    full: list[str] | None


class Step(NamedTuple):
    """What a reader reads next: the id, base and number of a patch or full copy, and its files."""

    id: str
    base: str | None
    version: int
    files: list[str]


def folder_path(op: str, folder: str | PathLike[str]) -> Path:
    checks.require_type(op, "folder", folder, (str, PathLike), "a path")
    return Path(folder)


def read_index(folder: Path) -> list[Version]:
    """The versions in a folder, oldest first. Empty if there is no index.

    Raises:
        ValueError: the index is damaged, or from another version of the library.
    """
    path = folder / INDEX
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}")
        versions = [Version(**entry) for entry in content["versions"]]
        if versions[0].full is None or any(version.patch is None for version in versions[1:]):
            raise ValueError("versions without files")
        if any(Path(name).name != name for name in all_files(versions)):
            raise ValueError("files of other folders")
    except FileNotFoundError:
        return []
    except (ValueError, TypeError, LookupError) as error:
        rule = f"an undamaged index of format {FORMAT} (start a new folder with a full copy)"
        raise ValueError(f"dct_patches: {path} must be {rule}, got {error!r}") from error
    return versions


def write_index(folder: Path, versions: list[Version]) -> None:
    content = {"format": FORMAT, "versions": [version._asdict() for version in versions]}
    with replacing(folder / INDEX) as file:
        file.write(json.dumps(content, indent=1).encode())


def with_files(
    op: str, versions: list[Version], version: int, id: str, base: str | None, files: list[str]
) -> list[Version]:
    """The index with the files of one more patch, or of a full copy if `base` is None.

    A full copy is the first version, or a copy of the last one. A patch follows the last version,
    or replaces it if both have the same base.
    """
    last = versions[-1].id if versions else None
    if base is None:
        if not versions:
            return [Version(version, id, None, files)]
        if id == last:
            return [*versions[:-1], versions[-1]._replace(full=files)]
    elif base == last or (len(versions) > 1 and base == versions[-2].id and not versions[-1].full):
        before = versions if base == last else versions[:-1]
        return [*before, Version(version, id, files, None)]
    got = f"{id} with base {base}"
    if not versions:
        checks.fail(op, "patch", "a full copy in a new folder (save publisher.full() first)", got)
    rule = f"the folder's last version, {last} (resume the publisher, or use a new folder)"
    checks.fail(op, "patch", rule, got, verb="follow")


def pruned(versions: list[Version], keep: int) -> list[Version]:
    """The index from the last full copy on that precedes the last `keep` patches."""
    starts = [i for i, version in enumerate(versions) if version.full and i < len(versions) - keep]
    if not starts:
        return versions
    return [versions[starts[-1]]._replace(patch=None), *versions[starts[-1] + 1 :]]


def next_step(versions: list[Version], after: str | None) -> Step | None:
    """What to read after the version with the id `after`, see `WeightPatch.load`."""
    for base, (version, id, patch, _) in itertools.pairwise(versions):
        if base.id == after:
            return Step(id, base.id, version, patch or [])
    if versions[-1].id == after:
        return None
    version, id, files = [(v.version, v.id, v.full) for v in versions if v.full][-1]
    return Step(id, None, version, files)


def file_name(version: int, id: str, kind: str, rank: int) -> str:
    return f"{version:06d}-{id[:12]}-{kind}-{rank}.safetensors"


def all_files(versions: list[Version]) -> set[str]:
    return {name for version in versions for name in (version.patch or []) + (version.full or [])}


def remove_files(folder: Path, names: set[str]) -> None:
    for name in names:
        (folder / name).unlink(missing_ok=True)


def remove_unlisted_files(folder: Path) -> None:
    """Remove the files that a publisher left behind when it was stopped."""
    found = {path.name for path in folder.glob("*.safetensors")}
    found |= {path.name for path in folder.glob(".*.tmp")}
    remove_files(folder, found - all_files(read_index(folder)))
