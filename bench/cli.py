"""Argument types, the results folder and the exit status, for the programs of bench."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NoReturn

from dct_kernels import backend_of
from dct_kernels.testing import available
from dlrm.errors import UsageError
from dlrm.options import Formatter, count, number, positive
from dlrm.options import fraction as density

__all__ = ["UsageError", "count", "density", "number", "positive"]  # names that programs import
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Parser(argparse.ArgumentParser):
    """A parser without abbreviated options. It prints an error in one line, without the usage."""

    def __init__(self, **kwargs: object) -> None:
        super().__init__(allow_abbrev=False, formatter_class=Formatter, **kwargs)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def several(item: Callable, known: Collection[str] = ()) -> Callable:
    """An argparse type: distinct items separated by commas, all in `known` if it is not empty."""

    def parse(text: str) -> list:
        values = [item(part) for part in text.split(",")]
        if len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"must have no value twice, got {text!r}")
        if known and not set(values) <= set(known):
            raise argparse.ArgumentTypeError(f"must be some of {','.join(known)}, got {text!r}")
        return values

    return parse


def announce_backend(device: str) -> None:
    """Print the backend of the ops on this device, in the header of a program.

    Raises:
        UsageError: it is the eager backend, and DCT_BACKEND does not select this backend.
    """
    backend = backend_of(device)
    if backend == "eager" and os.environ.get("DCT_BACKEND") != "eager":
        reason = available()["cuda" if device == "cuda" else "cpp"]
        rule = f"the backend on {device} must be compiled (or set DCT_BACKEND=eager)"
        raise UsageError(f"{rule}, got eager: {reason}")
    print(f"Backend on {device}: {backend}", flush=True)


def make_folder(folder: Path) -> None:
    """Create the results folder before the work starts, and check that it is writable.

    Raises:
        UsageError: the folder cannot be created or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".writable").touch()
        (folder / ".writable").unlink()
    except OSError as error:
        rule = "--out must be a folder that can be written to"
        raise UsageError(f"{rule}, got {folder}: {error}") from None


def exit_status(program: str, work: Callable[[], int | None]) -> int:
    """Call `work` and return the exit status. Print a UsageError or an interrupt in one line.

    SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does, so that context managers exit.
    """
    for signal_number in ENDING_SIGNALS:
        if signal.getsignal(signal_number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(signal_number, signal.default_int_handler)
    try:
        return work() or 0
    except UsageError as error:
        text, status = str(error), 1
    except KeyboardInterrupt:
        text, status = "interrupted", 130
    print(f"{program}: {text}", file=sys.stderr)
    return status
