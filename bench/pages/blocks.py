"""Blocks in README.md, docs/guide and docs/design that are filled with figures.

A block is what stands between two lines; NAME is a figure's (figures.py).

    <!-- figure: NAME -->
    <!-- end figure -->
"""

import os
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path

from dlrm.errors import UsageError

from .experiments import Experiment
from .figures import FIGURES
from .render import ROOT

Experiments = Mapping[str, Experiment]
BEGIN, END = r"^<!-- figure: (\S+) -->\n", r"^<!-- end figure -->$"
BLOCK = re.compile(f"(?P<begin>{BEGIN})(?P<inside>.*?)(?P<end>{END})", re.DOTALL | re.MULTILINE)
MARK = re.compile(r"(?<!`)<!-- (?:end )?figure\b")


def pages() -> list[Path]:
    """Those that may have blocks."""
    folders = (ROOT / "docs" / "guide", ROOT / "docs" / "design")
    return [ROOT / "README.md", *(page for each in folders for page in sorted(each.glob("*.md")))]


def fill(page: Path, text: str, experiments: Experiments) -> str:
    """The page's text, its blocks made anew.

    Raises:
        UsageError: a block has no end, or no figure has its name.
    """
    # One without the other, or inside of others.
    if len(MARK.findall(text)) != 2 * len(BLOCK.findall(text)):
        rule = "a figure must begin with <!-- figure: NAME --> and end with <!-- end figure -->"
        raise UsageError(f"{page}: {rule}, in a line each")

    def made(block: re.Match) -> str:
        return f"{block['begin']}{render(block[2], page, experiments)}\n{block['end']}"

    return BLOCK.sub(made, text)


def render(name: str, page: Path, experiments: Experiments) -> str:
    """A figure with links to its pages, as it stands in `page`.

    Raises:
        UsageError: there is none of this name.
    """
    if name not in FIGURES:
        raise UsageError(f"{page}: no figure {name!r}; there are {', '.join(sorted(FIGURES))}")
    make, sources = FIGURES[name]
    links = [f"[{each}](docs/results/{each}.md)" for each in sources]
    text = make(experiments)
    said = f"From: {', '.join(links)}." if links else ""
    if re.search(r"\| [+-]\S+ ± ", text):
        said += " ± after a difference is its standard error over seeds."
    text, said = (_linked(part, page) for part in (text, said.strip()))
    lines = textwrap.wrap(said, 118, break_long_words=False, break_on_hyphens=False)
    return "\n".join([text, "", *lines] if lines else [text])


def _linked(text: str, page: Path) -> str:
    """Figures link from the root: as the page does."""
    return re.sub(
        r"\]\((docs/[^)]*)\)",
        lambda link: f"]({os.path.relpath(ROOT / link[1], page.parent)})",
        text,
    )
