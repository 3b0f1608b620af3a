"""docs/results: a page for each experiment, and the index."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from microbench import report as kernels
from network import report as links
from tables import plain

from . import trained
from .experiments import GROUPS, RESULTS, Experiment, Part

ROOT = RESULTS.parents[1]
PAGES = ROOT / "docs" / "results"
MADE = "<!-- Made by python -m pages. Do not edit: change the experiment's JSON and run it. -->"
KINDS = (trained, links, kernels)
ABOUT = """\
What was measured, a page for each experiment. A page keeps the command as it was run, at its
commit; names of commands and options have moved since. `python -m pages` makes the pages from
`bench/results`."""


def texts(experiments: Mapping[str, Experiment]) -> dict[Path, str]:
    """{path: text} of all pages."""
    found = {page_of(experiment): page(experiment) for experiment in experiments.values()}
    return found | {PAGES / "README.md": index(experiments)}


def page_of(experiment: Experiment) -> Path:
    return PAGES / f"{experiment.name}.md"


def index(experiments: Mapping[str, Experiment]) -> str:
    """Titles and answers, by group."""
    found = [MADE, "# Results", ABOUT]
    for group, asks in GROUPS.items():
        own = [each for each in experiments.values() if each.group == group]
        lines = [f"- [{each.title}]({each.name}.md): {each.answer}" for each in own]
        found += [f"## {group}", asks, "\n".join(lines)] if lines else []
    return _joined(*found)


def _joined(*paragraphs: str) -> str:
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph) + "\n"


def page(experiment: Experiment) -> str:
    kinds = {kind_of(run) for run in experiment.runs} - {None}
    parts = [text for part in experiment.parts or [Part()] for text in _part(experiment, part)]
    return _joined(
        MADE,
        f"# {experiment.title}",
        experiment.question and f"**Question.** {experiment.question}",
        experiment.answer and f"**Answer.** {experiment.answer}",
        _about(experiment),
        _code(experiment.command),
        *sorted(kind.NOTE for kind in kinds),
        *parts,
        experiment.notes and "## Notes",
        experiment.notes,
    )


def _part(experiment: Experiment, part: Part) -> list[str]:
    runs = experiment.of_part(part.name)
    heading = f"## {part.title or part.name or 'Results'}"
    return [heading, _code(part.command), _settings(part.settings), tables(runs), part.notes]


def _code(command: str) -> str:
    return command and f"```\n{command}\n```"


def tables(runs: Sequence[dict]) -> str:
    """By the kind of the runs; of a kind that is not known every plain value."""
    kind = kind_of(runs[0])
    return kind.render(runs) if kind else plain(runs)


def kind_of(run: dict):
    return next((kind for kind in KINDS if kind.accepts(run)), None)


def _about(experiment: Experiment) -> str:
    data = experiment.path.relative_to(RESULTS.parent)
    about = [
        ("date", experiment.date),
        ("commit", experiment.commit),
        ("machine", experiment.machine),
        ("settings", _settings(experiment.settings)),
        ("data", f"[{experiment.path.name}](../../bench/{data.as_posix()})"),
    ]
    return "\n".join(f"- {name}: {said}" for name, said in about if said)


def _settings(settings: dict) -> str:
    def said(value: object) -> str:
        return value if isinstance(value, str) else re.sub(r'"', "", json.dumps(value))

    return "; ".join(f"{key.replace('_', ' ')} {said(value)}" for key, value in settings.items())
