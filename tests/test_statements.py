"""What the pages quote exists in the code: messages, names, files, tests, commands and numbers.

Pages about earlier code (docs/results, and removals in the changelog) are not checked.
"""

import ast
import inspect
import re

import pytest
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from dct_kernels import layout, patch_layout
from dct_kernels._ops import OPS
from dct_parallel import DCTState
from dct_parallel.compressor import HEADROOM
from dct_parallel.exchange import checkpoint, plan, results, settings
from support.programs import ROOT

FOLDERS = ("bench", "csrc", "dct_kernels", "docs", "examples", "python", "tests", "tools")
FILES = [*ROOT.iterdir(), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
TEXTS = [page.read_text() for page in PAGES if "results" not in page.parts]
TEXT = "\n".join(text.partition("\n### Removed\n")[0] for text in TEXTS)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)
FENCED = [block for language, block in FENCE.findall(TEXT) if not language]
INLINE = re.findall(r"`([^`\n]+)`", FENCE.sub("", TEXT))


def _strings(path):
    """The strings in a module except docstrings, with a NUL for each value in an f-string."""
    tree = ast.parse(path.read_text())
    docstrings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (getattr(part, "value", "") for part in node.values)
            yield "".join(part if isinstance(part, str) else "\0" for part in parts)
        elif isinstance(getattr(node, "value", None), str) and node not in docstrings:
            yield node.value


CODE = [ROOT / "setup.py", *(f for f in FILES if f.suffix == ".py" and "dct_" in f"{f.parent}")]
STRINGS = {string for path in CODE if "tests" not in path.parts for string in _strings(path)}
# A message is assembled at these places. `<...>` on a page stands for a part that varies.
JOINTS = r"<[^<>]*(?:>=[^<>]*)?>|torch>=2\.11|(?:\brank )?\b\d+\b"
JOINTS += r"|dct::|DCT: |setup\.py: |: |; |\bmust (?:be|have)?|, got |, because "
STARTS = ("dct::", "DCT: ", "setup.py: ", "every rank must ", "nothing is compiled in ")


def test_quoted_messages_are_assembled_from_strings_of_the_code():
    lines = [*INLINE, *(line for block in FENCED for line in block.splitlines())]
    quotes = [line for line in lines if line.startswith(STARTS) and " " in line]
    assert len(quotes) > 20
    strings = "\n".join(STRINGS)
    parts = [(part.strip(" ,"), quote) for quote in quotes for part in re.split(JOINTS, quote)]
    assert [(part, quote) for part, quote in parts if part not in strings] == []


def test_names_exist():
    """Spans of the profiler, keys of stats(), and environment variables."""
    spans = {f"dct::{name}" for name in {*re.findall(r"`dct::(\w+)`", TEXT)} - {*OPS}}
    keys = {*re.findall(r'stats\(\)\["(\w+)"\]', TEXT)}
    variables = {*re.findall(r"\bDCT_[A-Z]+\b", TEXT)} - {"DCT_REQUIRE_NVCC"}  # of the tests
    assert min(len(spans), len(keys), len(variables)) > 1
    assert (spans | keys | variables) - STRINGS == set()


def test_files_tests_and_make_targets_exist():
    named = [re.fullmatch(r"([\w./-]+\.(?:py|cpp|cu|cuh|h))(?:::(\w+))?", code) for code in INLINE]
    named = [match.groups() for match in named if match]
    assert len(named) > 40
    for path, test in named:
        found = [file for file in FILES if f"{file}".endswith(f"/{path}")]
        assert found and (test is None or f"\ndef {test}(" in found[0].read_text()), (path, test)
    commands = "\n".join([*INLINE, *FENCED])
    targets = {*re.findall(r"^make ([\w-]+)", commands, re.M)}
    missing = targets - {*re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)}
    assert len(targets) > 8 and not missing


def _default(function, name):
    return inspect.signature(function).parameters[name].default


@pytest.mark.parametrize(
    ("stated", "value"),
    [
        (r"`start_step` steps \(default (\d+)\)", _default(DCTState, "start_step")),
        (r"start at the default, ([\d.]+) %", 100 * settings.DENSITY),
        (r"([\d.]+) x density x", HEADROOM),
        (r"all-gather up to (\d+) ranks", plan.GATHER_RANKS),
        (r"fewer than (\d+) blocks of 16,384 elements per rank", plan.LEAST_BLOCKS),
        (r"(?<!each )blocks? (?:of|has) ([\d,]+) elements", layout.BLOCK),
        (r"each block of ([\d,]+) elements", patch_layout.BLOCK),
        (r"group of (\d+) entries", layout.SCALED),
        (r"rows of ([\d,]+) entries", layout.ROW),
        (r"over the last (\d+) steps", results.RECENT_STEPS),
        (r"(?:reads only|have) version (\d+)", checkpoint.VERSION),
        (r"while PowerSGD starts after ([\d,]+)", _default(PowerSGDState, "start_powerSGD_iter")),
    ],
)
def test_numbers_are_those_of_the_code(stated, value):
    found = re.findall(stated, " ".join(TEXT.split()), re.I)
    assert found and {float(number.replace(",", "")) for number in found} == {value}
