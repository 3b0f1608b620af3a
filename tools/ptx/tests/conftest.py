from conftest import pytest_runtest_makereport, seed  # noqa: F401  (from tests/)
