"""dct_parallel: training with Dynamic Communication Thresholding.

Data parallel: only the largest gradients cross.

    state = DCTState(ddp, density=0.005)
    ddp.register_comm_hook(state, dct_hook)

Model parallel: only the largest activations of every row cross, and their gradients.

    values, positions = pack(x, k)  # on one device; what carries them to the next is up to you
    y = unpack(values, positions, width)
    y = all_to_all_rows(x, splits, density=0.05)

Each file holds one idea and stands on the one before: compressor (one tensor), exchange (payloads
between ranks), bucket and ddp (torch's DistributedDataParallel); beside them rows (one cut of a
model) and all_to_all, all_gather (rows between ranks); wire counts bytes.
"""

from .all_gather import all_gather_rows
from .all_to_all import all_to_all_rows
from .compressor import Compressor
from .ddp import DCTState, dct_hook
from .rows import RowPack, RowUnpack, pack, unpack
from .wire import WireMeter

__all__ = [
    "Compressor",
    "DCTState",
    "RowPack",
    "RowUnpack",
    "WireMeter",
    "all_gather_rows",
    "all_to_all_rows",
    "dct_hook",
    "pack",
    "unpack",
]
