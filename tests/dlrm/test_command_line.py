"""How commands begin and end: help without the extra, results kept, one line where it fails."""

import importlib
import json
import os
import signal
import subprocess
import sys

import pytest
from programs import ROOT, started

import cli
import dct_kernels
from dlrm import arguments
from dlrm.command_line import EXTRA, exit_status, results_folder
from dlrm.errors import UsageError

# Commands as they run where only torch is installed, one after the other.
BARE = """
import contextlib, importlib, io, json, sys
sys.path[:0] = {path!r}
for name in {missing!r}:
    sys.modules[name] = None
ended = []
for module, arguments in {commands!r}:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = importlib.import_module(module).main(*arguments)
        except SystemExit as end:
            status = end.code
    ended.append((status, out.getvalue(), err.getvalue()))
print(json.dumps(ended))
"""
# {program: (module, arguments of its main function before those of the command line)}
PROGRAMS = {"train_dlrm.py": ("dlrm.train", [])}
PROGRAMS |= {f"{name}.py": ("cli", [name]) for name in cli.FOLDERS}
PATH = [str(ROOT / "bench"), str(ROOT / "examples")]
QUICK = ["--rows", "2000", "--hash-size", "50", "--bottom", "16", "--top", "16", "--seeds", "50"]


def _bare(*given):
    """[(program, its exit status, what it printed, and on stderr)] of every program."""
    commands = [(module, [*first, given]) for module, first in PROGRAMS.values()]
    program = BARE.format(path=PATH, missing=list(EXTRA), commands=commands)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=300)
    ended = json.loads(done.stdout)
    return [(name, *end) for name, end in zip(PROGRAMS, ended, strict=True)]


def test_help_needs_torch_alone():
    for run, status, printed, errors in _bare("--help"):
        assert (status, errors) == (0, "")
        assert printed.startswith(f"usage: {run} [-h]")


@pytest.mark.parametrize("printed", [1, 2**20])  # at its end, and meanwhile
def test_it_ends_quietly_where_nobody_reads(printed):
    """As in `| head`, whose reader is gone before this one has printed."""
    program = (
        f"import sys; sys.path[:0] = {PATH!r}; from dlrm.command_line import exit_status\n"
        f"sys.exit(exit_status('program', lambda: print(input() * {printed})))"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], text=True, **pipes) as process:
        process.stdout.close()
        _, errors = process.communicate("x\n", timeout=60)
    assert (process.returncode, errors) == (128 + signal.SIGPIPE, "")


def test_a_broken_pipe_of_another_kind_is_an_error():
    def work():
        raise BrokenPipeError("to a rank")

    with pytest.raises(BrokenPipeError, match="to a rank"):
        exit_status("program", work)


def test_a_run_without_the_extra_says_what_to_install():
    for run, status, _, errors in _bare():
        assert status == 1
        name, _, rest = errors.partition(": ")
        assert name == run
        missing, _, rest = rest.partition(" ")
        assert missing in EXTRA
        assert rest == "is not installed: pip install numpy scikit-learn matplotlib rich\n"


def test_another_missing_module_is_not_the_users_fault():
    with pytest.raises(ModuleNotFoundError):
        exit_status("train_dlrm.py", lambda: __import__("no_such_module"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_version(name, capsys):
    module, first = PROGRAMS[name]
    with pytest.raises(SystemExit) as exit_info:
        importlib.import_module(module).main(*first, ["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out.startswith(f"{name} {dct_kernels.__version__} (torch ")


def _folder(*arguments_):
    return results_folder(arguments.parse(arguments_), "runs/dlrm", "summary.json")


def test_the_default_folder_is_new_every_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [str(_folder()) for _ in range(3)] == ["runs/dlrm", "runs/dlrm-2", "runs/dlrm-3"]
    assert (tmp_path / "runs" / "dlrm-3").is_dir()


def test_results_are_not_overwritten_unasked(tmp_path):
    out = ["--out", str(tmp_path)]
    assert _folder(*out) == tmp_path
    (tmp_path / "summary.json").write_text("precious")
    with pytest.raises(UsageError, match=r"--out must be without a summary\.json, .* --overwrite"):
        _folder(*out)
    assert (tmp_path / "summary.json").read_text() == "precious"
    assert _folder(*out, "--overwrite") == tmp_path
    assert not (tmp_path / "summary.json").exists()


def test_a_program_of_these_tests_answers_ctrl_c_though_they_run_in_the_background():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as for a script's background job
    try:
        program = "import time; print('ready', flush=True); time.sleep(300)"
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        with started([sys.executable, "-c", program], **pipes) as process:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == -signal.SIGINT
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    "launcher, number",
    [
        pytest.param("local", signal.SIGINT, id="SIGINT"),
        pytest.param("local", signal.SIGTERM, id="SIGTERM", marks=pytest.mark.large),
        pytest.param("torchrun", signal.SIGINT, id="torchrun-SIGINT", marks=pytest.mark.large),
        pytest.param("torchrun", signal.SIGTERM, id="torchrun-SIGTERM", marks=pytest.mark.large),
    ],
)
def test_an_interrupted_run_keeps_what_is_finished(tmp_path, launcher, number):
    """To all processes at once, as a terminal sends it."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, "-u", *(torchrun if launcher == "torchrun" else [])]
    environment = {key: v for key, v in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    command += [str(ROOT / "examples" / "train_dlrm.py"), *QUICK]
    command += ["--modes", "dense", "--out", str(tmp_path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with started(command, env=environment, **pipes) as process:
        while not (said := process.stdout.readline()).startswith("dense seed 1"):
            assert said, process.stderr.read()
        os.killpg(process.pid, number)
        _, errors = process.communicate(timeout=120)
    line = f"train_dlrm.py: interrupted: finished runs are in {tmp_path}\n"
    if launcher == "local":
        assert (process.returncode, errors) == (130, line)
    else:  # torchrun has words of its own
        assert errors.count(line) == 1
        assert "dlrm" not in errors.partition(line)[2]
    (runs,) = json.loads((tmp_path / "summary.json").read_text())["modes"].values()
    assert [run["seed"] for run in runs[:2]] == [0, 1] and len(runs) < 50
    assert not list(tmp_path.glob("*.part"))
