"""The eager backend: every op in clear PyTorch. It defines what is right, on any device.

It may synchronize with the host; the other backends never do.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from .. import _contract
from .._schemas import OPS
from . import payload, quantized_rows, rows, thresholds

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _checked(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """`function`, after the contract's checks of its arguments."""
    check = getattr(_contract, function.__name__)

    @functools.wraps(function)
    def checked(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        check(*args, **kwargs)
        return function(*args, **kwargs)

    return checked


sample_threshold = _checked(thresholds.sample_threshold)
mask_pack = _checked(payload.mask_pack)
scatter_unpack = _checked(payload.scatter_unpack)
row_pack = _checked(rows.row_pack)
row_gather = _checked(rows.row_gather)
row_unpack = _checked(rows.row_unpack)
row_quantize = _checked(quantized_rows.row_quantize)
row_dequantize = _checked(quantized_rows.row_dequantize)

__all__ = list(OPS)
