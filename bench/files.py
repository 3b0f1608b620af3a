"""Files that are there whole or not at all."""

import contextlib
import json
from pathlib import Path

from bench.cli import UsageError


def write(path: Path, content: bytes) -> None:
    """Replace the file. A reader, and a run that is interrupted, finds the old or the new one.

    Raises:
        UsageError: it cannot be written, for example on a full disk. The old file is unchanged.
    """
    aside = path.with_name(f"{path.name}.part")
    try:
        aside.write_bytes(content)
        aside.replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def write_json(path: Path, content: object) -> None:
    """Write the content as JSON, indented."""
    write(path, (json.dumps(content, indent=1) + "\n").encode())
