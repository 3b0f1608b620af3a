"""docs/kernels.md lists every planted fault and the nets that catch it."""

from pathlib import Path

import planted
from emulation import test_planted_faults as emulated
from ptx import test_planted_faults as ptx

PAGE = Path(__file__).parents[1] / "docs" / "kernels.md"
BY = {"none": "yes", "thread": "under TSan", "address": "under ASan and UBSan"}


def test_every_fault_is_caught_and_in_the_table():
    lines = ["| fault | of | `emulated` | `ptx-cuda` |", "|---|---|---|---|"]
    for name, fault in planted.FAULTS.items():
        assert name in emulated.CAUGHT or name in ptx.CAUGHT, name
        by_emulator = BY[emulated.CAUGHT[name][1]] if name in emulated.CAUGHT else ""
        by_executor = "yes" if name in ptx.CAUGHT else ""
        lines.append(f"| {name} | `{fault.op}` | {by_emulator} | {by_executor} |")
    table = "\n".join(lines)
    assert table in PAGE.read_text(), f"the table as it is now:\n{table}"


def test_nets_name_faults_that_are_there():
    assert {*emulated.CAUGHT, *ptx.CAUGHT} == {*planted.FAULTS}
