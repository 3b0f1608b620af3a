"""A disk that is full, as far as this process can tell: no file becomes longer than some bytes."""

import contextlib
import resource


@contextlib.contextmanager
def full_disk(nbytes=50):
    """Print nothing within, because pytest keeps output in files."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
