"""dct_parallel: data-parallel training with Dynamic Communication Thresholding.

    state = DCTState(ddp, density=0.005)
    ddp.register_comm_hook(state, dct_hook)

Each file holds one idea and stands on the one before: compressor (one tensor), exchange (payloads
between ranks), bucket and ddp (torch's DistributedDataParallel); wire counts bytes.
"""

from .compressor import Compressor
from .ddp import DCTState, dct_hook
from .wire import WireMeter

__all__ = ["Compressor", "DCTState", "WireMeter", "dct_hook"]
