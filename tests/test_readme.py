"""README.md: its program runs as written, its figures, picture and install line hold."""

import ast
import re

from programs import ROOT, blocks, run

from dct_parallel.exchange.codec import Settings
from dct_parallel.exchange.plan import BucketPlan
from dlrm.data.features import table_rows
from dlrm.models.dlrm import DLRM

README = ROOT / "README.md"


def test_the_hook(tmp_path):
    (block,) = blocks(README)
    script = tmp_path / "block.py"
    script.write_text(block)
    assert "transport: all_gather" in run(script, tmp_path)


def test_what_the_programs_need_is_the_extra():
    line = re.search(r"`pip install (numpy .*)`", README.read_text())
    extra = re.search(r"^examples = (.*)$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert line[1].split() == ast.literal_eval(extra[1])


def test_lines_are_short_enough_to_read():
    lines = README.read_text().splitlines()
    long = [line for line in lines if len(line) > 120 and not line.startswith(("|", "GLOO"))]
    assert not long and len(lines) <= 130


def test_the_bytes_of_the_headline():
    model = DLRM(table_rows(4000), 16, [512, 256, 64], [512, 256])
    names, sizes = zip(*[(n, p.numel()) for n, p in model.named_parameters()], strict=True)
    settings = Settings(0.005, "bfloat16")
    plan = BucketPlan(names, sizes, settings, "all_gather", ranks=2)
    assert (4 * plan.numel, plan.wire_bytes) == (5_523_396, 34_944)  # of a float32 ring, and DCT's
    text = README.read_text()
    assert "| 5,523,396 |" in text and "| 34,944 |" in text and "| 158.1x |" in text
    assert round(5_523_396 / 34_944, 1) == 158.1
