"""Shared by every test: seeds, hypothesis settings, and the backends under test."""

import gc
import os
import sys
from pathlib import Path

import forked
import hypothesis
import pytest
import torch
from library_defaults import seen_by_packages

# For bench, a package of the root. Last, because `make abi`, `make cuda` and `make sanitize` test a
# dct_kernels that is installed or built elsewhere.
sys.path.append(str(Path(__file__).parents[1]))

if not torch.cuda.is_available():  # before any Triton kernel is made: they run on the CPU then
    os.environ.setdefault("TRITON_INTERPRET", "1")

from ptx import backend as ptx

from dct_kernels import testing

# The CUDA kernels where there is no GPU: nvcc's PTX, executed. Without nvcc each test says so.
BACKENDS = {**testing.backends(), "ptx-cuda": ptx.BACKEND}
# And what Triton makes of its kernels, in a process where it does not interpret them.
if os.environ.get("TRITON_INTERPRET") == "0" and not torch.cuda.is_available():
    from ptx import triton_backend

    BACKENDS["ptx-triton"] = triton_backend.backend()

# Derandomised: a run means the same on every machine. Timing is never asserted.
hypothesis.settings.register_profile("dct", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("dct")


def pytest_collection_modifyitems(items):
    """At the end, one worker would be at it and the others idle."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """With DCT_REQUIRE_NVCC=1, a test that is skipped for want of nvcc or its tools fails."""
    report = yield
    if (
        report.skipped
        and os.environ.get("DCT_REQUIRE_NVCC") == "1"
        and "not on this machine" in str(report.longrepr)
    ):
        report.outcome = "failed"
    return report


def pytest_configure(config):
    defaults = seen_by_packages(getattr(torch, config.getoption("--default-dtype")))
    defaults.__enter__()
    config.add_cleanup(lambda: defaults.__exit__(None, None, None))


def pytest_addoption(parser):
    parser.addoption(
        "--default-dtype",
        choices=["float32", "float64", "bfloat16"],
        default="float32",
        help="torch's default dtype as the packages see it; tests themselves see float32",
    )
    parser.addoption(
        "--ptx-seed",
        type=int,
        default=1,
        help="orders the blocks, warps and lanes of the executed PTX; 0 runs them in turn",
    )
    parser.addoption(
        "--ptx-cases",
        type=int,
        default=12,
        help="run a test on so many of its cases where nvcc's PTX is executed; 0 for all",
    )
    parser.addoption(
        "--triton-cases",
        type=int,
        default=3,
        help="run a test on so many of its cases where Triton's kernels are interpreted, or their "
        "PTX executed, and from 8 on those of many launches; 0 for all",
    )


@pytest.fixture(autouse=True)
def seed():
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # which would note down, stack and all, what to do once there is a device of any kind
        torch.default_generator.manual_seed(0)


@pytest.fixture
def one_rank(tmp_path):
    """A process group of this process alone; garbage of tests before neither uses it nor warns."""
    gc.collect()
    store = f"file://{tmp_path}/rendezvous"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True, scope="module")
def one_origin_of_ranks(request):
    """What `dlrm.launch` starts is forked from where all ranks are, whoever comes first."""
    if request.path.parent.name in ("dlrm", "bench"):
        forked.start()


@pytest.fixture(params=list(BACKENDS), scope="session")
def backend(request):
    """The ops of one backend as callables, and `.device`, where its tensors live."""
    if request.param == "ptx-cuda" and ptx.build.missing() is not None:
        pytest.skip(f"not on this machine: {ptx.build.missing()}")
    if request.param.startswith("ptx-"):
        ptx.executor().configure(request.config.getoption("--ptx-seed"))
        ptx.executor().set_multiprocessors(2)  # one block is a small grid, four are not
    return BACKENDS[request.param]
