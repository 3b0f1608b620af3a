"""dct-train: compare ways of averaging gradients on DLRM."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .arguments import parse
from .data import criteo
from .errors import UsageError
from .experiment import compare
from .launch import WorkerError, launch


def main(arguments: Sequence[str] | None = None) -> int:
    """The console command: its exit status, with a message on stderr if that is not 0."""
    options = parse(arguments)
    try:
        if options.data is not None:
            criteo.check_file(options.data)
        _make_folder(options.out)
        launch(compare, options.ranks, options)
    except (UsageError, WorkerError) as error:
        print(f"dct-train: {error}", file=sys.stderr)
        return 1
    return 0


def _make_folder(path: Path) -> None:
    """Before the training, not after it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        writable = os.access(path, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise UsageError(f"--out must be a folder that can be written to, got {path}")


if __name__ == "__main__":
    sys.exit(main())
