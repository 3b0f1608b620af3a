"""Gradients of DistributedDataParallel, compressed: a state and a communication hook."""

from .state import DCTState, dct_hook

__all__ = ["DCTState", "dct_hook"]
