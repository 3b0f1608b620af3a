"""Files that are there whole or not at all."""

import os
from pathlib import Path


def write(path: Path, content: bytes) -> None:
    """Replace the file: readers, and whatever ends this process, find the old one or the new one.

    It is on the disk when this returns.
    """
    aside = path.with_name(f"{path.name}.part")
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
