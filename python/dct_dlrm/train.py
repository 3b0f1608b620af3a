"""dct-train: compare ways of averaging gradients on DLRM."""

import argparse
import sys
from collections.abc import Sequence

from .arguments import FOLDER, RESULT, parse
from .command_line import exit_status, results_folder


def main(arguments: Sequence[str] | None = None) -> int:
    """The console command: its exit status, with a message on stderr if that is not 0."""
    options = parse(arguments)
    return exit_status("dct-train", lambda: _train(options))


def _train(options: argparse.Namespace) -> None:
    # Here, so that the help needs nothing beside torch.
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
        if (options.out / RESULT).exists():
            raise KeyboardInterrupt(f"runs that were finished are in {options.out}") from None
        raise


if __name__ == "__main__":
    sys.exit(main())
