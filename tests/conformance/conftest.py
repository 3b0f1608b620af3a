import os
import random
from collections import defaultdict

import pytest
import torch

# Triton's interpreter takes milliseconds per program of a launch. So each test runs a limited
# number of random cases on Triton, always the same ones. Tests with 100 launches or more
# (many_launches) run on Triton only if the limit is at least CASES_OF_MANY_LAUNCHES. Tests with
# thousands of programs (many_programs) do not run on Triton. ptx-cuda runs faster and has a
# separate limit. With a limit of 0, all tests and cases run.
CASES_OF_MANY_LAUNCHES = 8


def pytest_collection_modifyitems(config, items):
    limits = {"ptx-cuda": config.getoption("--ptx-cases")}
    if os.environ.get("TRITON_INTERPRET") == "1":
        limits["triton"] = config.getoption("--triton-cases")
    cases = defaultdict(list)
    for item in items:
        backend = item.callspec.params.get("backend") if hasattr(item, "callspec") else None
        if limits.get(backend, 0) != 0:
            cases[backend, item.path, item.originalname].append(item)
    deselected = set()
    for (backend, _, name), cases_of_test in cases.items():
        limit = limits[backend]
        run = min(limit, len(cases_of_test))
        if backend == "triton" and _is_deselected(cases_of_test[0], limit):
            run = 0
        deselected |= set(cases_of_test) - set(random.Random(name).sample(cases_of_test, run))
    config.hook.pytest_deselected(items=list(deselected))
    items[:] = [item for item in items if item not in deselected]


def _is_deselected(item, limit: int) -> bool:
    """Whether Triton with this limit skips the test."""
    if item.get_closest_marker("many_programs"):
        return True
    return limit < CASES_OF_MANY_LAUNCHES and bool(item.get_closest_marker("many_launches"))


@pytest.fixture(autouse=True, scope="session")
def several_threads():
    """Makes kernels split their work even on a machine with one core."""
    torch.set_num_threads(3)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fills new tensors with NaN or large integers, because zeros could hide a missing write."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
