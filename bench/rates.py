"""Parses and formats link rates: bits per second, or None for no limit."""

import argparse

UNLIMITED = "unlimited"
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def parse_rate(text: str) -> float | None:
    """An argparse type: a rate such as "100mbit", "2.5gbit" or "unlimited"."""
    if text == UNLIMITED:
        return None
    try:
        rate = float(text[:-4]) * _UNITS[text[-4:]]
    except (ValueError, KeyError):
        rate = 0.0
    if not 1e6 <= rate <= 400e9:
        rule = f"1mbit to 400gbit or {UNLIMITED}, such as 100mbit or 2.5gbit"
        raise argparse.ArgumentTypeError(f"must be {rule}, got {text!r}")
    return rate


def describe_rate(rate: float | None) -> str:
    """Format a rate for output, such as "1 Gbit/s"."""
    if rate is None:
        return UNLIMITED
    return f"{rate / 1e9:g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:g} Mbit/s"
