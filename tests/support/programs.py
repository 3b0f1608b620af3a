"""Runs programs as a user does: with python, or with torchrun if their text mentions it."""

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from support.forked import run_forked

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def blocks(path):
    """The Python code blocks of a page."""
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


def run(program, folder, *arguments, ranks=2):
    """Run the file `program` and return its output; show its errors if it fails.

    The program runs in `folder`, so that it imports the installed packages and not this checkout.
    """
    torchrun = [*TORCHRUN, f"--nproc-per-node={ranks}"]
    python = torchrun if "torchrun" in program.read_text() else [sys.executable]
    command = [*python, program, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _run_in_forks(program, folder, *arguments, ranks=2):
    """Like `run`, but faster, because it forks ranks that have already imported torch."""
    if "torchrun" in program.read_text():
        return "".join(run_as_torchrun(_main, ranks, program, folder, arguments))
    return run_forked(_main, [(program, folder, arguments)], timeout=120)[0]


# Runs a program in forks or, with `-m large`, as a user does.
in_forks = pytest.mark.parametrize(
    "run",
    [
        pytest.param(_run_in_forks, id="forked"),
        pytest.param(run, id="as-written", marks=pytest.mark.large),
    ],
)


def run_as_torchrun(function, ranks, *args):
    """[function(*args) on rank 0, 1, ...], forked, with the variables and store of torchrun."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    variables = [{**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    return run_forked(_call_with, [(extra, function, args) for extra in variables], timeout=120)


def _call_with(variables, function, args):
    os.environ.update(variables)
    return function(*args)


def called(main, *arguments):
    """(status, stdout, stderr) of a call of a program's `main` in this process."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        status = main([str(argument) for argument in arguments])
    return status, out.getvalue(), err.getvalue()


# Keeps the objects of a program until its process ends. Freeing the last model of a group joins the
# threads of the group, which may wait for the GIL.
_left = []


def _main(program, folder, arguments):
    os.chdir(folder)
    sys.argv = [str(program), *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        _left.append(runpy.run_path(str(program), run_name="__main__"))
    return printed.getvalue()
