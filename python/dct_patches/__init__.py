"""dct_patches: send the weights that changed to inference processes, bit for bit.

The trainer keeps a snapshot of the weights that the receivers have:

    publisher = WeightPublisher(model.named_parameters())
    publisher.full().save(folder)
    patch = publisher.diff(model.named_parameters())
    patch.save(folder)
    publisher.confirm(patch)

A receiver follows the folder:

    subscriber = WeightSubscriber(model.named_parameters())
    subscriber.update(folder)

`broadcast_patch` sends patches over a process group, and `WeightPatch.to_bytes` as bytes. `part` is
a patch of one tensor, and `patch` contains its parts. `folder` is the index of saved patches, and
`engines` writes the formats of inference engines.
"""

from .broadcast import broadcast_patch
from .patch import WeightPatch
from .publisher import WeightPublisher
from .subscriber import WeightSubscriber

__all__ = ["WeightPatch", "WeightPublisher", "WeightSubscriber", "broadcast_patch"]


def __dir__() -> list[str]:
    return __all__
