"""bench/gpu_check.sh, as far as it can be tried without a GPU."""

import subprocess
import sys
from pathlib import Path

from dct_bench.kernels.arguments import TIMED

GPU = Path(__file__).parents[2] / "bench" / "gpu"
# In a process of its own: the programs take over signals and the search path.
CASES = """
import bench
print(*sorted({case.op for case in bench.all_cases("cpu", 1 << 16)}))
"""


def test_every_op_is_timed():
    made = subprocess.run(
        [sys.executable, "-c", CASES], cwd=GPU, capture_output=True, text=True, timeout=60
    )
    assert made.stdout.split() == sorted(TIMED), made.stderr


def test_every_stage_has_a_limit_and_a_program():
    text = (GPU.parent / "gpu_check.sh").read_text()
    stages = text.partition("STAGES='\n")[2].partition("'\n")[0].splitlines()
    programs = {words[3] for words in map(str.split, stages) if words[2] == "python"}
    assert all(int(words[1]) > 0 for words in map(str.split, stages))
    assert {program for program in programs if not (GPU.parents[1] / program).exists()} == set()
