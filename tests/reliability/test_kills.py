"""The part that kills ranks sees what it is to see."""

import os
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
import torch

from reliability import kills
from reliability.trainings import train

pytestmark = pytest.mark.large


def _forgetful(job):
    """Goes on without its residuals."""
    load = torch.load

    def without(*args, **options):
        saved = load(*args, **options)
        for entry in saved["dct"]["ranks"].values():
            for parts in entry["parameters"].values():
                parts["residual"].zero_()
        return saved

    torch.load = without
    train(job)


def _patient(job):
    """Says that another rank is gone when it should have ended."""
    try:
        train(job)
    except RuntimeError:
        time.sleep(kills.SECONDS + kills.SLACK + 0.5)
        raise


def _untidy(job):
    """Ends as if nothing had been, and leaves something of everything."""
    Path(f"/dev/shm/torch_{os.getpid()}_1").touch()
    tempfile.mkstemp()
    subprocess.Popen(["sleep", "10"])
    try:
        train(job)
    except RuntimeError:
        print("never mind")


def _hit(program, tmp_path, *hit):
    case = kills.Case("DDP", 0, program, tmp_path)
    assert case.hit(kills.Hit(*hit, hosts=False))
    return case


def test_a_program_as_it_should_be(tmp_path):
    case = _hit(train, tmp_path, "killed", 1, "step", 7, 0.0)
    case.restart()
    assert (case.late, case.wrong) == ([], [])
    assert case.counts == {"killed": 1, "in_later_step": 1, "from_a_checkpoint": 1}


def test_a_residual_that_a_restart_has_lost(tmp_path):
    case = _hit(_forgetful, tmp_path, "killed", 1, "step", 7, 0.0)
    assert (case.late, case.wrong) == ([], [])
    case.restart()
    (text,) = case.wrong
    assert "other bits" in text


def test_a_rank_that_ends_too_late(tmp_path):
    case = _hit(_patient, tmp_path, "killed", 1, "step", 7, 0.0)
    (text,) = case.late
    assert "rank 0 ended 1." in text and "rank 1 was killed in_later_step" in text


def test_what_is_left_and_no_error(tmp_path):
    case = _hit(_untidy, tmp_path, "killed", 1, "step", 7, 0.0)
    shared = [Path(text.split()[0]) for text in case.wrong if text.startswith("/dev/shm")]
    for path in shared:
        path.unlink()
    assert len(shared) == 2
    told = "\n".join(case.wrong)
    assert "rank 0 ended with 0, not with an error" in told
    assert told.count("of rank") == 2 and told.count(f"{tmp_path}") == 2
