"""Maps the method names of dp_density.py to implementations."""

import argparse
import re
from functools import partial

import torch

from dct_parallel import process_group
from dct_parallel.exchange import quantized

from . import dp_groups, dp_local, dp_peers, dp_ranks, dp_shards

# {name: (suffix after a colon, method)}. In a suffix, D is a percentage and H a number of steps.
METHODS: dict[str, tuple[str, partial]] = {
    "dense": ("", partial(dp_ranks.Dense, dtype=torch.float32)),
    "bf16": ("", partial(dp_ranks.Dense, dtype=torch.bfloat16)),
    "dct": ("D%", partial(dp_ranks.DCT)),
    **{f"powersgd{n}": ("", partial(dp_ranks.PowerSGD, rank=n)) for n in (4, 8, 16)},
    "reduce_scatter": ("D%", partial(dp_ranks.DCT, transport="reduce_scatter")),
    "local": ("D%xH", partial(dp_local.Local)),
    "diloco": ("xH", partial(dp_local.DiLoCo, outer_rate=0.7)),
    **{f"diloco{n}": ("xH", partial(dp_local.DiLoCo, outer_rate=n / 100)) for n in (10, 30)},
    "ahead": ("D%", partial(dp_local.Local, period=1, step_ahead=True)),
}
for _format in quantized.QUANTIZED_FORMATS:
    METHODS[_format] = ("", partial(dp_ranks.DCT, density=1, format=_format))
for _format in ("float32", *quantized.QUANTIZED_FORMATS):
    METHODS[f"local-{_format}"] = ("xH", partial(dp_local.Local, density=1, format=_format))
for _weights in dp_shards.WEIGHTS:
    for _gradients in dp_shards.GRADIENTS:
        _made = partial(dp_shards.Shards, weights=_weights, gradients=_gradients)
        METHODS[f"fsdp-{_weights}-{_gradients}"] = ("", _made)
for _framework in dp_groups.FRAMEWORKS:
    for _format in ("float32", *process_group.FORMATS):
        _made = partial(dp_groups.Group, framework=_framework, format=_format)
        METHODS[f"{_framework}-{_format}"] = ("", _made)
for _name in dp_peers.NAMES:
    METHODS[_name] = ("", partial(dp_groups.Group, framework=_name))
TRANSPORT = ",transport=reduce_scatter"  # suffix for methods that take a transport


def method(name: str) -> partial:
    """Return a constructor of the object that exchanges gradients or averages weights.

    Raises:
        argparse.ArgumentTypeError: no method has this name, or the method takes no transport.
    """
    found = re.fullmatch(
        r"([\w-]+)(?::(?:([\d.]+)%)?(?:x([1-9]\d*))?)?", name.removesuffix(TRANSPORT)
    )
    kind, percent, period = found.groups() if found else (name, None, None)
    suffix = "D%" * (percent is not None) + "xH" * (period is not None)
    if kind not in METHODS or METHODS[kind][0] != suffix:
        known = ", ".join(f"{kind}:{end}" if end else kind for kind, (end, _) in METHODS.items())
        raise argparse.ArgumentTypeError(f"must be one of {known}, got {name!r}")
    made = METHODS[kind][1]
    if percent is not None:
        if not 0 < float(percent) <= 100:
            raise argparse.ArgumentTypeError(f"must have a D above 0 and up to 100, got {name!r}")
        made = partial(made, density=float(percent) / 100)
    if period is not None:
        made = partial(made, period=int(period))
    if name.endswith(TRANSPORT):
        if made.func not in (dp_ranks.DCT, dp_local.Local) or "transport" in made.keywords:
            raise argparse.ArgumentTypeError(f"must be {kind} without a transport, got {name!r}")
        made = partial(made, transport="reduce_scatter")
    return made


def is_local(made: partial) -> bool:
    return issubclass(made.func, dp_local.Local)


def named(name: str) -> str:
    """An argparse type: the name of a method."""
    method(name)
    return name
