"""Gradients of DistributedDataParallel, compressed.

Reading order: bucket_plan (what is sent, in numbers), transports (payloads of all ranks into their
mean), bucket (one bucket of DDP's), checkpoint, history, state (all of it behind torch's hook).
"""

from .history import RECENT_STEPS
from .state import DCTState, dct_hook

__all__ = ["RECENT_STEPS", "DCTState", "dct_hook"]
