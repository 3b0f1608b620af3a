"""Random programs find planted defects and report them."""

import random
import threading

import pytest
import torch.distributed as dist

from dct_parallel import Compressor
from reliability import programs
from reliability.pool import Failed, Pool

_SHAPES = [(), (130,), (40, 33, "t"), (900,)]
_OPTIONS = {"format": "bfloat16", "density": 0.02}
SETTINGS = {
    "hook": {
        "ranks": 2,
        "shapes": _SHAPES,
        "frozen": [],
        "options": _OPTIONS | {"start_step": 0},
        "bucket_mb": 0.004,
        "view": False,
        "scale": None,
    },
    "averager": {
        "ranks": 2,
        "shapes": _SHAPES,
        "dtypes": ["float32"] * len(_SHAPES),
        "frozen": [],
        "options": _OPTIONS | {"period": 5},
    },
    "fsdp2": {
        "mesh": (2, 1),
        "units": [[(130,), (40, 33)], [(900,)]],
        "frozen": False,
        "options": _OPTIONS | {"start_step": 0},
        "scale": None,
    },
}


def _forgets_an_entry():
    pack = Compressor.pack

    def planted(self, *args):
        payload = pack(self, *args)
        self.residual[7] = 0
        return payload

    Compressor.pack = planted


def _takes_nothing_back():
    Compressor.take_back = lambda self, mean=None: None


def _differs():
    unpack = Compressor.unpack

    def planted(self, payloads, out, out_scale=None):
        status = unpack(self, payloads, out, out_scale)
        out[3] += 2.0**-10 * dist.get_rank()
        return status

    Compressor.unpack = planted


def _hangs():
    if dist.get_rank() == 1:
        threading.Event().wait()


def _planted(rank, plant, entry_point):
    plant()
    draw = random.Random(1)
    draw_step = programs.module_of(entry_point).draw_step
    calls = [("step", draw_step(draw, 2)) for _ in range(20)]
    programs.play(rank, entry_point, SETTINGS[entry_point], calls)


def _parameters(entry_point, plant, text, large=True):
    marks = [pytest.mark.large] if large else []
    return pytest.param(entry_point, plant, text, id=f"{entry_point}{plant.__name__}", marks=marks)


@pytest.mark.parametrize(
    ("entry_point", "plant", "text"),
    [
        _parameters("hook", _forgets_an_entry, "entries of .* are not conserved", large=False),
        _parameters("averager", _forgets_an_entry, "are not conserved"),
        _parameters("fsdp2", _forgets_an_entry, "are not conserved"),
        _parameters("hook", _takes_nothing_back, "are not conserved"),
        _parameters("fsdp2", _takes_nothing_back, "are not conserved"),
        _parameters("hook", _differs, "gradients differ between ranks"),
        _parameters("averager", _differs, "weights differ between ranks"),
    ],
)
def test_programs_find_planted_defects(entry_point, plant, text):
    with Pool(2) as pool, pytest.raises(Failed, match=text):
        pool.call(_planted, plant, entry_point)


def test_hanging_rank_is_reported():
    with Pool(2) as pool:
        with pytest.raises(Failed, match="rank 1 did not return"):
            pool.call(_planted, _hangs, "averager", seconds=2)
        assert pool.call(max, 1) == [1, 1]  # in new processes


class _FailsAt:
    """A pool in which programs fail if they contain all needed calls."""

    def __init__(self, *needed):
        self._needed = set(needed)

    def call(self, function, entry_point, settings, calls):
        if self._needed <= set(calls):
            raise Failed("both")


def test_failing_program_is_shortened():
    calls = [(name,) for name in "abcdefg"]
    program, text = programs.shrink(_FailsAt(("b",), ("f",)), "hook", (2, {}, calls), "")
    assert program == (2, {}, [("b",), ("f",)]) and text == "both"


def test_program_is_determined_by_number_and_seed():
    for entry_point in programs.COUNTS:
        assert programs.draw_program(entry_point, 3, 0) == programs.draw_program(entry_point, 3, 0)
        assert programs.draw_program(entry_point, 3, 0) != programs.draw_program(entry_point, 3, 1)
