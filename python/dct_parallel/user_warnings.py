"""Warnings that point at the user's code, and the logger."""

import logging
import sys
import warnings
from types import FrameType

logger = logging.getLogger("dct")


def warn_user(text: str) -> None:
    """Warn at the location of the innermost call outside torch and these packages."""
    frame: FrameType | None = sys._getframe(1)
    level = 2  # the stacklevel of `frame`
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


_INSIDE = ("torch.", "dct_kernels.", "dct_parallel.", "dct_embeddings.")
