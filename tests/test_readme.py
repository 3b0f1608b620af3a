"""README.md: its program runs as written, its figures, picture and install line hold."""

import ast
import re

from programs import ROOT, blocks, run

from dct_parallel.exchange.codec import Settings
from dct_parallel.exchange.plan import BucketPlan
from dlrm.data.features import table_rows
from dlrm.models.dlrm import DLRM

README = ROOT / "README.md"


LOOP = """
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
for step in range(4):
    optimizer.zero_grad()
    ddp(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
if dist.get_rank() == 0:
    print(state.plan())
del ddp, state
"""
START = """# torchrun
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
"""
MODEL = "model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Linear(512, 1))\n"


def test_the_hook_as_in_the_diffs(tmp_path):
    """What a user has after the lines with a plus are there."""
    text = README.read_text()
    diffs = re.findall(r"```diff\n(.*?)```", text, re.DOTALL)
    assert [re.findall(r"^.", diff, re.MULTILINE) for diff in diffs] == [[" ", "+", "+"]] * 2
    (imports,) = re.findall(r"`(from dct_parallel import .*)`", text)
    programs = [MODEL + re.sub(r"^.", "", diff, flags=re.MULTILINE) + LOOP for diff in diffs]
    script = tmp_path / "hook.py"
    script.write_text(f"{START}{imports}\n{''.join(programs)}dist.destroy_process_group()\n")
    plans = run(script, tmp_path)
    assert "density 0.005" in plans and "int4" in plans


def test_the_ops(tmp_path):
    (block,) = blocks(README)
    script = tmp_path / "block.py"
    script.write_text(block)
    run(script, tmp_path)


def test_what_the_programs_need_is_the_extra():
    line = re.search(r"`pip install (numpy .*)`", README.read_text())
    extra = re.search(r"^examples = (.*)$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert line[1].split() == ast.literal_eval(extra[1])


def test_lines_are_short_enough_to_read():
    lines = README.read_text().splitlines()
    long = [line for line in lines if len(line) > 120 and not line.startswith("|")]
    assert not long and len(lines) <= 110


def test_the_bytes_of_the_hook():
    model = DLRM(table_rows(4000), 16, [512, 256, 64], [512, 256])
    names, sizes = zip(*[(n, p.numel()) for n, p in model.named_parameters()], strict=True)
    settings = Settings(0.005, "bfloat16")
    plan = BucketPlan(names, sizes, settings, "all_gather", ranks=2)
    assert (4 * plan.numel, plan.wire_bytes) == (5_523_396, 34_944)  # of a float32 ring, and DCT's
    assert round(5_523_396 / 34_944, 1) == 158.1
    assert "| 158.1x |" in README.read_text()
