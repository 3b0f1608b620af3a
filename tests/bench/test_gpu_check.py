"""bench/gpu/check.py: stages that pass, fail, hang or cannot start; a run without a GPU."""

import json
import sys
import time
from pathlib import Path

import pytest

GPU = Path(__file__).parents[2] / "bench" / "gpu"


@pytest.fixture
def check(monkeypatch):
    monkeypatch.syspath_prepend(str(GPU))
    yield __import__("check")
    del sys.modules["check"]


def stage(check, name, program, limit=60.0, tool="PYTHON"):
    return check.Stage(name, limit, "", (tool, "-c", program, "OUT"))


def _has_ended(pid):
    """Whether a killed process ends within 10 s. A zombie counts as ended."""
    for _ in range(100):
        try:
            if Path("/proc", pid, "stat").read_text().split()[2] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.1)
    return False


def test_every_stage_runs_and_is_summarized(check, tmp_path, capsys):
    child = "import subprocess, sys; child = subprocess.Popen(['sleep', '60'])"
    wait = f"{child}; print(child.pid, flush=True); child.wait()"
    touch = "import pathlib, sys; pathlib.Path(sys.argv[1], 'x.json').touch(); print('done\\n')"
    stages = [
        stage(check, "passes", touch),
        stage(check, "fails", "print('so far'); raise SystemExit('what is wrong')"),
        stage(check, "hangs", wait, limit=2.0),
        stage(check, "lacks", "", tool="no-such-tool"),
        stage(
            check, "after", "import dct_kernels, dct_parallel, support.ranks; print('all found')"
        ),
    ]
    out = tmp_path / "new" / "out"
    assert check.run(stages, out, limit=60.0) == 2
    summary = json.loads((out / "summary.json").read_text())
    pid = (out / "hangs.log").read_text().split()[0]
    assert [(each["stage"], each["status"], each["message"]) for each in summary] == [
        ("passes", "passed", "done"),
        ("fails", "failed", "what is wrong"),
        ("hangs", "stopped", f"after 2 s, at: {pid}"),
        ("lacks", "skipped", "no-such-tool is not installed"),
        ("after", "passed", "all found"),
    ]
    assert _has_ended(pid)
    assert (out / "x.json").exists() and "so far" in (out / "fails.log").read_text()
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table] == [each["stage"] for each in summary]


def test_a_dry_run_finds_a_mistyped_argument(check, tmp_path):
    """A dry run needs no GPU. It uses small sizes, and collects tests without running them."""
    plan = {each.name: check.dry(each) for each in check.STAGES if each.name in check.PLAN}
    assert sorted(plan) == sorted(check.PLAN)
    sizes = plan["sizes"]
    wrong = sizes._replace(name="wrong", command=(*sizes.command, "--scael", "2"))
    stages = [plan[name] for name in ("environment", "counters", "sizes", "memcheck")]
    assert check.run([*stages, wrong], tmp_path, limit=900) == 1
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [each["status"] for each in summary] == ["passed"] * len(stages) + ["failed"]
    assert "--scael" in summary[-1]["message"]
    timed = json.loads((tmp_path / "sizes.json").read_text())["results"]
    assert len({each["numel"] for each in timed if each["op"] == "mask_pack"}) > 3


@pytest.mark.large
def test_a_dry_run_of_the_whole_plan(check, tmp_path):
    plan = [check.dry(each) for each in check.STAGES if each.name in check.PLAN]
    assert check.run(plan, tmp_path, limit=3600) == 0
