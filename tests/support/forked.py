"""Runs calls in processes that are forked from a server with the common imports."""

import gc
import multiprocessing
import tempfile
import time
import traceback
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path

import torch

context = multiprocessing.get_context("forkserver")
# dlrm.comparison imports dct_parallel only if the extras are installed. DDP imports dynamo.
_PRELOAD = ["dct_parallel", "dlrm.comparison", "pytest", "torch._dynamo"]
_PRELOAD += ["torch.distributed.checkpoint", "torch.distributed.optim", "torchrec.distributed"]
_PRELOAD += ["dct_embeddings", "dct_patches", "transformers.trainer", "lightning.pytorch"]
_TESTS = Path(__file__).parents[1]
_MAX_CHARACTERS = 300  # maximum characters per value


def start():
    context.set_forkserver_preload(_PRELOAD)
    forkserver.ensure_running()


def run_forked(function, calls, timeout):
    """[function(*call) for call in calls]. Calls run in parallel, each in its own process.

    Raises an error with the tracebacks of all failed processes. Kills processes that still run
    after `timeout` seconds, or 10 seconds after another process has failed.
    """
    start()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_call, args=(function, call, number, folder))
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


def _call(function, call, number, folder):
    # The garbage collector skips imported modules, so their memory stays shared between processes.
    gc.freeze()
    try:
        torch.set_num_threads(1)
        torch.save(function(*call), f"{folder}/result{number}")
    except BaseException as error:
        text = traceback.format_exc() + _values(error)
        Path(folder, f"error{number}").write_text(f"rank {number}: {text}")
        raise SystemExit(1) from None


def _values(error):
    """The local variables of the test in which an assertion failed.

    pytest rewrites assertions only in its own process, so here it cannot show values.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    in_tests = [frame for frame in frames if Path(frame.f_code.co_filename).is_relative_to(_TESTS)]
    if not isinstance(error, AssertionError) or not in_tests:
        return ""
    values = {name: " ".join(repr(value).split()) for name, value in in_tests[-1].f_locals.items()}
    return "".join(f"  {name} = {text[:_MAX_CHARACTERS]}\n" for name, text in values.items())
