"""Runs the two commands of docs/guide/cluster.md, each in its own network namespace."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.network.namespaces import Namespaces, missing
from support.programs import ROOT

COMMAND = re.compile(r"^GLOO_SOCKET_IFNAME=eth0 torchrun .*\\\n.*$", re.MULTILINE)


@pytest.mark.large
@pytest.mark.skipif(bool(missing()), reason=f"needs {' and '.join(missing())}")
def test_two_machines():
    commands = COMMAND.findall((ROOT / "docs/guide/cluster.md").read_text())
    assert [re.search(r"--node-rank (\d)", command)[1] for command in commands] == ["0", "1"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with Namespaces(2) as network:
        commands = [command.replace("10.0.0.1", network.address(0)) for command in commands]
        started = [
            subprocess.Popen(
                network.command(rank, ["sh", "-c", command]),
                cwd=ROOT,
                env=os.environ | {"PATH": path},
                **pipes,
            )
            for rank, command in enumerate(commands)
        ]
        ended = [(*process.communicate(timeout=300), process.returncode) for process in started]
    (first, _, _), (second, _, _) = ended
    assert [status for _, _, status in ended] == [0, 0], ended
    assert "ranks: 2" in first and "step 300: loss" in first
    assert second == ""  # as the page says
