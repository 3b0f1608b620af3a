import os
import random
from collections import defaultdict

import pytest
import torch

# Triton's interpreter takes milliseconds for every program of a launch, and its compiler seconds
# for every kernel. So a test of many cases is run there on some of them, drawn once for all. A test
# of a hundred launches (marked many_launches) runs where there are at least so many cases, and one
# of thousands of programs (marked many_programs) is left to the other backends. The PTX of nvcc
# runs sooner: it has a number of its own. 0 runs everything.
CASES_OF_MANY_LAUNCHES = 8


def pytest_collection_modifyitems(config, items):
    triton = config.getoption("--triton-cases")
    limits = {"ptx-cuda": config.getoption("--ptx-cases"), "ptx-triton": triton}
    if os.environ.get("TRITON_INTERPRET") == "1":
        limits["triton"] = triton
    cases = defaultdict(list)
    for item in items:
        backend = item.callspec.params.get("backend") if hasattr(item, "callspec") else None
        if limits.get(backend, 0) != 0:
            cases[backend, item.path, item.originalname].append(item)
    left_out = set()
    for (backend, _, name), of_one_test in cases.items():
        most = limits[backend]
        run = min(most, len(of_one_test))
        if "triton" in backend and _is_left_out(of_one_test[0], most):
            run = 0
        left_out |= set(of_one_test) - set(random.Random(name).sample(of_one_test, run))
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _is_left_out(item, most: int) -> bool:
    """Where so many cases of a test are run at most."""
    if item.get_closest_marker("many_programs"):
        return True
    return most < CASES_OF_MANY_LAUNCHES and bool(item.get_closest_marker("many_launches"))


@pytest.fixture(autouse=True, scope="session")
def several_threads():
    """Work is split, and its pieces put together again, on machines of one core as well."""
    torch.set_num_threads(3)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill fresh memory with NaN: fresh pages are zero, and would hide an output never written."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
