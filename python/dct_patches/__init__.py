"""dct_patches: send the weights that changed to inference processes, bit for bit.

`part` is a patch of one tensor or shard, and `patch` contains the parts of all tensors. `publisher`
and `subscriber` are its two sides. `files` writes folders of patches, `broadcast` sends patches
over a process group, and `engines` has the formats of inference engines.
"""

from .broadcast import broadcast_patch
from .patch import WeightPatch
from .publisher import WeightPublisher
from .subscriber import WeightSubscriber

__all__ = ["WeightPatch", "WeightPublisher", "WeightSubscriber", "broadcast_patch"]


def __dir__() -> list[str]:
    return __all__
