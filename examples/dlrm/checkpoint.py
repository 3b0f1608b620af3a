"""Where a command goes on after it was stopped: a file a rank, and which of them belong together.

    DIR/checkpoint/<number>-rank<r>.pt    all that rank r needs
    DIR/checkpoint/manifest.json          the files of the last complete checkpoint, their SHA-256,
                                          and the settings they were made with

Every rank writes its file under a new name. Once all of them are on the disk, rank 0 replaces the
manifest, and only then is the checkpoint before it removed: whatever ends whichever ranks at
whatever time, the manifest names files of one step, and they are there.
"""

import fcntl
import hashlib
import io
import json
import pickle
from pathlib import Path

import torch
import torch.distributed as dist

from . import files
from .errors import UsageError
from .ranks import all_or_none, from_all_ranks

MANIFEST = "checkpoint/manifest.json"
VERSION = 2  # 1: of --parallel hybrid, a weight for each table
KINDS = {"version": int, "settings": dict, "number": int, "files": list}  # of the manifest


class Checkpoints:
    """The checkpoint in `folder`, for one command at a time. All methods are collective.

    Args:
        folder: which every rank sees.
        settings: what a checkpoint must have been made with to be gone on from; JSON.

    Raises:
        UsageError: the folder cannot be written to, or another command is at work in it.
    """

    def __init__(self, folder: Path, settings: dict[str, object]) -> None:
        self._manifest = folder / MANIFEST
        self._settings = json.loads(json.dumps(settings))
        self._rank = dist.get_rank()
        self._number = 0
        all_or_none(self._lock)

    def load(self) -> object | None:
        """What this rank saved last; None if there is no checkpoint.

        Raises:
            UsageError: on every rank, if a file is damaged, missing or another's, or the settings
                differ; the text names it.
        """
        manifest = from_all_ranks(all_or_none(self._read_manifest))[0]  # one for all
        if manifest is None:
            return None
        self._number = manifest["number"]
        return all_or_none(lambda: self._read_own(manifest))

    def save(self, state: object) -> None:
        """Replace the checkpoint: what `torch.load(weights_only=True)` reads, each rank its own.

        Raises:
            UsageError: on every rank, if one could not write its file; the last checkpoint stays.
        """
        self._number += 1
        try:
            written = from_all_ranks(all_or_none(lambda: self._write_own(state)))
            all_or_none(lambda: self._write_manifest(written))
        except UsageError:
            self._path().unlink(missing_ok=True)  # which no manifest names
            raise
        for path in self._manifest.parent.glob(f"*-rank{self._rank}.pt*"):
            if path.name != written[self._rank]["name"]:
                path.unlink()

    def _lock(self) -> None:
        if self._rank == 0:
            self._manifest.parent.mkdir(parents=True, exist_ok=True)
            self._locked = open(self._manifest.with_name("lock"), "w")  # noqa: SIM115
            try:
                fcntl.flock(self._locked, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends
            except BlockingIOError:
                raise UsageError(
                    f"--out must be of one command at a time, got {self._manifest.parent.parent}, "
                    "where another is at work"
                ) from None

    def _read_manifest(self) -> dict | None:
        if self._rank != 0 or not self._manifest.exists():
            return None
        try:
            manifest = json.loads(self._manifest.read_bytes())
            kinds = {key: type(manifest[key]) for key in KINDS}
        except (ValueError, KeyError, TypeError):
            kinds = None
        if kinds != KINDS:
            raise UsageError(f"{self._manifest} must be as it was written, got a changed file")
        version, settings = manifest["version"], manifest["settings"]
        if version != VERSION:
            raise UsageError(f"{self._manifest} must be of version {VERSION}, got {version}")
        different = [
            f"{name} must be {settings.get(name)} as in {self._manifest}, got "
            f"{self._settings.get(name)}"
            for name in {**settings, **self._settings}
            if settings.get(name) != self._settings.get(name)
        ]
        if different:
            raise UsageError("; ".join(different))
        return manifest

    def _read_own(self, manifest: dict) -> object:
        record = manifest["files"][self._rank]
        path = self._manifest.with_name(record["name"])
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != record["sha256"]:
            raise UsageError(
                f"{path} must be the file that {self._manifest.name} names, got a different or "
                f"incomplete one of {len(content):,} bytes"
            )
        try:
            return torch.load(io.BytesIO(content), weights_only=True)
        except pickle.UnpicklingError:
            raise UsageError(
                f"{path} must load with weights_only=True, got a file that does not"
            ) from None

    def _path(self) -> Path:
        return self._manifest.with_name(f"{self._number}-rank{self._rank}.pt")

    def _write_own(self, state: object) -> dict[str, str]:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        content = buffer.getbuffer()
        path = self._path()
        files.write(path, content)
        return {"name": path.name, "sha256": hashlib.sha256(content).hexdigest()}

    def _write_manifest(self, written: list[dict[str, str]]) -> None:
        if self._rank == 0:
            manifest = {
                "version": VERSION,
                "number": self._number,
                "settings": self._settings,
                "files": written,
            }
            files.write_json(self._manifest, manifest)


def capture(parts: dict[str, object], noted: dict[str, list]) -> dict[str, object]:
    """All that a run's next step and its report depend on, for one rank; not copied.

    Args:
        parts: with a `state_dict` each, or None.
        noted: what was noted of every step.
    """
    states = {name: part.state_dict() for name, part in parts.items() if part is not None}
    return {"parts": states, "noted": noted, "random": torch.get_rng_state()}


def restore(saved: dict, parts: dict[str, object], noted: dict[str, list]) -> None:
    """Bring `parts` and `noted`, in place, to where `capture` found them."""
    for name, state in saved["parts"].items():
        parts[name].load_state_dict(state)
    for name, values in saved["noted"].items():
        noted[name][:] = values
    torch.set_rng_state(saved["random"])
