"""Folders of versions: chains, removed files, faults while writing, and damaged files."""

import errno
import logging
import os
import resource
from pathlib import Path

import pytest

import dct_patches.files
import dct_patches.patch
from dct_patches import WeightPatch, WeightPublisher, WeightSubscriber
from support import forked
from support.weights import assert_bits, bits, initial, published, receiver, step


class Trainer:
    """Publishes versions in a folder, and records the bits of each confirmed version by id."""

    def __init__(self, folder, resume=False):
        self.folder, self.weights, self.bits, self.steps = folder, initial(), {}, 9 * resume
        if resume:
            self.publisher = WeightPublisher.resume(folder, self.weights)
        else:
            self.publisher = WeightPublisher(self.weights)
            self.publisher.full().save(folder)
            self.bits[self.publisher.id] = published(self.weights)

    def diff(self):
        self.steps += 1
        step(self.weights, 0.02, self.steps)
        return self.publisher.diff(self.weights)

    def publish(self, full=False, keep=None):
        patch = self.diff()
        patch.save(self.folder, keep)
        self.publisher.confirm(patch)
        self.bits[patch.id] = published(self.weights)
        if full:
            self.publisher.full().save(self.folder, keep)


class Receiver(WeightSubscriber):
    """Records the versions that it reads, and compares the bits with those of a trainer."""

    def __init__(self):
        self.tensors, self.read = receiver(initial()), []
        super().__init__(self.tensors)

    def load(self, patch):
        super().load(patch)
        self.read.append(f"load {patch.version}")

    def apply(self, patch):
        super().apply(patch)
        self.read.append(f"apply {patch.version}")

    def follow(self, trainer):
        self.update(trainer.folder)
        self.check(trainer)

    def check(self, trainer):
        assert_bits(bits(self.tensors), trainer.bits[self.id])


def _names(folder):
    return sorted("-".join(path.name.split("-")[:3:2]) for path in folder.glob("*.safetensors"))


def test_a_chain(tmp_path):
    trainer, first, behind = Trainer(tmp_path / "new" / "folder"), Receiver(), Receiver()
    first.follow(trainer)
    behind.follow(trainer)
    for version in range(1, 6):
        trainer.publish(full=version in (2, 4), keep=2)
        if version != 2:
            first.follow(trainer)
    assert first.read == ["load 0", *(f"apply {version}" for version in range(1, 6))]
    # The last two patches lead from version 3. The full copy of version 2 is the last one before.
    files = ["000002-full", "000003-patch", "000004-full", "000004-patch", "000005-patch"]
    assert _names(trainer.folder) == files
    behind.follow(trainer)
    assert behind.read == ["load 0", "load 4", "apply 5"]
    assert WeightPatch.load(trainer.folder, behind.id) is None
    trainer.publish(full=True, keep=0)
    assert _names(trainer.folder) == ["000006-full"]
    behind.follow(trainer)
    assert behind.read[-1] == "load 6"


def test_resume(tmp_path):
    trainer, follower = Trainer(tmp_path), Receiver()
    trainer.publish()
    follower.follow(trainer)
    (tmp_path / "model-of-a-user.safetensors").touch()
    for name in (".000002-01-patch-0.safetensors.tmp", "000002-01-patch-0.safetensors"):
        (tmp_path / name).touch()  # of a publisher that was stopped
    resumed = Trainer(tmp_path, resume=True)
    assert (resumed.publisher.id, resumed.publisher.version) == (trainer.publisher.id, 1)
    resumed.publish()
    files = ["000000-full", "000001-patch", "000002-patch", "model-a"]
    assert _names(tmp_path) == files and not [*tmp_path.glob(".*")]
    follower.follow(resumed)
    assert follower.read == ["load 0", "apply 1", "apply 2"]
    with pytest.raises(ValueError, match=r"patch must have shape.* None for mask, got"):
        WeightPublisher.resume(tmp_path, {n: t for n, t in initial().items() if n != "mask"})
    with pytest.raises(ValueError, match=r"float64.* for half, got .*float16"):
        WeightPublisher.resume(tmp_path, {**initial(), "half": initial()["half"].double()})


def test_a_patch_replaces_a_forgotten_one_or_follows(tmp_path):
    trainer, follower, other = Trainer(tmp_path), Receiver(), Receiver()
    forgotten = trainer.diff()
    with pytest.raises(ValueError, match=r"publisher.full\(\) in a new folder"):
        forgotten.save(tmp_path / "empty")
    forgotten.save(tmp_path)
    trainer.bits[forgotten.id] = published(trainer.weights)
    follower.follow(trainer)
    trainer.publish()
    follower.follow(trainer)
    other.follow(trainer)
    assert (follower.read, other.read) == (["load 0", "apply 1"] * 2, ["load 0", "apply 1"])
    trainer.publish()
    before = {path: path.read_bytes() for path in tmp_path.glob("*.*")}
    restarted = WeightPublisher(trainer.weights)
    for wrong in (forgotten, restarted.full(), restarted.diff(trainer.weights)):
        with pytest.raises(ValueError, match=r"patch must follow .* \(resume the publisher"):
            wrong.save(tmp_path)
    with pytest.raises(ValueError, match=r"keep must be in \[0"):
        trainer.diff().save(tmp_path, keep=-1)
    assert {path: path.read_bytes() for path in tmp_path.glob("*.*")} == before


class Faults:
    """Runs `fault` instead of the call with this number that changes files."""

    def __init__(self, monkeypatch, number, fault):
        self.count, self.number, self.fault = 0, number, fault
        for owner, name in [(os, "fsync"), (os, "replace"), (Path, "unlink")]:
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))
        monkeypatch.setattr(dct_patches.patch, "open", self._counted(open), raising=False)

    def _counted(self, call):
        def counted(*arguments, **options):
            self.count += 1
            if self.count == self.number:
                self.fault()
            return call(*arguments, **options)

        return counted


def _publish(folder, number, fault):
    """Publish with a fault at a call that changes files. Return whether there were fewer calls."""
    trainer, patched = Trainer(folder, resume=True), pytest.MonkeyPatch()
    patched.setattr(os, "fsync", lambda descriptor: None)
    faults = Faults(patched, number, fault)
    try:
        trainer.publish(full=True, keep=0)
    except OSError as error:
        assert error.errno == errno.ENOSPC
        assert not [*folder.glob(".*")]
    patched.undo()
    if faults.count >= number:
        trainer.publish()  # the trainer continues
    return faults.count < number


def _no_space():
    raise OSError(errno.ENOSPC, "No space left on device")


def _exit():
    os._exit(9)


@pytest.mark.parametrize("fault", [_no_space, _exit])
def test_a_fault_at_every_call_loses_nothing(tmp_path, fault):
    """An error, or the end of the process, of which one in three calls is tried."""
    forked.start()
    follower = Receiver()
    Trainer(tmp_path)
    for number in range(2, 100, 3 if fault is _exit else 1):
        if fault is _no_space:
            published_all = _publish(tmp_path, number, fault)
        else:
            process = forked.context.Process(target=_publish, args=(tmp_path, number, fault))
            process.start()
            process.join(120)
            assert process.exitcode in (0, 9)
            published_all = process.exitcode == 0
        follower.update(tmp_path)
        resumed = WeightPublisher.resume(tmp_path, initial())
        assert resumed.id == follower.id
        full = {part.name: part.data.numpy().tobytes() for part in resumed.full().parts}
        assert full == {name: raw.tobytes() for name, raw in bits(follower.tensors).items()}
        if published_all:
            break
    assert number > 12
    assert _names(tmp_path) == [f"{resumed.version:06d}-full"] and not [*tmp_path.glob(".*")]


def test_a_full_disk(tmp_path):
    trainer, follower = Trainer(tmp_path), Receiver()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            trainer.publish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert _names(tmp_path) == ["000000-full"] and not [*tmp_path.glob(".*")]
    trainer.publish()
    follower.follow(trainer)


def test_damaged_and_missing_files(tmp_path):
    trainer, follower = Trainer(tmp_path), Receiver()
    trainer.publish()
    follower.follow(trainer)
    trainer.publish()
    (path,), (other,) = tmp_path.glob("000002-*"), tmp_path.glob("000001-*")
    index, content = tmp_path / "index.json", path.read_bytes()

    def is_refused(error, message):
        with pytest.raises(error, match=message):
            follower.update(tmp_path)
        assert follower.version == 1
        follower.check(trainer)

    for at in range(5, len(content), len(content) // 40):
        for damaged in (
            content[:at] + bytes([content[at] ^ 0x40]) + content[at + 1 :],
            content[:at],
        ):
            path.write_bytes(damaged)
            is_refused(ValueError, rf"{path.name} must be undamaged")
    path.unlink()
    is_refused(FileNotFoundError, f"{path.name} must exist, got no such file")
    path.write_bytes(other.read_bytes())
    is_refused(ValueError, "not .* as in the index")
    path.write_bytes(content)

    text = index.read_text()
    for damaged in (text[:-9], text.replace(path.name, f"../{path.name}"), "[]", "{}"):
        index.write_text(damaged)
        is_refused(ValueError, r"index.json must be undamaged")
    index.unlink()
    is_refused(FileNotFoundError, "folder must have a full copy")
    index.write_text(text)
    follower.follow(trainer)
    assert follower.version == 2


def test_files_that_are_removed_while_a_subscriber_reads(tmp_path, monkeypatch):
    trainer, follower = Trainer(tmp_path), Receiver()
    follower.follow(trainer)
    trainer.publish()
    read = dct_patches.files.read_index
    answers = iter([read("op", tmp_path)])
    trainer.publish(full=True, keep=0)
    monkeypatch.setattr(dct_patches.files, "read_index", lambda *a: next(answers, None) or read(*a))
    follower.follow(trainer)
    assert follower.read == ["load 0", "load 2"]


def test_the_progress_of_a_long_save_is_logged(tmp_path, monkeypatch):
    logged, logger = [], logging.getLogger("dct_patches")
    monkeypatch.setattr(logger, "info", lambda text, *values: logged.append(text % values))
    monkeypatch.setattr(dct_patches.files, "SECONDS_BETWEEN_LOGS", 0)
    Trainer(tmp_path)
    assert logged[:-1] == ["wrote 0.00 of 0.00 GB"] * len(initial())
    assert logged[-1].startswith("saved version 0 (")
