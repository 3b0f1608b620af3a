"""torch's own tests of DistributedDataParallel, with the hook in every DDP (make check-all).

    python tests/torch_ddp.py [TEST ...]

At density 1, in float32 and from the first step on, the hook is an all-reduce. So what passes
without a hook has to pass with it, on gloo and the CPU; what does not is in EXCEPTIONS, each with
its reason. Most of these tests are meant for GPUs: here "cuda" is the CPU, and those that cannot
live with that fail without the hook as well, and say nothing.
"""

import contextlib
import inspect
import io
import logging
import multiprocessing
import os
import re
import sys
import tempfile
import unittest

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed
from torch.testing._internal.common_utils import instantiate_parametrized_tests

# What the tests' module reads as it is imported.
_folder = tempfile.TemporaryDirectory()
os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": "2", "TEMP_DIR": _folder.name}
common_distributed.skip_if_lt_x_gpu = lambda *args, **kwargs: lambda test: test
common_distributed.skip_if_no_gpu = lambda test: test

from torch.testing._internal.distributed.distributed_test import (  # noqa: E402
    DistributedTest,
    TestDistBackend,
)

from dct_parallel import DCTState, dct_hook  # noqa: E402

_OWN_HOOK = "registers a hook of its own: DDP takes one"
EXCEPTIONS = {
    "test_accumulate_gradients_no_sync_allreduce_hook": _OWN_HOOK,
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook": _OWN_HOOK,
    "test_ddp_comm_hook_logging": _OWN_HOOK,
    "test_ddp_hook_parity_allreduce": _OWN_HOOK,
    "test_ddp_hook_parity_post_localSGD": _OWN_HOOK,
    "test_ddp_hook_parity_powerSGD": _OWN_HOOK,
    "test_ddp_native_mixed_precision_ignored_params": "DDP's mixed precision is a hook itself",
    "test_ddp_grad_div_uneven_inputs": "join(divide_by_initial_world_size=False): DDP leaves the "
    "division to a hook, and does not say by what; torch's own hooks divide by all ranks, too",
    "test_ddp_logging_data_cpu": "a parameter in float64, which the state refuses by name",
    "test_ddp_profiling_torch_profiler": "counts all-reduces in a profile",
}
LEAST_AT_WORK = 35
TOO_LONG = {"test_ddp_uneven_inputs"}  # convolutions for a GPU: a quarter of an hour on two cores

_fork = multiprocessing.get_context("fork")
exchanged = _fork.Value("i")


def hook(state, bucket):
    exchanged.value += 1
    return dct_hook(state, bucket)


class OnTheCPU(TorchFunctionMode):
    """Tensors that are asked to be on some GPU stay where they are."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.to:
            args = [args[0], *map(_device, args[1:])]
        if "device" in kwargs:
            kwargs["device"] = _device(kwargs["device"])
        return function(*args, **kwargs)


def _device(value):
    gpu = type(value) is int or str(value).startswith("cuda")
    return torch.device("cpu") if gpu else value


class WithoutHook(TestDistBackend, DistributedTest._DistTestBase):
    hooked = False

    def setUp(self):
        super().setUp()
        self._start_processes(_fork.Process)

    @classmethod
    def _run(cls, rank, *args, **kwargs):
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        torch.cuda.set_device = torch.cuda.manual_seed = lambda *args: None
        torch.cuda.synchronize = lambda *args, **kwargs: None
        torch.cuda.current_device = lambda: rank
        to, make = torch.nn.Module.to, DistributedDataParallel.__init__
        torch.nn.Module.to = lambda self, *args: to(self, *map(_device, args))

        def init(self, module, device_ids=None, output_device=None, *args, **kwargs):
            make(self, module, None, None, *args, **kwargs)
            if cls.hooked:
                state = DCTState(self, density=1, format=torch.float32, start_step=0)
                self.register_comm_hook(state, hook)

        DistributedDataParallel.__init__ = init
        with OnTheCPU():
            super()._run(rank, *args, **kwargs)


class WithHook(WithoutHook):
    hooked = True


instantiate_parametrized_tests(WithoutHook)
instantiate_parametrized_tests(WithHook)


def of_ddp():
    """Names of the tests that construct a DDP."""
    tests = inspect.getmembers(WithHook, inspect.isfunction)
    return [
        name
        for name, test in tests
        if name.startswith("test_")
        and re.search("DistributedDataParallel|ddp", name + inspect.getsource(test))
    ]


def outcome(case, name):
    """ "passed", "skipped" or the error's text."""
    result = unittest.TestResult()
    with contextlib.redirect_stdout(io.StringIO()):
        unittest.TestSuite([case(name)]).run(result)
    if result.failures + result.errors:
        return (result.failures + result.errors)[0][1]
    return "skipped" if result.skipped else "passed"


def main(names):
    logging.disable()
    found = of_ddp()
    wrong = [f"{name} is no test of this torch's" for name in EXCEPTIONS if name not in found]
    at_work = 0
    for name in names or [name for name in found if name not in TOO_LONG]:
        exchanged.value = 0
        with_hook = outcome(WithHook, name)
        at_work += with_hook == "passed" and exchanged.value > 0
        if name in EXCEPTIONS:
            said = f"exception: {EXCEPTIONS[name]}"
            if with_hook == "passed":
                wrong.append(f"{name} passes, and is no exception")
        elif with_hook in ("passed", "skipped"):
            said = with_hook
        elif outcome(WithoutHook, name) != "passed":
            said = "fails without the hook as well"
        else:
            said = "FAILED"
            wrong.append(f"{name} passes without the hook only:\n{with_hook}")
        print(f"{name}: {said}", flush=True)
    print(f"{at_work} tests passed in which the hook was at work")
    if not names and at_work < LEAST_AT_WORK:
        wrong.append(f"fewer than {LEAST_AT_WORK}: the hook is not where it should be")
    return "\n\n".join(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) or 0)
