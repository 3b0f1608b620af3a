"""Does it help? What each method takes on one link, and a sentence."""

import argparse

from rich.console import Console

from rates import describe_rate

from .break_even import FASTER
from .cost_model import Model, Step
from .methods import DENSE, METHODS, OURS, called
from .report import Steps, new_table

NOTE = "Times and bytes alone. What {} does to the loss: docs/guide/{}.md."
PAGES = {"sgd": ("the sparse hook", "choosing"), "adamw": ("each", "transformers")}


def best(steps: dict[str, Step]) -> str:
    """The first of METHODS that is as fast as the fastest."""
    fastest = min(step.seconds for step in steps.values())
    known = (method for method in METHODS if method in steps)
    return next(method for method in known if steps[method].seconds < FASTER * fastest)


def sentence(ranks: int, rate: float, steps: dict[str, Step], names: dict[str, str]) -> str:
    """Whether DCT helps, and the times and bytes that say so; without a full stop.

    Args:
        steps: {method: its step}, those of DENSE and one of OURS among them.
        names: {method: how to call it}.
    """
    taken = best(steps)
    others = [method for method in DENSE if method != taken]
    verdict = "It helps"
    if taken not in OURS:
        ours = [method for method in OURS if method in steps]
        others.append(min(ours, key=lambda method: steps[method].seconds))
        verdict = "It does not help" if taken in DENSE else "Another method helps more"
    step = steps[taken]
    *compared, last = (
        f"{_compared(steps[other].seconds / step.seconds)} {names[other]} "
        f"({_ms(steps[other])}, {_size(steps[other])})"
        for other in others
    )
    return (
        f"{verdict}: on {ranks:,} ranks at {describe_rate(rate)} a step with {names[taken]} takes "
        f"{_ms(step)} and sends {_size(step)} a rank, "
        f"{', '.join(compared)} and {last}"
    )


def print_answer(console: Console, steps: Steps, options: argparse.Namespace, model: Model) -> None:
    """The methods as a table, and the sentence, with what it assumes."""
    (((ranks, rate), of_methods),) = steps.items()
    gpus = min(ranks, options.gpus_per_node)
    default = model.default_transport(ranks // gpus)
    names = {m: called(m, options.density, default, in_nodes=gpus > 1) for m in of_methods}
    table = new_table(f"{ranks:,} ranks, {describe_rate(rate)} (predicted)", "method")
    for heading in ("a step", "as fast as dense", "a rank sends"):
        table.add_column(heading, justify="right", no_wrap=True)
    for method, step in of_methods.items():
        faster = _times(of_methods["dense"].seconds / step.seconds)
        table.add_row(names[method], _ms(step), faster, _size(step))
    console.print(table)
    compute = f"{1e3 * of_methods['dense'].compute:g} ms of compute"
    assumed = f"{compute}, {100 * options.overlap:g} % of which hide the exchange, no contention, "
    assumed += "and the costs of kernels and messages above"
    text = f"{sentence(ranks, rate, of_methods, names)}; assumed: {assumed}."
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    note = NOTE.format(*PAGES[options.optimizer])
    console.print(note, style="dim", markup=False, highlight=False)


def _compared(ratio: float) -> str:
    return "as fast as" if 1 / FASTER < ratio < FASTER else f"{_times(ratio)} as fast as"


def _ms(step: Step) -> str:
    return f"{_digits(1e3 * step.seconds)} ms"


def _size(step: Step) -> str:
    unit, name = (1e6, "MB") if step.wire_bytes >= 1e6 else (1e3, "kB")
    return f"{_digits(step.wire_bytes / unit)} {name}"


def _times(ratio: float) -> str:
    return f"{_digits(ratio)}x"


def _digits(number: float) -> str:
    """Three significant digits, or all of an integer's."""
    return f"{number:,.0f}" if number >= 100 else f"{number:#.3g}"
