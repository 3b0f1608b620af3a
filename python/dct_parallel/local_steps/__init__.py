"""Weights of ranks that train on their own, averaged every few steps."""

from .averager import DCTAverager

__all__ = ["DCTAverager"]
