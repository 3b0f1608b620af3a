"""Each checker of the CUDA kernels knows every mutant."""

from emulation import test_mutants as emulated
from mutants import MUTANTS
from ptx import test_mutants as ptx


def test_the_executor_catches_every_mutant():
    assert ptx.CAUGHT.keys() == MUTANTS.keys()


def test_the_emulator_catches_or_misses_every_mutant():
    assert sorted([*emulated.CAUGHT, *emulated.MISSED]) == sorted(MUTANTS)
