"""Files of the programs that are torn, and those that are written where the disk is full."""

import contextlib
import json
import resource
import warnings

import torch

from dlrm.checkpoint import MANIFEST, Checkpoints
from dlrm.errors import UsageError
from dlrm.files import write_json
from experiments import run_files
from pages import experiments

from .torn import cuts, places

SETTINGS = {"--density": 0.01}


def _state(step):
    weights = torch.randn(30_000, generator=torch.Generator().manual_seed(step))
    return {"step": step, "weights": weights}


def _equal(ours, theirs):
    return ours["step"] == theirs["step"] and torch.equal(ours["weights"], theirs["weights"])


def _found(failures, cases, paths):
    refused = len(cases) - len({failure["case"] for failure in failures})
    return {"failures": failures, "refused": refused, "max_places": len(places(paths))}


def torn(rank, folder, cases, seed):
    """What `run` of the part gives, of the click model's checkpoint."""
    warnings.filterwarnings(
        "ignore", category=ResourceWarning
    )  # each is open until it is forgotten
    Checkpoints(folder, SETTINGS).save(_state(1))
    paths = sorted(path for path in (folder / "checkpoint").iterdir() if path.name != "lock")
    manifest = folder / MANIFEST
    manifest.write_bytes(manifest.read_bytes().rstrip())  # without the line's end all is there
    failures = []
    for case, path, left in cuts(paths, cases, seed):
        whole = path.read_bytes()
        path.write_bytes(whole[:left])
        try:
            Checkpoints(folder, SETTINGS).load()
            failures.append({"case": case, "what": f"{path.name} of {left} bytes was taken"})
        except UsageError as error:
            if str(path) not in str(error):
                failures.append({"case": case, "what": f"{path.name} is not named: {error}"})
        if path.read_bytes() != whole[:left]:
            failures.append({"case": case, "what": f"{path.name} was written to"})
        path.write_bytes(whole)
        if not _equal(Checkpoints(folder, SETTINGS).load(), _state(1)):
            failures.append({"case": case, "what": f"{path.name} as before is not as before"})
    return _found(failures, cases, paths)


def _records(folder):
    """A file of a finished run and one of an experiment, of a few 4 kB each."""
    run = run_files.Run("dct", 1.0, 0)
    losses = [number / 7 for number in range(3000)]
    write_json(run.path(folder), run._asdict() | {"settings": SETTINGS, "losses": losses})
    head = dict.fromkeys(experiments.REQUIRED, "-") | {"group": "Reliability"}
    (folder / "day").mkdir()
    kept = folder / "day" / "kept.json"
    experiments.write(kept, head | {"runs": [{"losses": losses}]})
    return run.path(folder), kept


def torn_runs(rank, folder, cases, seed):
    """The same, of the experiments' files."""
    run, kept = _records(folder)
    for path in (run, kept):
        path.write_bytes(path.read_bytes().rstrip())  # without the line's end all is there
    failures = []
    for case, path, left in cuts([run, kept], cases, seed):
        whole = path.read_bytes()
        path.write_bytes(whole[:left])
        try:
            run_files.read(folder, SETTINGS)
            experiments.load(folder)
            failures.append({"case": case, "what": f"{path.name} of {left} bytes was taken"})
        except UsageError as error:
            if str(path) not in str(error):
                failures.append({"case": case, "what": f"{path.name} is not named: {error}"})
        path.write_bytes(whole)
    return _found(failures, cases, [run, kept])


@contextlib.contextmanager
def _disk_of(nbytes):
    """No file grows beyond so many bytes; what fits is written first, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def full(rank, folder, cases, seed):
    """The same, of a checkpoint, a run and an experiment that do not fit: those before stay."""
    warnings.filterwarnings("ignore", category=ResourceWarning)
    checkpoints = Checkpoints(folder, SETTINGS)
    checkpoints.save(_state(1))
    run, kept = _records(folder)
    before = {path: path.read_bytes() for path in (run, kept)}
    names = set(folder.rglob("*"))
    largest = json.loads(run.read_bytes()) | {"losses": [0.123456789] * 30_000}
    more = json.loads(kept.read_bytes()) | {"runs": [{"losses": largest["losses"]}]}
    failures = []
    for case in cases:
        for name, write in (
            ("2-rank0.pt", lambda: checkpoints.save(_state(2))),
            (run.name, lambda: write_json(run, largest)),
            (kept.name, lambda: experiments.write(kept, more)),
        ):
            what = f"{name} on a disk of {4096 * (case % 25)} bytes"
            try:
                with _disk_of(4096 * (case % 25)):
                    write()
                failures.append({"case": case, "what": f"{what} was written"})
            except UsageError as error:
                if "File too large" not in str(error) or name not in str(error):
                    failures.append({"case": case, "what": f"{what}: {error}"})
        if any(path.read_bytes() != content for path, content in before.items()):
            failures.append({"case": case, "what": "a file that was there has changed"})
        checkpoints._number = 1  # as a command that is begun again reads it
        if not _equal(checkpoints.load(), _state(1)):
            failures.append({"case": case, "what": "the checkpoint that was there has changed"})
        if left := set(folder.rglob("*")) - names:
            failures.append({"case": case, "what": f"left: {sorted(path.name for path in left)}"})
            for path in left:
                path.unlink()
    return _found(failures, cases, [])
