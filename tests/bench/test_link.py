"""python bench/link.py, end to end: on loopback anywhere, in namespaces where there is root."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from programs import ROOT, started

from bench import cli
from bench.cli import UsageError
from bench.network import command, namespaces
from bench.network.namespaces import Loopback, Namespaces
from bench.network.ranks import RankError, Ranks

SMALL = ["--hash-size", "300", "--batch-size", "16", "--steps", "15", "--modes", "dense,dct"]
# Asked of the machine, not of the code under test: a container's root may still not be allowed to.
PROBE = """
set -e
ip netns add $PROBE
trap 'ip netns del $PROBE' EXIT
ip -n $PROBE link add name left type veth peer name right
ip -n $PROBE link add name middle type bridge
tc -n $PROBE qdisc add dev left root tbf rate 1gbit burst 15000b latency 50ms
"""
name = {"PROBE": f"probe{os.getpid()}"}  # of this worker of pytest's
probed = subprocess.run(["sh", "-c", PROBE], capture_output=True, text=True, env=os.environ | name)
needs_root = pytest.mark.skipif(
    probed.returncode != 0, reason=f"no namespaces or tbf here: {probed.stderr.strip()}"
)


@pytest.fixture(autouse=True)
def alone():
    """A run removes what others left: no other worker of pytest's may be at one."""
    with open(Path(tempfile.gettempdir(), "bench_link_tests.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _ours():
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split() if name.startswith(namespaces.PREFIX)]


def _check(result, rates):
    """Bytes against arithmetic that shares no code with the benchmark."""
    numel = result["model"]["parameters"]
    assert [(link["ranks"], link["rate"]) for link in result["links"]] == [(2, r) for r in rates]
    assert [cell["failed"] for cell in result["cells"]] == [None] * (2 * len(rates))
    for cell in result["cells"]:
        low, median, high = cell["step_ms"]
        assert 0 < low <= median <= high
        assert min(cell["phases_ms"].values()) >= 0 and cell["phases_ms"]["wire"] > 0
        assert cell["steps"] == 15
        if cell["mode"] == "dense":
            assert cell["payload_bytes"] == 4 * numel  # a ring over 2 ranks
        else:
            assert cell["payload_bytes"] < 4 * numel / 50
        assert cell["wire_bytes"] > cell["payload_bytes"]


def test_loopback(tmp_path, capsys):
    assert cli.main("link", ["--loopback", *SMALL, "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "link.json").read_text())
    _check(result, [None])
    assert result["provenance"]["torch"] and result["options"]["density"] == 0.005
    assert (tmp_path / "step_time.png").stat().st_size > 10_000
    first, _, rest = capsys.readouterr().out.partition("\n")
    assert first == (
        "Trains DLRM on generated rows, 2 ranks on this machine, over 127.0.0.1, by dense, dct: 1 "
        f"min at most. --help has other choices; results will be in {tmp_path}."
    )
    assert "| DCT, 0.5 % " in rest


def test_what_it_will_do_is_said_before_what_is_missing(tmp_path, monkeypatch, capsys):
    """8 modes at 4 rates, of 15 seconds and the warm-up."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(namespaces, "missing", lambda: ["root"])
    assert cli.main("link", []) == 1
    said = capsys.readouterr()
    assert "over links of 100 Mbit/s, 1 Gbit/s, 10 Gbit/s, unlimited, by dense, bf16, " in said.out
    assert "10 min at most. --help has other choices" in said.out
    assert said.err == "link.py: needs root, or --loopback (no rate limit)\n"


def test_where_results_cannot_be_written_the_tables_are_printed(tmp_path, capsys, monkeypatch):
    cell = command.merge(2, None, "dct", [], 1, "rank 1 is gone")
    monkeypatch.setattr(command, "_measure", lambda *_: ({}, [], [cell]))
    (tmp_path / "link.json.part").mkdir()
    assert cli.main("link", ["--loopback", "--modes", "dct", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert said.err == f"link.py: {tmp_path / 'link.json'} cannot be written: Is a directory\n"
    assert "failed: rank 1 is gone" in said.out


@pytest.mark.large
def test_hybrid_modes_send_what_their_shapes_say(tmp_path, capsys):
    """13 tables on each of 2 ranks, a batch of 16, embeddings of 32 entries, of which 4 cross."""
    modes = ["hybrid-dense", "hybrid-dp", "hybrid-dct", "hybrid-format", "hybrid-format-dedup"]
    small = [*SMALL[:-1], ",".join(modes), "--embedding-dim", "32", "--row-density", "0.125"]
    small += ["--row-format", "int4,sign"]
    assert cli.main("link", ["--loopback", *small, "--out", str(tmp_path)]) == 0
    cells = {
        cell["mode"]: cell for cell in json.loads((tmp_path / "link.json").read_text())["cells"]
    }
    assert list(cells) == modes
    rows = 16 * 13  # that leave a rank, and that come to it
    counts = 40  # how many ids, and what must be the same
    ids = counts + 4 * rows  # of bags of one id each, whose lengths are not sent
    dense_rows, rows_and_mask = 2 * rows * 4 * 32, rows * (4 * 2 + 4) + rows * 4 * 2
    sent = {mode: cell["payload_bytes"] for mode, cell in cells.items()}
    assert sent["hybrid-dp"] - sent["hybrid-dct"] == dense_rows - rows_and_mask
    mlps = sent["hybrid-dense"] - ids - dense_rows
    assert mlps > 4 * 512 * 256 and mlps % 4 == 0
    assert sent["hybrid-dp"] - ids - dense_rows < mlps / 50
    few_bits = cells["hybrid-format"]["purpose_bytes"]
    assert few_bits["ids"] == ids
    assert (few_bits["mp_forward"], few_bits["mp_backward"]) == (rows * 18, rows * 6)
    distinct = cells["hybrid-format-dedup"]["purpose_bytes"]
    asked = (distinct["ids"] - counts) / 4
    assert 0 < asked < 0.9 * rows
    assert distinct["mp_forward"] == pytest.approx(18 * asked)
    assert distinct["mp_backward"] == pytest.approx(6 * asked)
    for cell in cells.values():
        assert cell["failed"] is None
        assert sum(cell["purpose_bytes"].values()) == pytest.approx(cell["payload_bytes"])
        assert min(cell["phases_ms"].values()) > 0
        assert sum(cell["phases_ms"].values()) <= cell["step_ms"][2]
    said = capsys.readouterr().out
    assert "2 ranks, hybrid, DCT-DP and -MP against hybrid, float32: " in said


@needs_root
def test_namespaces(tmp_path):
    out = ["--out", str(tmp_path)]
    assert cli.main("link", ["--rates", "500mbit,unlimited", *SMALL, *out]) == 0
    result = json.loads((tmp_path / "link.json").read_text())
    _check(result, [5e8, None])
    # No more than the rate, however busy the machine; headers and acknowledgements off.
    assert result["links"][0]["bits_per_second"] < 5e8
    for cell in result["cells"]:
        headers = 66 * cell["packets"]
        assert cell["wire_bytes"] == pytest.approx(cell["payload_bytes"] + headers, rel=0.05)
    assert _ours() == []


@needs_root
@pytest.mark.large
def test_nodes_of_two_ranks(tmp_path, capsys):
    modes = ["dense", "dct", "dct-reduce-scatter", "dct-mesh"]
    given = ["--ranks", "4", "--local-size", "2", "--rates", "1gbit", *SMALL[:-1], ",".join(modes)]
    assert cli.main("link", [*given, "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "link.json").read_text())
    assert [cell["failed"] for cell in result["cells"]] == [None] * len(modes)
    cells = {cell["mode"]: cell for cell in result["cells"]}
    numel = result["model"]["parameters"]
    for cell in cells.values():  # half of what leaves an interface that two ranks share
        expected = cell["payload_bytes"] + 66 * cell["packets"]
        assert cell["wire_bytes"] == pytest.approx(expected, rel=0.1)
    sent = {mode: cell["payload_bytes"] for mode, cell in cells.items()}
    assert sent["dense"] == 3 * numel  # 6 go round a ring of 4 ranks, and leave by every second
    # Three payloads go round a ring, or one leaves each node.
    assert sent["dct-mesh"] == pytest.approx(sent["dct"] / 3, rel=0.05)
    assert sent["dct-mesh"] < sent["dct-reduce-scatter"] < sent["dct"]
    inside = cells["dct-mesh"]["node_bytes"]
    assert inside == pytest.approx(4 * numel, rel=0.001) and cells["dct"]["node_bytes"] == 0
    assert "**4 ranks, 2 a node**, ms per step" in capsys.readouterr().out
    assert _ours() == []


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--ranks", "4,6", "--local-size", "4"], "must make several nodes of 4,6 ranks, got 4"),
        (["--local-size", "2"], "must make several nodes of 2 ranks, got 2"),
        (["--ranks", "4", "--local-size", "2", "--loopback"], "must come without --loopback"),
        (
            ["--ranks", "4", "--local-size", "2", "--modes", "dct,hybrid-dct"],
            "must come without hybrid modes, got hybrid-dct",
        ),
    ],
)
def test_nodes_that_cannot_be_made_are_refused(arguments, text, tmp_path, capsys):
    assert cli.main("link", [*arguments, "--out", str(tmp_path)]) == 1
    assert text in capsys.readouterr().err


@needs_root
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, id="SIGINT"),
        pytest.param(signal.SIGTERM, id="SIGTERM", marks=pytest.mark.large),
    ],
)
def test_an_interrupted_run_cleans_up(tmp_path, number):
    with _a_run(tmp_path) as process:
        process.send_signal(number)
        assert process.wait(30) == 130
        assert process.stderr.read().endswith("link.py: interrupted\n")
    assert _ours() == []


@needs_root
def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path):
    with _a_run(tmp_path) as process:
        process.kill()
        process.wait()
    assert len(_ours()) == 3
    with Namespaces(2):
        assert len(_ours()) == 3
    assert _ours() == []


@needs_root
def test_one_at_a_time():
    with Namespaces(2), pytest.raises(UsageError, match="another run is at work"), Namespaces(2):
        pass
    assert _ours() == []


def test_a_rank_that_dies_is_told_and_the_next_request_starts_new_ones():
    options = {"batch_size": 4, "hash_size": 4, "embedding_dim": 2, "bottom": [4], "top": [4]}
    options["node_ranks"] = 1
    with Loopback(2) as network, Ranks(network, 2, options) as ranks:
        first = ranks.setup()
        ranks._processes[1].kill()
        with pytest.raises(RankError, match=r"a rank died|rank 1 died"):
            ranks.ask(30, do="transfer")
        assert ranks.ask(30, do="transfer")[1]["bits_per_second"] > 0
        with pytest.raises(RankError, match=r"no answer from ranks \[0, 1\] in 0 s"):
            ranks.ask(0, do="transfer")
        assert ranks.setup() == first
        with pytest.raises(RankError, match=r"rank [01]: Traceback"):
            ranks.ask(30, do="train", mode="no such mode", steps=1, seconds=1)


def test_what_is_missing_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert cli.main("link", ["--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        "link.py: needs the command `ip` (package iproute2) and the command `tc` (package "
        "iproute2) and root, or --loopback (no rate limit)\n"
    )


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--modes", "dense,sparse"], "argument --modes: must be some of dense,bf16,"),
        (["--modes", "dct,dct"], "argument --modes: must have no value twice, got 'dct,dct'"),
        (["--ranks", "1"], "argument --ranks: must be an integer in [2, 64], got '1'"),
        (["--top", "5-x"], "argument --top: must be integers >= 1 joined by '-'"),
        (["--seconds", "0"], "argument --seconds: must be a number > 0, got '0'"),
        (["--row-density", "0"], "argument --row-density: must be a number in (0, 1], got '0'"),
    ],
    ids=["mode", "twice", "ranks", "widths", "seconds", "row-density"],
)
def test_wrong_arguments_are_named(arguments, text, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main("link", [*arguments])
    assert exit_.value.code == 2
    assert text in capsys.readouterr().err


def test_loopback_refuses_a_rate(capsys):
    assert cli.main("link", ["--loopback", "--rates", "1gbit"]) == 1
    assert "--rates must be unlimited" in capsys.readouterr().err


@contextlib.contextmanager
def _a_run(folder):
    """A process that has its namespaces and would take minutes."""
    command = [sys.executable, str(ROOT / "bench" / "link.py"), "--rates", "1mbit"]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with started([*command, "--out", str(folder)], **pipes) as process:
        deadline = time.monotonic() + 60
        while len(_ours()) < 3:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        yield process
