"""Writes files atomically."""

import contextlib
import json
from pathlib import Path

from bench.cli import UsageError


def write(path: Path, content: bytes) -> None:
    """Replace the file. Readers see the old or the new content, also if the run is interrupted.

    Raises:
        UsageError: the file cannot be written, for example if the disk is full. The old file stays.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def write_json(path: Path, content: object) -> None:
    """Write the content as JSON, indented."""
    write(path, (json.dumps(content, indent=1) + "\n").encode())
