"""What counted instructions and sectors predict of what is measured here (tests/ptx, `report`)."""

import functools
import re
import sys

from common import ROOT

sys.path.append(str(ROOT / "tests"))

from ptx import costs, roofline


def of_copy(result: dict, gpu: str | None) -> float | None:
    """As a fraction of a copy; None where it was not counted, or the GPU's rates are unknown."""
    known = next((known for known in roofline.GPUS if known.name in (gpu or "")), None)
    detail = re.sub(r"^\[\d+, ", "[B, ", result["case"])
    cost = next(
        (
            cost
            for cost in _counted().values()
            if (cost.op, cost.detail) == (result["op"], detail)
            and cost.density in (None, result["density"])
        ),
        None,
    )
    if known is None or cost is None:
        return None
    per_call = cost.elements if cost.op == "sample_threshold" else result["numel"]
    return roofline.time(cost, per_call, known).of_copy


@functools.cache
def _counted() -> dict[str, costs.Cost]:
    return costs.load()[1]
