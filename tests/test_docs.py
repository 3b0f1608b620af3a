"""The examples in the docstrings run, and print what they say."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["dct_kernels.ops", "dct_kernels.layout"])
def test_docstring_examples(name):
    module = importlib.import_module(name)
    payload_layout = importlib.import_module("dct_kernels").payload_layout
    # Examples of one module may use the other's functions, as a user would.
    result = doctest.testmod(module, extraglobs={"payload_layout": payload_layout})
    assert result.attempted > 0
    assert result.failed == 0
