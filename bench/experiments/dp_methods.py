"""The methods of dp_density.py, by their names."""

import argparse
import inspect
import re
from functools import partial

import torch

from dct_parallel.exchange import quantized

from . import dp_local, dp_neighbours, dp_ranks, few_bits

# What a method's name has after its colon: D, a percentage, and xH, a number.
METHODS: dict[str, tuple[str, partial]] = {
    "dense": ("", partial(dp_ranks.Dense, dtype=torch.float32)),
    "bf16": ("", partial(dp_ranks.Dense, dtype=torch.bfloat16)),
    "powersgd": ("", partial(dp_ranks.PowerSGD)),
    "topk": ("D%", partial(dp_ranks.TopK)),
    "dct": ("D%", partial(dp_ranks.DCT)),
    "dct-float32": ("D%", partial(dp_ranks.DCT, format="float32")),
    "reduce_scatter": ("D%", partial(dp_ranks.DCT, transport="reduce_scatter")),
    "local": ("D%xH", partial(dp_local.Local)),
    "sparseloco": ("D%xH", partial(dp_local.SparseLoCo)),
    "postlocal": ("xH", partial(dp_local.Dense)),
    "diloco": ("xH", partial(dp_local.Dense, outer=0.7, momentum=0.9)),
    "accordion": ("D%", partial(dp_neighbours.Accordion)),
    "accordion-ternary": (
        "",
        partial(dp_neighbours.Accordion, format="ternary", critical_format="int4"),
    ),
    "ahead": ("D%", partial(dp_neighbours.StepAhead)),
    "ahead-ternary": ("", partial(dp_neighbours.StepAhead, density=1, format="ternary")),
}
for _format in quantized.FEW_BITS:
    METHODS[_format] = ("", partial(dp_ranks.DCT, density=1, format=_format))
for _format in ("float32", *quantized.FEW_BITS):
    METHODS[f"local-{_format}"] = ("D%xH", partial(dp_local.Local, format=_format))
for _format in (*quantized.FORMATS, "e2m1"):
    METHODS[f"blocks-{_format}"] = ("", partial(few_bits.Blocks, format=_format))
    METHODS[f"local-blocks-{_format}"] = ("xH", partial(few_bits.Local, format=_format))
SETTINGS = {"decay": float, "transport": ("reduce_scatter",), "width": int, "exact": ("vectors",)}
SETTINGS |= {"critical": float, "window": int, "share": int, "every": int}
AVERAGING = {"outer": float, "momentum": float, "moments": (*dp_local.MOMENTS,)}
AVERAGING |= {"pull": float}
WHEN = {"spaced": ("root", "rate", "rate2"), "first": int}  # to average, see dp_local.schedule


def method(name: str) -> partial:
    """What makes the exchange of gradients, or the averaging of weights, from its name."""
    found = re.fullmatch(r"([\w-]+)(?::(?:([\d.]+)%)?(?:x(\d+))?)?((?:,\w+=[\w.]+)*)", name)
    kind, percent, number, settings = found.groups() if found else (name, None, None, "")
    has = "D%" * (percent is not None) + "xH" * (number is not None)
    if kind not in METHODS or METHODS[kind][0] != has:
        known = ", ".join(f"{kind}:{has}" if has else kind for kind, (has, _) in METHODS.items())
        raise argparse.ArgumentTypeError(f"must be one of {known}, got {name!r}")
    made = METHODS[kind][1]
    if percent is not None:
        made = partial(made, density=float(percent) / 100)
        if not 0 < made.keywords["density"] <= 1:
            raise argparse.ArgumentTypeError(f"must have a D above 0 and up to 100, got {name!r}")
        if made.keywords.get("format") in quantized.FEW_BITS and float(percent) < 100:
            raise argparse.ArgumentTypeError(f"must have a D of 100 in few bits, got {name!r}")
    if number is not None:
        if int(number) < 1:
            raise argparse.ArgumentTypeError(f"must have an H from 1 up, got {name!r}")
        made = partial(made, period=int(number))
    for setting in filter(None, settings.split(",")):
        key, _, value = setting.partition("=")
        known = SETTINGS if key in inspect.signature(made.func).parameters else {}
        own_steps = made.func is dp_neighbours.StepAhead  # which has none of these
        known = known | (AVERAGING | WHEN if is_local(made) and not own_steps else {})
        read = known.get(key)
        if not read or (isinstance(read, tuple) and value not in read):
            every = ", ".join(SETTINGS | AVERAGING | WHEN)
            rule = f"without settings, or with those it takes of {every}"
            raise argparse.ArgumentTypeError(f"must be {rule}, got {name!r}")
        made = partial(made, **{key: value if isinstance(read, tuple) else read(value)})
    return made


def is_local(made: partial) -> bool:
    return isinstance(made.func, type) and issubclass(made.func, dp_local.Averaging)


def named(name: str) -> str:
    """An argparse type: the name of a method."""
    method(name)
    return name
