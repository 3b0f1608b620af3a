"""Every mutant is one that both checkers of the CUDA kernels are known to catch."""

import pytest
from emulation import test_mutants as emulated
from mutants import MUTANTS
from ptx import test_mutants as ptx


@pytest.mark.parametrize("checker", [ptx, emulated], ids=["ptx-cuda", "emulated"])
def test_every_mutant_is_one_that_a_checker_catches(checker):
    assert checker.CAUGHT.keys() == MUTANTS.keys()
