"""Calls in processes of their own, forked from one that has imported what most tests need."""

import gc
import multiprocessing
import tempfile
import time
import traceback
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path

import torch
from library_defaults import seen_by_packages

context = multiprocessing.get_context("forkserver")
# The second imports the first, where it finds its extra packages. DDP's constructor imports dynamo.
_PRELOAD = ["dct_parallel", "dlrm.comparison", "pytest", "torch._dynamo"]
_PRELOAD += ["torch.distributed.checkpoint", "torch.distributed.optim", "torchrec.distributed"]
_PRELOAD += ["dct_embeddings"]
_TESTS = Path(__file__).parent
_MOST = 300  # characters of a value


def start():
    """Start the process that the others are forked from, unless it runs."""
    context.set_forkserver_preload(_PRELOAD)
    forkserver.ensure_running()


def run_forked(function, calls, timeout):
    """[function(*call) for call in calls], at once.

    Raises with the traceback of every process that failed; kills what is left after `timeout`
    seconds, or once a process has failed and the others had 10 more to do so.
    """
    start()
    dtype = torch.get_default_dtype()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_call, args=(function, call, number, folder, dtype))
            for number, call in enumerate(calls)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        running = list(processes)
        while running and time.monotonic() < deadline:
            wait([p.sentinel for p in running], timeout=deadline - time.monotonic())
            running = [p for p in running if p.exitcode is None]
            if any(p.exitcode for p in processes):
                deadline = min(deadline, time.monotonic() + 10)
        for process in running:
            process.kill()
        for process in processes:
            process.join()
        errors = [path.read_text() for path in sorted(Path(folder).glob("error*"))]
        codes = [process.exitcode for process in processes]
        if errors or any(codes):
            raise RuntimeError(f"exit codes {codes} (-9: killed, it hung)\n" + "\n".join(errors))
        results = [Path(folder, f"result{number}") for number in range(len(calls))]
        return [torch.load(result, weights_only=False) for result in results]


def _call(function, call, number, folder, default_dtype):
    # Collections pass over what was imported: it stays, and its memory is shared with others.
    gc.freeze()
    try:
        torch.set_num_threads(1)
        with seen_by_packages(default_dtype):
            torch.save(function(*call), f"{folder}/result{number}")
    except BaseException as error:
        text = traceback.format_exc() + _values(error)
        Path(folder, f"error{number}").write_text(f"rank {number}: {text}")
        raise SystemExit(1) from None


def _values(error):
    """What names stood for in the test where an assertion failed.

    pytest would say it, but rewrites assertions in its own process only.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [frame for frame in frames if Path(frame.f_code.co_filename).is_relative_to(_TESTS)]
    if not isinstance(error, AssertionError) or not own:
        return ""
    values = {name: " ".join(repr(value).split()) for name, value in own[-1].f_locals.items()}
    return "".join(f"  {name} = {text[:_MOST]}\n" for name, text in values.items())
