"""What ends a command with a sentence instead of a traceback."""


class UsageError(Exception):
    """What the user gave cannot be used; the text says what and why."""


class WorkerError(Exception):
    """A local rank failed; the text is its message."""
