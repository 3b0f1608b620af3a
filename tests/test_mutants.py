"""Every mutant is known to each checker of the CUDA kernels: caught, or, by the frozen one, missed."""

from emulation import test_mutants as emulated
from mutants import MUTANTS
from ptx import test_mutants as ptx


def test_the_executor_catches_every_mutant():
    assert ptx.CAUGHT.keys() == MUTANTS.keys()


def test_the_emulator_catches_or_misses_every_mutant():
    assert emulated.CAUGHT.keys() == MUTANTS.keys() - emulated.MISSED
    assert emulated.MISSED <= MUTANTS.keys()
