"""Compare ways of averaging gradients on DLRM."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .command_line import exit_status, results_folder, writing_to
from .errors import UsageError


def main(arguments: Sequence[str] | None = None) -> int:
    """The console command: its exit status, with a message on stderr if that is not 0."""
    return exit_status("train_dlrm.py", lambda: _train(arguments))


def _train(arguments: Sequence[str] | None) -> None:
    # Imports in order of need: the help needs torch alone, and Ctrl-C is answered meanwhile.
    from .arguments import RESULT, parse

    options = parse(arguments)

    from . import progress
    from .data import criteo
    from .experiment import compare
    from .launch import is_first, launch

    if options.data is not None:
        criteo.check_file(options.data)
    if is_first():
        options.out = _folder(options)
    try:
        launch(compare, options.ranks, options)
    except KeyboardInterrupt:
        progress.restore_terminal()
        if (options.out / RESULT).exists():
            raise KeyboardInterrupt(f"finished runs are in {options.out}") from None
        raise


def _folder(options: argparse.Namespace) -> Path:
    """Where results go, and where there may be a checkpoint to go on from.

    Raises:
        UsageError: it cannot be used, or holds what would be lost.
    """
    from .arguments import FOLDER, RESULT
    from .checkpoint import MANIFEST

    saved = options.out is not None and os.path.exists(options.out / MANIFEST)
    if saved and options.resume:
        return options.out
    if saved and not options.overwrite:
        raise UsageError(
            f"--out must be without a checkpoint, got {options.out}, which has one: --resume goes "
            "on from it, --overwrite removes it"
        )
    folder = results_folder(options, FOLDER, RESULT, "history.json", "curves.png")
    with writing_to(folder):
        (folder / MANIFEST).unlink(missing_ok=True)
    return folder


if __name__ == "__main__":
    sys.exit(main())
