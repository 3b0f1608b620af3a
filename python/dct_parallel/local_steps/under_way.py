"""An exchange of weights that has begun."""

import dataclasses

from torch import Tensor


@dataclasses.dataclass
class UnderWay:
    """An exchange between its start and its end.

    Attributes:
        weights: of this rank as it began, flat; None if it ends in the same step.
        base: the next one, once the payloads are here.
    """

    weights: Tensor | None
    base: Tensor | None = None
