"""The methods that bench/scale.py compares: what they are called, and for which optimizer."""

from typing import NamedTuple

from dct_parallel.exchange.codec import Settings


class Method(NamedTuple):
    """A way of averaging.

    Attributes:
        short: in tables.
        call: as the guide has it; DENSITY is the option's.
        settings: of the training layer; its density is the option's where it is 0.
        transport: of the hook; None: the layer's choice.
        adamw: whether it is for AdamW and momentum (docs/guide/transformers.md).
    """

    short: str
    call: str
    settings: Settings | None = None
    transport: str | None = None
    adamw: bool = False


def _sparse(short: str, transport: str) -> Method:
    call = f'DCTState(ddp, density=DENSITY, transport="{transport}")'
    return Method(short, call, Settings(0.0, "bfloat16"), transport)


def _every_entry(format: str, density: str = "", adamw: bool = True) -> Method:
    call = f'DCTState(ddp, {density}format="{format}")'
    return Method(format, call, Settings(1.0, format), adamw=adamw)


LOCAL_PERIOD = 10
LOCAL = "local-ternary"
# Among those that are as fast as the fastest, the first one is named: the dense ones are simpler,
# then what README has for SGD, then the least rounding.
METHODS = {
    "dense": Method("dense", "float32 DDP", adamw=True),
    "bf16": Method("bf16", "DDP with bf16_compress_hook", adamw=True),
    "dct": _sparse("all-gather", "all_gather"),
    "dct-reduce-scatter": _sparse("reduce-scatter", "reduce_scatter"),
    "dct-bfloat16": _every_entry("bfloat16", "density=1, "),
    "dct-int8": _every_entry("int8"),
    "dct-int4": _every_entry("int4"),
    "dct-ternary": _every_entry("ternary", adamw=False),
    LOCAL: Method(
        "local", f"DCTAverager(model, period={LOCAL_PERIOD})", Settings(1.0, "ternary"), adamw=True
    ),
    "powersgd1": Method("PowerSGD 1", "DDP with PowerSGD, rank 1"),
    "powersgd2": Method("PowerSGD 2", "DDP with PowerSGD, rank 2"),
}
DENSE = ("dense", "bf16")
OURS = tuple(name for name, method in METHODS.items() if method.settings)
LEFT_OUT = "without the sparse hook, ternary in every step and PowerSGD, whose loss is higher"


def methods_for(optimizer: str, with_shapes: bool) -> list[str]:
    """Those that an optimizer goes with; PowerSGD's bytes depend on the shapes of parameters."""
    known = {name: m for name, m in METHODS.items() if m.adamw or optimizer == "sgd"}
    return [name for name in known if with_shapes or not name.startswith("powersgd")]


def called(name: str, density: float, default_transport: str, in_nodes: bool) -> str:
    """A method as one writes it.

    Args:
        default_transport: what the sparse hook takes on so many ranks if it is not told.
        in_nodes: whether nodes have several ranks: then hooks take a mesh.
    """
    method = METHODS[name]
    call = method.call.replace("DENSITY", f"{density:g}")
    call = call.replace(f', transport="{default_transport}"', "")
    mesh = in_nodes and call.startswith("DCTState")
    return call.removesuffix(")") + ", mesh=node_mesh())" if mesh else call
