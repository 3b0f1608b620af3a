import os

import pytest


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    """No test notices a sync, which may take seconds if the disk is busy."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
