"""Times, added up by hand; the counts that are committed cover what is timed on a GPU."""

import dataclasses

import pytest

from dct_kernels._schemas import OPS

from . import costs, roofline

KERNEL = costs.KernelCost(
    name="one",
    blocks=1000,
    resident=5,
    in_flight=4,
    trips=2.0,
    slots=3e6,
    half_rate=2e6,
    classes={},
    threads=0,
    sectors=0,
    conflicts=0,
)
COST = costs.Cost(
    op="op",
    detail="",
    density=None,
    elements=1_000_000,
    bytes=8.0,
    sectors_read=250_000,
    sectors_written=125_000,
    launches=2,
    kernels=[KERNEL],
)
GPU = roofline.Gpu("any", copy=3e12)


def test_times_of_a_large_call():
    found = roofline.time(COST, 100_000_000, GPU)
    assert found.memory == pytest.approx(100e6 * 12 / 3e12)
    assert found.issue == pytest.approx(100 * 3e6 / (132 * 4 * 1.755e9))
    assert found.half_rate == pytest.approx(100 * 2e6 / (132 * 4 * 1.755e9 * 0.5 * 0.95))
    assert found.latency == pytest.approx(0.6e-6 * 2 * 100 * 1000 / (132 * 5))
    assert found.launches == pytest.approx(7.4e-6)
    assert found.bound == "half rate"
    assert found.of_copy == pytest.approx((5e-6 + 800e6 / 3e12) / (7.4e-6 + found.half_rate))


def test_a_kernel_that_goes_in_rounds_uses_less_of_its_pipe():
    kernel = dataclasses.replace(KERNEL, name="row_pack_narrow_kernel<float, 8, 32>")
    found = roofline.time(dataclasses.replace(COST, kernels=[kernel]), 100_000_000, GPU)
    assert found.half_rate == pytest.approx(100 * 2e6 / (132 * 4 * 1.755e9 * 0.5 * 0.72))


def test_a_small_call_waits_for_one_block():
    found = roofline.time(COST, 1000, GPU)
    assert found.latency == pytest.approx(1.2e-6)
    assert found.bound == "launches"


def test_every_op_has_been_counted():
    _, counted = costs.load()
    assert {cost.op for cost in counted.values()} >= {*OPS, "r += g"}
