"""Errors that end a command with one line on stderr."""


class UsageError(Exception):
    """An option or a file cannot be used. The text names it, the rule and the value."""


class RankError(Exception):
    """A local rank failed. The text names the rank and has its traceback."""
