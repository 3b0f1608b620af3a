"""Local steps (local SGD): ranks take several optimizer steps before they average weights."""

from .averager import DCTAverager

__all__ = ["DCTAverager"]
