"""Errors that end a command with one line on stderr."""


class UsageError(Exception):
    """An option or a file cannot be used. The message contains its name, the rule and the value."""


class RankError(Exception):
    """A local rank failed. The message contains the rank and its traceback."""
