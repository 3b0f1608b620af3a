"""Random programs find planted defects and report them."""

import threading

import pytest
import torch.distributed as dist

from dct_parallel import Compressor
from reliability import programs
from reliability.pool import Failed, Pool


def _forgets_an_entry():
    pack = Compressor.pack

    def planted(self, *args):
        payload = pack(self, *args)
        self.residual[7:8] = 0
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


def _hangs(rank):
    if rank == 1:
        threading.Event().wait()


def _planted(rank, plant, entry_point, settings, calls):
    plant()
    programs.play(rank, entry_point, settings, calls)


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
    """One of the first programs for two ranks fails."""
    drawn = (programs.draw_program(entry_point, number, 0) for number in range(40))
    with Pool(2) as pool, pytest.raises(Failed, match=text):
        for ranks, *program in drawn:
            if ranks == 2:
                pool.call(_planted, plant, entry_point, *program)


def test_hanging_rank_is_reported():
    with Pool(2) as pool:
        with pytest.raises(Failed, match="rank 1 did not return"):
            pool.call(_hangs, seconds=2)
        assert pool.call(max, 1) == [1, 1]  # in new processes
