"""Seeds, settings of hypothesis, and the backends under test, for all tests."""

import gc
import os
import sys
from pathlib import Path

import hypothesis
import pytest
import torch

from support import forked

# The root, which contains `bench`, is last in sys.path, because `make abi`, `make cuda` and
# `make sanitize` test a dct_kernels that is installed or built elsewhere.
sys.path.append(str(Path(__file__).parents[1]))

if not torch.cuda.is_available():  # set before kernels are defined, so that they run on the CPU
    os.environ.setdefault("TRITON_INTERPRET", "1")

from ptx import backend as ptx

from dct_kernels import testing

# ptx-cuda executes nvcc's PTX of the CUDA kernels on the CPU. Its tests need nvcc.
BACKENDS = {**testing.backends(), "ptx-cuda": ptx.BACKEND}

# Derandomized, so that all machines run the same examples. Examples have no time limit.
hypothesis.settings.register_profile("dct", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("dct")


def pytest_collection_modifyitems(items):
    """Start long tests first, so that no worker runs one at the end while the others are idle."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish():
    """Exclude all modules from garbage collection, which otherwise takes 0.3 s for `one_rank`."""
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """With DCT_REQUIRE_NVCC=1, tests fail instead of being skipped if nvcc or a tool is missing."""
    report = yield
    if (
        report.skipped
        and os.environ.get("DCT_REQUIRE_NVCC") == "1"
        and "not on this machine" in str(report.longrepr)
    ):
        report.outcome = "failed"
    return report


def pytest_addoption(parser):
    parser.addoption(
        "--ptx-seed",
        type=int,
        default=1,
        help="seed of the random order of blocks, warps and lanes in executed PTX; 0: in order",
    )
    parser.addoption(
        "--ptx-cases",
        type=int,
        default=12,
        help="maximum number of cases per test on executed PTX of nvcc; 0 for all",
    )
    parser.addoption(
        "--triton-cases",
        type=int,
        default=2,
        help="maximum number of cases per test of interpreted Triton kernels; with 8 or more, "
        "tests with many launches also run; 0 runs all cases",
    )


@pytest.fixture(autouse=True)
def seed():
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # torch.manual_seed would record a stack trace for later CUDA initialization
        torch.default_generator.manual_seed(0)


@pytest.fixture
def one_rank(tmp_path):
    """A process group of one rank. Objects of earlier tests are freed before the group exists."""
    gc.collect()
    store = f"file://{tmp_path}/rendezvous"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True, scope="module")
def fork_server(request):
    """Start the fork server first, so that `dlrm.launch` uses it as well."""
    if request.path.parent.name in ("dlrm", "bench"):
        forked.start()


@pytest.fixture(params=list(BACKENDS), scope="session")
def backend(request):
    """The ops of one backend as callables, and `.device`, the device of its tensors."""
    if request.param == "ptx-cuda":
        if ptx.build.missing() is not None:
            pytest.skip(f"not on this machine: {ptx.build.missing()}")
        ptx.executor().configure(request.config.getoption("--ptx-seed"))
        ptx.executor().set_multiprocessors(2)  # so that four blocks are a large grid
    return BACKENDS[request.param]
