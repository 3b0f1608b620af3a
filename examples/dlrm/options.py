"""Command-line helpers: argparse types and a help formatter."""

import argparse
import math
from collections.abc import Callable


class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults other than None and False, and keeps line breaks."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_default = action.default is not None and action.default is not False
        return super()._get_help_string(action) if has_default else action.help


def number(kind: type, allowed: Callable[[float], bool], rule: str) -> Callable:
    """An argparse type: a number for which `allowed` is true; `rule` describes such numbers."""

    def parse_number(text: str):
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not allowed(value):
            raise argparse.ArgumentTypeError(f"must be {rule}, got {text!r}")
        return value

    return parse_number


count = number(int, lambda n: n >= 1, "an integer >= 1")
positive = number(float, lambda x: 0 < x < math.inf, "a number > 0")
fraction = number(float, lambda x: 0 < x <= 1, "a number in (0, 1]")
