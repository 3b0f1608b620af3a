import os
import random
from collections import defaultdict

import pytest
import torch

# Triton's interpreter takes milliseconds for every program of a launch, and the executor of PTX
# tens of nanoseconds for every instruction of a warp. So a test of many cases is run there on some
# of them, drawn once for all. A test of a hundred launches, such as a search by hypothesis, runs
# where there are at least so many cases, and these tests, of thousands of programs, are left to the
# other backends. `--triton-cases 0` and `--ptx-cases 0` run everything.
CASES_OF_A_SEARCH = 8
HUNDRED_LAUNCHES = {
    "test_every_k_of_a_width",
    "test_garbage_behind_a_sound_header",
    "test_random_bits_flipped",
    "test_segments",
}
THOUSANDS_OF_PROGRAMS = {
    "test_a_million_elements",
    "test_a_million_elements_within_the_stated_error",
    "test_backends_agree",
    "test_conservation_over_all_exponents",
    "test_every_round_density_of_every_length",
    "test_more_than_a_cache_holds",
    "test_the_product_is_rounded_before_the_sum",
    "test_threads_and_repetition",
}


def pytest_collection_modifyitems(config, items):
    interpreted = dict.fromkeys(("ptx-cuda", "ptx-triton"), config.getoption("--ptx-cases"))
    if os.environ.get("TRITON_INTERPRET") == "1":
        interpreted["triton"] = config.getoption("--triton-cases")
    cases = defaultdict(list)
    for item in items:
        backend = item.callspec.params.get("backend") if hasattr(item, "callspec") else None
        if interpreted.get(backend, 0) != 0:
            cases[backend, item.originalname].append(item)
    left_out = set()
    for (backend, name), of_one_test in cases.items():
        most = interpreted[backend]
        searches = getattr(of_one_test[0].obj, "is_hypothesis_test", name in HUNDRED_LAUNCHES)
        left = name in THOUSANDS_OF_PROGRAMS or (searches and most < CASES_OF_A_SEARCH)
        run = 0 if left else min(most, len(of_one_test))
        left_out |= set(of_one_test) - set(random.Random(name).sample(of_one_test, run))
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


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
