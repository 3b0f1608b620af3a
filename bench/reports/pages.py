"""docs/results: a page for each experiment, and the index."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import kernels, links, trained
from .experiments import RESULTS, Experiment, Part
from .markdown import plain, table

ROOT = RESULTS.parents[1]
PAGES = ROOT / "docs" / "results"
MADE = "<!-- Made by bench/report.py. Do not edit: change the experiment's JSON and run it. -->"
KINDS = (trained, links, kernels)


def render(experiments: Mapping[str, Experiment]) -> dict[Path, str]:
    """{path: text} of all pages."""
    found = {page_of(experiment): page(experiment) for experiment in experiments.values()}
    return found | {PAGES / "README.md": index(experiments)}


def page_of(experiment: Experiment) -> Path:
    return PAGES / f"{experiment.name}.md"


def index(experiments: Mapping[str, Experiment]) -> str:
    """Questions, answers and pages, the newest first."""
    rows = [
        [each.question, each.answer, each.date, f"[{each.title}]({each.name}.md)"]
        for each in sorted(experiments.values(), key=lambda each: each.date, reverse=True)
    ]
    return "\n".join(
        [
            MADE,
            "# Results",
            "",
            "A page for each experiment, made from its file in `bench/results` by",
            "`python bench/report.py`. Each names its command, commit, machine and date.",
            "",
            table(["question", "answer", "date", "page"], rows),
            "",
        ]
    )


def page(experiment: Experiment) -> str:
    lines = [MADE, f"# {experiment.title}", ""]
    for heading in ("question", "answer"):
        if text := getattr(experiment, heading):
            lines += [f"**{heading.capitalize()}.** {text}", ""]
    lines += [_about(experiment), "", f"```\n{experiment.command}\n```"]
    if notes := sorted({kind.NOTE for kind in map(kind_of, experiment.runs) if kind}):
        lines += ["", *notes]
    for part in experiment.parts or [Part()]:
        lines += ["", *_part(experiment, part)]
    if experiment.notes:
        lines += ["", "## Notes", experiment.notes]
    return "\n".join(lines) + "\n"


def _part(experiment: Experiment, part: Part) -> list[str]:
    lines = [f"## {part.title or part.name or 'Results'}"]
    if part.command:
        lines.append(f"```\n{part.command}\n```")
    if part.settings:
        lines += [_settings(part.settings), ""]
    lines.append(tables(experiment.of_part(part.name)))
    return lines + (["", part.notes] if part.notes else [])


def tables(runs: Sequence[dict]) -> str:
    """By the kind of the runs; of a kind that is not known every plain value."""
    kind = kind_of(runs[0])
    if kind:
        return kind.render(runs)
    return plain(runs)


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
