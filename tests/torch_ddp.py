"""Runs torch's tests of DistributedDataParallel with the hook in every DDP (make check-all).

    python tests/torch_ddp.py [TEST ...]

With density 1, float32 and start_step=0, the hook computes an all-reduce. So a test that passes
without the hook must pass with it, on gloo and the CPU. EXCEPTIONS lists the tests that fail with
the hook, and the reasons. Most tests are for GPUs, so "cuda" is mapped to the CPU. Tests that need
a GPU also fail without the hook, so their failures are ignored.
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

# The module with the tests reads these variables when it is imported.
_folder = tempfile.TemporaryDirectory()
os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": "2", "TEMP_DIR": _folder.name}
common_distributed.skip_if_lt_x_gpu = lambda *args, **kwargs: lambda test: test
common_distributed.skip_if_no_gpu = lambda test: test

from torch.testing._internal.distributed.distributed_test import (  # noqa: E402
    DistributedTest,
    TestDistBackend,
)

from dct_parallel import DCTState, dct_hook  # noqa: E402

_OWN_HOOK = "registers its own hook, and DDP accepts only one"
EXCEPTIONS = {
    "test_accumulate_gradients_no_sync_allreduce_hook": _OWN_HOOK,
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook": _OWN_HOOK,
    "test_ddp_comm_hook_logging": _OWN_HOOK,
    "test_ddp_hook_parity_allreduce": _OWN_HOOK,
    "test_ddp_hook_parity_post_localSGD": _OWN_HOOK,
    "test_ddp_hook_parity_powerSGD": _OWN_HOOK,
    "test_ddp_native_mixed_precision_ignored_params": "DDP's mixed precision is a hook itself",
    "test_ddp_grad_div_uneven_inputs": "with join(divide_by_initial_world_size=False), a hook "
    "cannot know the divisor; torch's hooks also divide by all ranks",
    "test_ddp_logging_data_cpu": "has a parameter in float64, for which the state raises",
    "test_ddp_profiling_torch_profiler": "counts all-reduces in a profile",
}
MIN_TESTS_WITH_HOOK = 35
TOO_LONG = {"test_ddp_uneven_inputs"}  # convolutions take 15 minutes on two cores

_fork = multiprocessing.get_context("fork")
hook_calls = _fork.Value("i")


def hook(state, bucket):
    hook_calls.value += 1
    return dct_hook(state, bucket)


class OnTheCPU(TorchFunctionMode):
    """Ignores moves of tensors to a GPU."""

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
        null_device = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_device, 1)
        os.dup2(null_device, 2)
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


def tests_of_ddp():
    """The names of tests that construct a DDP."""
    tests = inspect.getmembers(WithHook, inspect.isfunction)
    return [
        name
        for name, test in tests
        if name.startswith("test_")
        and re.search("DistributedDataParallel|ddp", name + inspect.getsource(test))
    ]


def outcome(case, name):
    """ "passed", "skipped" or the text of the error."""
    result = unittest.TestResult()
    with contextlib.redirect_stdout(io.StringIO()):
        unittest.TestSuite([case(name)]).run(result)
    if result.failures + result.errors:
        return (result.failures + result.errors)[0][1]
    return "skipped" if result.skipped else "passed"


def main(names):
    logging.disable()
    tests = tests_of_ddp()
    errors = [f"{name} is not a test of this torch" for name in EXCEPTIONS if name not in tests]
    used_hook = 0
    for name in names or [name for name in tests if name not in TOO_LONG]:
        hook_calls.value = 0
        with_hook = outcome(WithHook, name)
        used_hook += with_hook == "passed" and hook_calls.value > 0
        if name in EXCEPTIONS:
            outcome_text = f"exception: {EXCEPTIONS[name]}"
            if with_hook == "passed":
                errors.append(f"{name} passes, so it is not an exception")
        elif with_hook in ("passed", "skipped"):
            outcome_text = with_hook
        elif outcome(WithoutHook, name) != "passed":
            outcome_text = "fails without the hook as well"
        else:
            outcome_text = "FAILED"
            errors.append(f"{name} passes only without the hook:\n{with_hook}")
        print(f"{name}: {outcome_text}", flush=True)
    print(f"{used_hook} passing tests used the hook")
    if not names and used_hook < MIN_TESTS_WITH_HOOK:
        errors.append(f"fewer than {MIN_TESTS_WITH_HOOK}: the hook is not installed in their DDPs")
    return "\n\n".join(errors)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) or 0)
