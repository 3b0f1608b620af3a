"""bench/table_memory.py: bytes of tables, counted, are those of the formula."""

import sys
from pathlib import Path

import torch

from dct_dlrm.launch import launch

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))
import table_memory  # noqa: E402

SMALL = ["--rows", "900", "--batch-size", "16", "--hash-size", "40", "--embedding-dim", "8"]
SMALL += ["--bottom", "8", "--top", "8", "--sync-every", "3"]


def _counted():
    options, periods = table_memory.parse([*SMALL, "--periods", "2"])
    found = {kind: table_memory.measure(kind, options, periods) for kind in table_memory.KINDS}
    for kind, (counted, expected) in found.items():
        assert counted == expected, kind
    of_kinds = [counted for counted, _ in found.values()]
    assert of_kinds == sorted(of_kinds) and len(set(of_kinds)) == 4
    assert of_kinds[1] > 1.8 * of_kinds[0]  # two replicas on two ranks, each of all tables


def test_bytes_by_formula():
    launch(_counted, 2)


def test_a_storage_is_counted_once():
    whole = torch.zeros(10)
    assert table_memory.tensor_bytes(whole, {"part": whole[2:4]}, [torch.zeros(3)]) == 52


def test_a_line():
    assert table_memory.line("dct", 3000, 2999, 2000) == "| dct | 3,000 | 2,999 | 1.50 |"
