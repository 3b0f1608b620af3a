"""Warnings that name the user's line."""

import sys
import warnings
from types import FrameType


def warn_user(text: str) -> None:
    """Warn at the innermost line outside of torch and of these packages."""
    frame: FrameType | None = sys._getframe(1)
    level = 2  # of this frame
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


_INSIDE = ("torch.", "dct_kernels.", "dct_parallel.", "dct_embeddings.")
