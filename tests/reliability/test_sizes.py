"""The checks of large tensors, on small ones: they pass, and see one wrong number at the end."""

from types import SimpleNamespace

import pytest

from dct_kernels import testing
from reliability import sizes


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(sizes, "NUMEL", 2**20 + 2**14 + 5)
    monkeypatch.setattr(sizes, "BEYOND", 2**20)
    monkeypatch.setattr(sizes, "PERIOD", 10_007)
    monkeypatch.setattr(sizes, "ROWS", 515)
    monkeypatch.setattr(sizes, "SAMPLED", [0, 511, 512, 514])


@pytest.mark.parametrize("door", sizes.COUNTS)
def test_every_op(door):
    assert sizes.run(door, 0, 1, 0)["failures"] == []


@pytest.mark.parametrize("door", sizes.COUNTS)
def test_a_wrong_number_is_seen(door, monkeypatch):
    ops = testing.backends()["cpp"]

    def wrong(*arguments):
        result = getattr(ops, door)(*arguments)
        written = {
            "mask_pack": arguments[0],
            "quantize_pack": arguments[0],
            "scatter_unpack": arguments[1],
            "dequantize_sum": arguments[1],
            "dequantize_sum_pack": arguments[1],
        }.get(door, result[0] if isinstance(result, tuple) else result)
        written.view(-1)[-1] = 77
        return result

    broken = SimpleNamespace(**{**vars(ops), door: wrong})
    monkeypatch.setattr(testing, "backends", lambda: {"cpp": broken})
    assert len(sizes.run(door, 0, 1, 0)["failures"]) == 1
