"""The code of README.md runs as written."""

import ast
import re

from support.programs import ROOT, run

README, DOCS = ROOT / "README.md", ROOT / "docs"
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


def test_the_hook_as_in_the_diff(tmp_path):
    """Applies the diff and runs the program, with format="int4" and with the density for SGD."""
    text = README.read_text()
    (diff,) = re.findall(r"```diff\n(.*?)```", text, re.DOTALL)
    assert re.findall(r"^.", diff, re.MULTILINE) == [" ", "+", "+"]
    (imports,) = re.findall(r"`(from dct_parallel import \w+, \w+)`", text)
    int4 = MODEL + re.sub(r"^.", "", diff, flags=re.MULTILINE) + LOOP
    programs = [int4, int4.replace('format="int4"', re.search(r": (density=[\d.]+)", diff)[1])]
    script = tmp_path / "hook.py"
    script.write_text(f"{START}{imports}\n{''.join(programs)}dist.destroy_process_group()\n")
    plans = run(script, tmp_path)
    assert "density 0.005" in plans and "int4" in plans
    lines = text.splitlines()
    assert lines.index("```diff") < 10 and lines.index("## Two commands") <= 25 and len(lines) <= 90


def test_the_line_that_installs_the_requirements_of_the_examples():
    line = re.search(r"`pip install\s+(numpy [^`]*)`", (DOCS / "reference/commands.md").read_text())
    extra = re.search(r"^examples = (.*)$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert line[1].split() == ast.literal_eval(extra[1])
