"""Experiments as they are kept: a JSON file each, in bench/results/DATE-MACHINE/NAME.json.

    {"title", "group", "question", "answer", "command", "commit", "machine", "date", "settings",
     "notes", "parts": [{"name", "title", "command", "settings", "notes"}, ...], "runs": [...]}

`runs` are what was measured; with parts, each run names its own. A file may name the JSON beside
it that has its runs, as `source`. The answer is one sentence. Notes are Markdown.
"""

import dataclasses
import json
from pathlib import Path

from dlrm import files
from dlrm.errors import UsageError

RESULTS = Path(__file__).parents[1] / "results"
REQUIRED = ("title", "group", "command", "commit", "machine", "date")
GROUPS = {  # of the index, and what each of them asks
    "Gradients: quality": "What does a model lose, by optimizer, format and number of ranks?",
    "Gradients: time and bytes": "How long is a step over links of a set rate, and what is sent?",
    "Rows, tables and activations": "The same of embedding rows, of tables cut into shards, and of "
    "what crosses a cut of a model.",
    "Kernels": "How near are the ops to a copy of the bytes that they must move?",
    "Reliability": "What was tried to break it, how often, and what came of it?",
}
BYTES = "_bytes_per_step_per_rank"
FEW_BITS = ("int8", "int4", "ternary")  # formats of rows, and of whole gradients
# Files of bench/gpu/check.py and its predecessor, kept as they came, beside the experiment that is
# made of them.
RAW = {"summary.json", "time.json", "step.json", "profile.json", "bench.json", "environment.json"}


@dataclasses.dataclass(frozen=True)
class Part:
    """Runs that belong into one table: on the same data, with the same settings."""

    name: str = ""
    title: str = ""
    command: str = ""
    settings: dict = dataclasses.field(default_factory=dict)
    notes: str = ""


@dataclasses.dataclass(frozen=True)
class Experiment:
    path: Path
    title: str
    group: str
    command: str
    commit: str
    machine: str
    date: str
    runs: list[dict]
    question: str = ""
    answer: str = ""
    settings: dict = dataclasses.field(default_factory=dict)
    notes: str = ""
    parts: tuple[Part, ...] = ()

    @property
    def name(self) -> str:
        return self.path.stem

    def of_part(self, name: str) -> list[dict]:
        """Its runs; all of them, where there are no parts.

        Raises:
            UsageError: there is no such part.
        """
        if name not in [part.name for part in self.parts or [Part()]]:
            raise UsageError(f"{self.path.name} must have a part {name!r}")
        return [run for run in self.runs if not self.parts or run["part"] == name]


def read(path: Path) -> Experiment:
    """Raises:
    UsageError: it is no experiment.
    """
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise UsageError(f"{path} must be JSON: {error}") from None
    lacking = [key for key in REQUIRED if not (isinstance(content, dict) and content.get(key))]
    if lacking:
        raise UsageError(f"{path} must have {', '.join(lacking)}")
    if content["group"] not in GROUPS:
        raise UsageError(f"{path} must have a group of {', '.join(GROUPS)}")
    if source := content.pop("source", None):
        content["runs"] = json.loads((path.parent / source).read_text())["results"]
    try:
        content["parts"] = tuple(Part(**part) for part in content.get("parts", ()))
        return Experiment(path, **content)
    except TypeError as error:
        raise UsageError(f"{path} must have the keys of an experiment: {error}") from None


def load(results: Path = RESULTS) -> dict[str, Experiment]:
    """All of them by name, the oldest first.

    Raises:
        UsageError: a file is no experiment, or two have one name.
    """
    found: dict[str, Experiment] = {}
    for path in sorted(results.glob("*/*.json")):
        if path.name in RAW:
            continue
        if path.stem in found:
            raise UsageError(f"{path} must have a name of its own, {found[path.stem].path} has it")
        found[path.stem] = read(path)
    return found


def write(path: Path, content: dict) -> None:
    """All or nothing; a line for each run, so that a difference of two versions can be read."""
    head = json.dumps(
        {k: v for k, v in content.items() if k != "runs"}, indent=1, ensure_ascii=False
    )
    runs = ",\n".join("  " + json.dumps(run, ensure_ascii=False) for run in content["runs"])
    files.write(path, f'{head[:-2]},\n "runs": [\n{runs}\n ]\n}}\n'.encode())


def collect(folder: Path) -> list[dict]:
    """The runs of a folder that a command wrote, as they are kept.

    Raises:
        UsageError: it has none.
    """
    runs = []
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        runs += [canonical(run) for run in (content if isinstance(content, list) else [content])]
    if not runs:
        raise UsageError(f"{folder} must hold the files of finished runs, found none")
    return runs


def canonical(run: dict) -> dict:
    """A run of the experiments that choose rates, with the keys of one of dp_density: {"method",
    "rate", "seed", "test", "validation", "bytes_per_step", ...}. Others as they are."""
    if "summary" in run:  # dp_transports.py
        summary = run["summary"]
        method, _, version = run["method"].partition(" ")
        density = "" if run["density"] is None else f":{100 * run['density']:g}%"
        found = {"method": f"{method}{density} {version}".strip(), "seed": run["seed"]}
        return found | {"test": _scores(summary), "bytes_per_step": _sent(summary)}
    if "exchange" in run:  # mp_formats.py, two_dimensional.py, torchrec_dlrm.py
        formats, plus, distinct = run["exchange"].partition("+")
        if formats in FEW_BITS:  # both ways; alone it is the hook's
            formats = f"{formats},{formats}"
        method = f"{formats}{plus}{distinct}"
        found = {"method": method, "rate": run["rate"], "seed": run["seed"]}
        if "diverged" in run:
            return found | {"diverged": run["diverged"]}
        found |= {part: _scores(run[part]) for part in ("validation", "test") if part in run}
        if "step_ms_median" in run:
            found["step_ms"] = run["step_ms_median"]
        return found | {"bytes": _bytes(run)}
    return run


def _scores(found: dict) -> dict:
    names = {"auc": "auc", "log_loss": "loss", "calibration": "calibration"}
    return {new: found[old] for old, new in names.items() if old in found}


def _sent(summary: dict) -> float:
    return summary["wire_bytes_per_step_max_rank"]


def _bytes(run: dict) -> dict:
    """What a rank sends per step, by what it is for."""
    found = {key.removesuffix(BYTES): run[key] for key in run if key.endswith(BYTES)}
    return {key: round(value) for key, value in found.items() if value and key != "wire"}
