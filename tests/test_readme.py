"""README.md: its Python blocks run as written, its figures and its install line hold."""

import ast
import re

import pytest
import torch
from programs import ROOT, blocks, in_forks, run

from dct_dlrm.data.features import table_rows
from dct_dlrm.models.dlrm import DLRM
from dct_parallel.exchange.all_gather import AllGather
from dct_parallel.exchange.codec import Settings
from dct_parallel.exchange.plan import BucketPlan

README = ROOT / "README.md"
BLOCKS = blocks(README)


def test_every_block_is_run():
    assert len(BLOCKS) == 3


def _written(block, folder):
    script = folder / "block.py"
    script.write_text(block)
    return script


def test_hook(tmp_path):
    printed = run(_written(BLOCKS[0], tmp_path), tmp_path)
    assert "transport: all_gather" in printed


@pytest.mark.parametrize("index", [pytest.param(1, id="rows"), pytest.param(2, id="ops")])
@in_forks
def test_block(run, index, tmp_path):
    run(_written(BLOCKS[index], tmp_path), tmp_path)


def test_the_first_install_line_brings_what_the_commands_need():
    line = re.search(r"^pip install --no-build-isolation (.*)$", README.read_text(), re.MULTILINE)
    checkout, *packages = line[1].split()
    train = re.search(r"^train = (.*)$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert checkout == "."
    assert packages == ast.literal_eval(train[1])
    assert not set(line[1]) & set("'\"[]")  # pasted into any shell


def test_lines_are_short_enough_to_read():
    lines = README.read_text().splitlines()
    assert not [line for line in lines if len(line) > 120 and not line.startswith("|")]


def test_the_bytes_of_the_headline():
    model = DLRM(table_rows(4000), 16, [512, 256, 64], [512, 256])
    names, sizes = zip(*[(n, p.numel()) for n, p in model.named_parameters()], strict=True)
    settings = Settings(0.005, 1000, "fresh", torch.bfloat16)
    plan = BucketPlan(names, sizes, settings, AllGather, ranks=2)
    assert (4 * plan.numel, plan.wire_bytes) == (5_523_396, 34_944)  # of a float32 ring, and DCT's
    text = README.read_text()
    assert "| 5,523,396 |" in text and "| 34,944 |" in text and "158.1x" in text
    assert round(5_523_396 / 34_944, 1) == 158.1
