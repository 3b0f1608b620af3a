"""Pages, tables in other pages, and pictures from bench/results. In bench/:

    python -m pages                     # write all of them
    python -m pages --check             # say which texts differ from what would be written
    python -m pages --collect NAME DIR  # make an experiment of a finished folder of runs

It writes docs/results/*.md, a page for each experiment and an index; fills the blocks between
`<!-- figure: NAME -->` and `<!-- end figure -->` in README.md, docs/guide and docs/design, and
those of signatures in docs/reference; and draws docs/images: a step's time, losses by steps,
bytes and density, badges.

With --collect it writes NAME.json into --into, with the commit, machine and day of now. Correct
these by hand, add "title", "question", "answer" and "notes", and make the pages. A command of a run
of many files (experiments/run_files.py) writes them while it runs.
"""

import argparse
import sys
from pathlib import Path

from dlrm import files
from dlrm.command_line import Formatter, Parser, exit_status
from dlrm.errors import UsageError
from provenance import made as made_now

from . import blocks, experiments, pictures, render, signatures


def made(results: Path = experiments.RESULTS) -> dict[Path, str]:
    """{path: text} of everything the report writes.

    Raises:
        UsageError: an experiment or a block is not what it must be.
    """
    found = experiments.load(results)
    texts = render.texts(found)
    for page in blocks.pages():
        texts[page] = blocks.fill(page, page.read_text(), found)
    return texts | {page: signatures.fill(page.read_text()) for page in signatures.pages()}


def differing(texts: dict[Path, str]) -> list[Path]:
    """Files that are not there, or not as they are made; and pages of no experiment."""
    found = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    left = [path for path in render.PAGES.glob("*.md") if path.read_text().startswith(render.MADE)]
    return found + [path for path in left if path not in texts]


def collect(options: argparse.Namespace) -> None:
    name, folder = options.collect
    content = {
        "title": name,
        "group": options.group,
        "command": options.command,
        **made_now(),
        "runs": experiments.collect(Path(folder)),
    }
    path = options.into / f"{name}.json"
    if path.exists():
        raise UsageError(f"--collect must have a new NAME, {path} is there")
    experiments.write(path, content)
    print(f"{path}: {len(content['runs'])} runs")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="python -m pages", description=__doc__, formatter_class=Formatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--collect", nargs=2, metavar=("NAME", "DIR"))
    parser.add_argument("--into", type=Path, default=experiments.RESULTS, metavar="DIR")
    groups = list(experiments.GROUPS)
    parser.add_argument("--group", choices=groups, default=groups[0], help="of the index")
    parser.add_argument("--command", default="not recorded", help="that wrote DIR")
    return parser.parse_args(arguments)


def _main() -> int:
    options = parse()
    if options.collect:
        collect(options)
        return 0
    texts = made()
    different = differing(texts)
    for path in different:
        print(f"{path.relative_to(render.ROOT)}: {'differs' if options.check else 'written'}")
        if not options.check:
            if path in texts:
                files.write(path, texts[path].encode())
            else:
                path.unlink()
    if not options.check:
        pictures.draw(experiments.load())
    return 1 if options.check and different else 0


if __name__ == "__main__":
    sys.exit(exit_status("pages", _main))
