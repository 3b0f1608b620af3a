"""Checks that kernels do not issue more instructions or access more sectors than the baseline."""

import pytest

from .. import costs, counting, toolkit
from ..cases import CASES

pytestmark = pytest.mark.skipif(
    toolkit.missing() is not None, reason=f"not on this machine: {toolkit.missing()}"
)
TOLERANCE = 0.02
BY_DEFAULT = {
    "mask_pack 0.01 float32 bfloat16",
    "sample_threshold 16384",
    "scatter_unpack 0.01 8",
    "quantize_pack float32 int4",
    "dequantize_sum int4 8",
    "row_pack 256 0.05 float32",
    "row_gather 256 0.05",
    "row_unpack 256 0.05",
    "row_quantize 256 int4",
    "row_dequantize 256 int4",
    "row_dequantize_sum 64 int4 8",
    "diff_pack 0.03",
    "patch_apply 0.03",
}


def growth(now: costs.Cost, before: costs.Cost) -> list[str]:
    """Describe the costs that have grown by more than the tolerance."""

    def counts(cost: costs.Cost) -> dict[str, float]:
        accessed = sum(kernel.sectors for kernel in cost.kernels)
        moved = cost.sectors_read + cost.sectors_written
        return {"issue slots": cost.slots, "sectors accessed": accessed, "sectors moved": moved}

    after = counts(now)
    return [
        f"{name}: {after[name]:,.1f}, was {least:,.1f}"
        for name, least in counts(before).items()
        if after[name] > (1 + TOLERANCE) * least
    ]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=str(make), marks=() if str(make) in BY_DEFAULT else pytest.mark.large)
        for make in CASES
    ],
)
def test_costs_no_more_than_before(make):
    version, baseline = costs.load()
    counted = counting.count(make(), make.elements)
    assert counted.name in baseline, "a new case: run PYTHONPATH=tools python -m ptx baseline"
    found = growth(counted, baseline[counted.name])
    if version != toolkit.nvcc_version():
        pytest.skip(f"baseline.json is from nvcc {version}; growth: {found or 'none'}")
    assert found == []
