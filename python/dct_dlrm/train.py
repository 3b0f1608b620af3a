"""dct-train: compare ways of averaging gradients on DLRM."""

import sys
from collections.abc import Sequence

from .command_line import exit_status, results_folder


def main(arguments: Sequence[str] | None = None) -> int:
    """The console command: its exit status, with a message on stderr if that is not 0."""
    return exit_status("dct-train", lambda: _train(arguments))


def _train(arguments: Sequence[str] | None) -> None:
    # Imports in order of need: the help needs torch alone, and Ctrl-C is answered meanwhile.
    from .arguments import FOLDER, RESULT, parse

    options = parse(arguments)

    from . import progress
    from .data import criteo
    from .experiment import compare
    from .launch import is_first, launch

    if options.data is not None:
        criteo.check_file(options.data)
    if is_first():
        options.out = results_folder(options, FOLDER, RESULT)
    try:
        launch(compare, options.ranks, options)
    except KeyboardInterrupt:
        progress.restore_terminal()
        if (options.out / RESULT).exists():
            raise KeyboardInterrupt(f"finished runs are in {options.out}") from None
        raise


if __name__ == "__main__":
    sys.exit(main())
