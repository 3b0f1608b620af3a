"""Compresses the gradients of DistributedDataParallel, with a communication hook and its state."""

from .state import DCTState, dct_hook

__all__ = ["DCTState", "dct_hook"]
