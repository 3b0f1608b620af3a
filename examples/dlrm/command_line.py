"""What commands share: how they read their arguments, where results go, and how they end.

Imports nothing that takes long or may be missing: `exit_status` has a word for that, too.
"""

import argparse
import contextlib
import errno
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Collection, Iterator
from itertools import count
from pathlib import Path
from typing import NoReturn

from .errors import UsageError, WorkerError

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The extra `examples`: what the programs need beside torch, {module: its package}.
EXTRA = {"numpy": "numpy", "sklearn": "scikit-learn", "matplotlib": "matplotlib", "rich": "rich"}


class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults shown, paragraphs kept."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        plain = action.default is None or action.default is False
        return action.help if plain else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, and which help has it, without the usage.

    The usage would push the line off the screen.

    Takes no abbreviations: a script's would change its meaning with the next option's name.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        told, shown = "--help", self._option_string_actions.get("--help")
        named = re.match(r"argument (\S+):", message)
        if isinstance(shown, _ShortHelp) and not (named and named[1] in shown.const):
            told = "--help-all"
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} {told}\n")


class _ShortHelp(argparse.Action):
    """Prints the help of the options in `const` alone, with an epilog of its own, and exits."""

    def __init__(self, option_strings: list[str], epilog: str, **kwargs: object) -> None:
        super().__init__(option_strings, nargs=0, default=argparse.SUPPRESS, **kwargs)
        self._epilog = epilog

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        for action in parser._actions:
            if action is not self and not self.const & {*action.option_strings}:
                action.help = argparse.SUPPRESS
        parser.epilog = self._epilog
        parser.print_help()
        parser.exit()


def add_two_helps(parser: argparse.ArgumentParser, most: Collection[str], epilog: str) -> None:
    """--help with the options in `most`, --help-all with all of them, by group.

    Args:
        parser: made with add_help=False.
        epilog: of --help.
    """
    shown = frozenset(most) | {"--help-all"}
    parser.add_argument(
        *("-h", "--help"),
        action=_ShortHelp,
        const=shown,
        epilog=epilog,
        help="the options that most people need",
    )
    parser.add_argument("--help-all", action="help", help="all options, by group")


def add_version(parser: argparse.ArgumentParser) -> None:
    import torch

    import dct_kernels

    version = f"%(prog)s {dct_kernels.__version__} (torch {torch.__version__})"
    parser.add_argument("--version", action="version", version=version)


def add_out(parser: argparse.ArgumentParser, folder: str, result: str) -> None:
    """--out and --overwrite, as `results_folder` reads them; `result` names the main file."""
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help=f"folder for the results (default: {folder}; where that exists {folder}-2, ...)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help=f"replace the {result} that DIR holds already"
    )


def results_folder(options: argparse.Namespace, folder: str, result: str, *others: str) -> Path:
    """--out, or a new folder; made before the work begins, not after it.

    Args:
        result, others: the files that will be written there.

    Raises:
        UsageError: it cannot be made or written to, or holds results that would be lost.
    """
    if options.out is None:
        with writing_to(folder):
            return _new_folder(Path(folder))
    make_folder(options.out, result, *others)
    if (options.out / result).exists() and not options.overwrite:
        raise UsageError(
            f"--out must be without a {result}, got {options.out}, which has one: --overwrite "
            "replaces it"
        )
    (options.out / result).unlink(missing_ok=True)
    return options.out


def make_folder(folder: Path, *names: str) -> None:
    """Make --out, if it is not there, for files of these names.

    Raises:
        UsageError: it cannot be made, or a file cannot be written there.
    """
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".writable").touch()
        (folder / ".writable").unlink()
        for path in (folder / name for name in names):
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))


@contextlib.contextmanager
def writing_to(folder: Path | str) -> Iterator[None]:
    """An OSError within becomes a UsageError about --out."""
    try:
        yield
    except OSError as error:
        rule = "--out must be a folder that can be written to"
        raise UsageError(f"{rule}, got {folder}: {error}") from None


def _new_folder(folder: Path) -> Path:
    for number in count(1):
        path = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path


def on_ending_signals(handler: Callable | signal.Handlers) -> None:
    """Handle them so, but for those that are ignored: nohup and background jobs mean it."""
    for number in ENDING_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def exit_status(command: str, work: Callable[[], int | None]) -> int:
    """The status of a command that does `work`; if it fails, one line on stderr says why.

    SIGTERM and SIGHUP do as Ctrl-C does: an exception, so that contexts are left in order. Where
    nobody reads any longer what it prints (`| head`), it ends without a word.
    """
    before = [signal.getsignal(number) for number in ENDING_SIGNALS]
    on_ending_signals(signal.default_int_handler)
    try:
        try:
            return work() or 0
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        return 128 + signal.SIGPIPE
    except (UsageError, WorkerError) as error:
        text, status = str(error), 1
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRA:
            raise
        text = f"{missing} is not installed: pip install {' '.join(EXTRA.values())}"
        status = 1
    except KeyboardInterrupt as interrupt:
        text = ": ".join(["interrupted", *interrupt.args])
        status = 130
        before = [signal.SIG_DFL] * len(before)  # a second one ends it at once, without a word
    finally:
        for number, handler in zip(ENDING_SIGNALS, before, strict=True):
            signal.signal(number, handler)
    print(f"{command}: {text}", file=sys.stderr)
    return status


def _nobody_reads() -> bool:
    """Whether the reader of stdout is gone. Then it leads nowhere: Python flushes it once more."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    gone = bool(poll.poll(0))  # of a closed pipe an error is always reported
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return gone
