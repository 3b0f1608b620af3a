"""Predicts step times for two to thousands of ranks, with a cost model."""

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence

import torch

from bench.cli import Parser, UsageError, density, exit_status, number, positive, several
from bench.cost_model import (
    CPU,
    H200,
    METHODS,
    SHARDS,
    SOURCES,
    Model,
    Step,
    buckets,
    link_of,
    methods_for,
)
from bench.rates import describe_rate, parse_rate
from bench.tables import table, times

UNITS = {"K": 10**3, "M": 10**6, "B": 10**9}
FASTER = 1.05  # methods whose times differ by a smaller factor count as equally fast
# By default, the exchange of all DDP buckets except the last overlaps with the backward pass. The
# backward pass is assumed to take this fraction of the compute. FSDP2 also overlaps the rest.
BACKWARD = 2 / 3

DESCRIPTION = """\
Predict the time of a training step with DDP (float32 and bfloat16 all-reduce, DCTState and
DCTAverager) and with FSDP2 between shards. For one number of ranks and one rate, print the times of
all methods, and whether DCT helps. For several numbers of ranks or several rates, print the times
in float32, in bfloat16 and with the fastest method.

For FSDP2 with one replica per node, --ranks is the number of nodes, and dct_fully_shard_hook takes
as long as DCTState. Exchanges inside a node are not included.

The time of a step is compute + pack + wire + unpack. The formulas are in docs/design/measuring.md.
Message sizes are from dct_parallel. All times are lower bounds: they assume that no message blocks
another, no rank is slow, and ranks do not share cores. They include the measured host time of hooks
of DDP (on a GPU, of an earlier version), and no other host time. Times that differ by less than 5 %
count as equal.
"""
EPILOG = """\
examples:
  python -m bench.scale --parameters 25000000 --compute-ms 50 --ranks 2 --rates 1gbit
      does DCT help this model on this link?
  python -m bench.scale --parameters 124000000 --compute-ms 200 --ranks 2 --rates 1gbit \\
      --optimizer adamw --device gpu
      which method helps with AdamW?
"""


def elements(text: str) -> int:
    """Parse a number such as "50000000", "5e7", "50M" or "7B"."""
    unit = UNITS.get(text[-1:].upper(), 1)
    value = unit * float(text[:-1] if unit > 1 else text)
    if not value.is_integer():
        raise ValueError
    return int(value)


def parser() -> Parser:
    """Make a parser that, on an error, prints the argument, rule and value, and exits with 2."""
    parser = Parser(prog="python -m bench.scale", description=DESCRIPTION, epilog=EPILOG)
    add = parser.add_argument
    add(
        "--parameters",
        type=number(elements, lambda n: 1 <= n <= 2**40, "an integer in [1, 2^40], such as 50M"),
        default=25_000_000,
        help="number of parameters of the model, such as 50000000, 5e7 or 50M",
    )
    add(
        "--compute-ms",
        type=positive,
        default=50.0,
        help="milliseconds per step for forward, backward and optimizer",
    )
    add(
        "--density",
        type=density,
        default=0.005,
        help="fraction of entries that the sparse hook sends",
    )
    add(
        "--optimizer",
        choices=("sgd", "adamw"),
        default="sgd",
        help="compare the methods for this optimizer; sgd means SGD without momentum",
    )
    add(
        "--ranks",
        type=several(number(int, lambda n: 2 <= n <= 2**20, "an integer in [2, 2^20]")),
        default="2,8,32,128,512",
        metavar="P,...",
        help="numbers of ranks",
    )
    add(
        "--rates",
        type=several(parse_rate),
        default="1gbit,10gbit,25gbit,100gbit,400gbit",
        metavar="R,...",
        help="rates of the link of each rank, per direction, such as 10gbit",
    )
    add(
        "--device",
        choices=("gpu", "cpu"),
        help="gpu: NCCL and the kernels of an H200; cpu: gloo and the kernels of 2 CPU cores "
        "(default: gpu if torch finds one)",
    )
    add(
        "--alpha-us",
        type=number(float, lambda x: 0 <= x < math.inf, "a number >= 0"),
        metavar="US",
        help="microseconds per message (default: cpu 1500; gpu 50 below 100 Gbit/s, else 10)",
    )
    add(
        "--overlap",
        type=number(float, lambda x: 0 <= x <= 1, "a number in [0, 1]"),
        metavar="F",
        help="fraction of the compute that overlaps with communication, with and without a hook "
        "(default: the backward pass, 2/3, minus the part of DDP's last 25 MiB bucket; FSDP2: "
        "also the forward pass)",
    )
    return parser


def run(options: argparse.Namespace) -> int:
    if None in options.rates:
        raise UsageError("--rates must be numbers, got unlimited")
    device = options.device or ("gpu" if torch.cuda.is_available() else "cpu")
    kernels = {"cpu": CPU, "gpu": H200}[device]
    compute = options.compute_ms / 1e3
    hidden = 1 - 1 / buckets(options.parameters)
    overlap = BACKWARD * hidden if options.overlap is None else options.overlap
    fsdp2_overlap = hidden if options.overlap is None else options.overlap
    model = Model(options.parameters, compute, kernels, options.density, overlap)
    sharded = dataclasses.replace(model, overlap=fsdp2_overlap)

    def steps(ranks: int, rate: float) -> tuple[dict[str, Step], dict[str, Step]]:
        """The steps of the methods of DDP, and of FSDP2 between shards."""
        link = link_of(device, rate)
        if options.alpha_us is not None:
            link = link._replace(alpha=options.alpha_us / 1e6)
        methods = methods_for(options.optimizer, ranks)
        return (
            {method: model.step(method, ranks, link) for method in methods},
            {method: sharded.shards_step(method, ranks, link) for method in SHARDS},
        )

    print(f"{options.parameters:,} parameters, {options.compute_ms:g} ms of compute, of which")
    print(f"{overlap:.0%} overlap with communication (FSDP2: {fsdp2_overlap:.0%}).")
    print(f"Costs of {device}:", end=" ")
    print(f"{SOURCES[device]}. Predicted times are lower bounds.\n")
    cells = {(ranks, rate): steps(ranks, rate) for ranks in options.ranks for rate in options.rates}
    if len(cells) == 1:
        (((ranks, rate), (found, shards)),) = cells.items()
        print(f"{_table(found, options.density)}\n")
        print(f"{sentence(ranks, rate, found, options.density)}.\n")
        print(f"FSDP2 with shards on all ranks:\n\n{_table(shards, options.density)}\n")
        hook = next(name for name in found if METHODS[name].settings)
        arguments = _called(hook, options.density).partition(", ")[2]
        print(f"FSDP2 with one replica on each of {ranks:,} nodes:")
        print(f"{_ms(found['bf16'])} in bfloat16, {_ms(found[hook])} with")
        print(f"dct_fully_shard_hook(model, mesh=mesh, {arguments}.\n")
    else:
        rows = [
            [f"{ranks:,}", describe_rate(rate), *_row(*found)]
            for (ranks, rate), found in cells.items()
        ]
        headings = ["ranks", "rate", "float32", "bfloat16", "fastest", "vs. bfloat16"]
        headings += ["FSDP2 in bfloat16", "compress_fully_shard", "vs. FSDP2 in bfloat16"]
        print(f"Milliseconds per step\n\n{table(headings, rows)}\n")
    fastest = {best(found) for found, _ in cells.values()}
    for name in filter(fastest.__contains__, METHODS):
        method = METHODS[name]
        if method.loss:
            called = _called(name, options.density)
            print(f"The loss with {called}, minus float32's: {method.loss}")
            print(f"(on {method.measured_on}, not on yours; docs/guide/which_method.md).")
    return 0


def best(steps: dict[str, Step]) -> str:
    """The first method in METHODS that is about as fast as the fastest method."""
    fastest = min(step.seconds for step in steps.values())
    return next(method for method in steps if steps[method].seconds < FASTER * fastest)


def sentence(ranks: int, rate: float, steps: dict[str, Step], density: float) -> str:
    """State whether DCT helps, with times and bytes of the fastest method and its alternatives."""
    taken = best(steps)
    helps = METHODS[taken].settings is not None
    others = [name for name in ("dense", "bf16") if name != taken]
    if not helps:
        ours = [name for name in steps if METHODS[name].settings]
        others.append(min(ours, key=lambda name: steps[name].seconds))
    compared = [
        f"{_ratio(steps[other].seconds / steps[taken].seconds)} {_called(other, density)} "
        f"({_ms(steps[other])}, {_size(steps[other])})"
        for other in others
    ]
    return (
        f"{'It helps' if helps else 'It does not help'}: on {ranks:,} ranks at "
        f"{describe_rate(rate)} a step with {_called(taken, density)} takes {_ms(steps[taken])} "
        f"and sends {_size(steps[taken])} per rank, {' and '.join(compared)}"
    )


def _table(steps: dict[str, Step], density: float) -> str:
    _, bfloat16, *_ = steps.values()
    rows = [
        [_called(name, density), _ms(step), times(bfloat16.seconds / step.seconds), _size(step)]
        for name, step in steps.items()
    ]
    return table(["method", "step time", "speed vs. bfloat16", "sent per rank"], rows)


def _row(steps: dict[str, Step], shards: dict[str, Step]) -> list[str]:
    taken = best(steps)
    bfloat16, ours = steps["bf16"], steps[taken]
    _, fsdp2, compressed = shards.values()
    return [
        *(_digits(1e3 * step.seconds) for step in (steps["dense"], bfloat16)),
        f"{taken} {_digits(1e3 * ours.seconds)}",
        times(bfloat16.seconds / ours.seconds),
        *(_digits(1e3 * step.seconds) for step in (fsdp2, compressed)),
        times(fsdp2.seconds / compressed.seconds),
    ]


def _called(name: str, density: float) -> str:
    return METHODS[name].call.replace("DENSITY", f"{density:g}") if name in METHODS else name


def _ratio(ratio: float) -> str:
    return "as fast as" if 1 / FASTER < ratio < FASTER else f"{_digits(ratio)}x as fast as"


def _ms(step: Step) -> str:
    return f"{_digits(1e3 * step.seconds)} ms"


def _size(step: Step) -> str:
    unit, name = (1e6, "MB") if step.wire_bytes >= 1e6 else (1e3, "kB")
    return f"{_digits(step.wire_bytes / unit)} {name}"


def _digits(number: float) -> str:
    """Format with three significant digits, and all digits of the integer part."""
    return f"{number:,.0f}" if number >= 100 else f"{number:#.3g}"


def main(given: Sequence[str] | None = None) -> int:
    return exit_status("scale", lambda: run(parser().parse_args(given)))


if __name__ == "__main__":
    sys.exit(main())
