"""bench.link end to end: on loopback, and in network namespaces if root can create them."""

import fcntl
import json
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from bench import link
from bench.network import namespaces

SMALL = ["--hash-size", "300", "--batch-size", "16", "--steps", "15", "--modes"]
SMALL += ["dense,dct,hybrid-format-dedup"]
# These commands are run as a probe, because root in a container may lack the permission for them.
PROBE = """
set -e
ip netns add $PROBE
trap 'ip netns del $PROBE' EXIT
ip -n $PROBE link add name left type veth peer name right
ip -n $PROBE link add name middle type bridge
tc -n $PROBE qdisc add dev left root tbf rate 1gbit burst 15000b latency 50ms
"""
name = {"PROBE": f"probe{os.getpid()}"}  # unique per pytest worker
probed = subprocess.run(["sh", "-c", PROBE], capture_output=True, text=True, env=os.environ | name)
needs_root = pytest.mark.skipif(
    probed.returncode != 0, reason=f"no namespaces or tbf here: {probed.stderr.strip()}"
)


@pytest.fixture(autouse=True)
def one_run_at_a_time():
    """A run removes the namespaces of other runs, so pytest workers take turns."""
    with open(Path(tempfile.gettempdir(), "bench_link_tests.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _ours():
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split() if name.startswith(namespaces.PREFIX)]


def _check(result, rates, modes):
    """Compare bytes with arithmetic that shares no code with the benchmark."""
    numel = result["model"]["parameters"]
    assert [(link["ranks"], link["rate"]) for link in result["links"]] == [(2, r) for r in rates]
    assert len(result["cells"]) == modes * len(rates)
    for cell in result["cells"]:
        low, median, high = cell["step_ms"]
        assert 0 < low <= median <= high and cell["steps"] == 15
        if cell["mode"] == "dense":
            assert cell["payload_bytes"] == 4 * numel  # a ring over 2 ranks
        else:
            assert cell["payload_bytes"] < 4 * numel / 20
        assert cell["wire_bytes"] > cell["payload_bytes"]


def test_loopback(tmp_path, capsys):
    assert link.main(["--loopback", *SMALL, "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "link.json").read_text())
    _check(result, [None], 3)
    assert result["provenance"]["torch"] and result["options"]["density"] == 0.005
    out = capsys.readouterr().out
    assert "Trains DLRM on generated rows with 2 ranks on this machine, over 127." in out
    assert "| DCT  " in out


@needs_root
def test_namespaces(tmp_path):
    out = ["--out", str(tmp_path)]
    options = ["--rates", "500mbit,unlimited", *SMALL, "--modes", "dense,dct"]
    assert link.main([*options, *out]) == 0
    result = json.loads((tmp_path / "link.json").read_text())
    _check(result, [5e8, None], 2)
    # The measured rate counts no headers and acknowledgements, so it is below the link rate.
    assert result["links"][0]["bits_per_second"] < 5e8
    for cell in result["cells"]:
        headers = 66 * cell["packets"]
        assert cell["wire_bytes"] == pytest.approx(cell["payload_bytes"] + headers, rel=0.05)
    assert _ours() == []
