"""Writes files atomically."""

import contextlib
import json
from pathlib import Path

from bench.cli import UsageError


def write(path: Path, content: bytes) -> None:
    """Replace the file. If the run is interrupted, the file has either the old or new content."""
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
    """Write the content as indented JSON."""
    write(path, (json.dumps(content, indent=1) + "\n").encode())
