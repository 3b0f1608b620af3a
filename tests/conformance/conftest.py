import pytest
import torch


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
