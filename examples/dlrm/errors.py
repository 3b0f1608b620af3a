"""Errors that end a command with one line on stderr."""


class UsageError(Exception):
    """An unusable option or file. The message contains the name, the rule and the value."""


class RankError(Exception):
    """A local rank failed. The message contains the rank and its traceback."""
