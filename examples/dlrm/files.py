"""Files that are there whole or not at all."""

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

from .errors import UsageError


def write(path: Path, content: bytes) -> None:
    """Replace the file: readers, and whatever ends this process, find the old one or the new one.

    It is on the disk when this returns.

    Raises:
        UsageError: it cannot be written, say on a full disk; the old one is as it was.
    """
    aside = path.with_name(f"{path.name}.part")
    try:
        with open(aside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # of the new name
        finally:
            os.close(folder)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def write_json(path: Path, content: object) -> None:
    """`write` it, in lines."""
    write(path, (json.dumps(content, indent=1) + "\n").encode())


def write_figure(path: Path, figure: Any, **options: object) -> None:
    """`write` a figure of matplotlib, in the format that the name ends in."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix[1:], **options)
    write(path, drawn.getvalue())
