"""Which options need which others: one that would do nothing is refused, where it was given."""

import argparse
from collections.abc import Collection, Iterator
from typing import NamedTuple

from .optimizers import EMBEDDING_OPTIMIZERS, SCALED

TABLES_WHOLE = ("data", "des")  # --parallel that cut no table off the model


class Rule(NamedTuple):
    """Options that need a setting to be one of some values.

    Attributes:
        options: names as in the namespace, separated by blanks.
        setting: the option that decides.
        values: that it may have, or one of which it may have where it has several; None: any that
            is given; empty: none may be given.
        unless: values of the options that need nothing.
    """

    options: str
    setting: str
    values: Collection[object] | None
    unless: Collection[object] = ()


RULES = (
    Rule("data_format max_malformed", "data", None),
    Rule("multi_hot zipf", "data", ()),
    Rule("model", "parallel", TABLES_WHOLE, unless=("dlrm",)),
    Rule("data_format", "parallel", TABLES_WHOLE, unless=("criteo",)),
    Rule("multi_hot", "parallel", TABLES_WHOLE, unless=(1,)),
    Rule("replicas sync_every sync_density sync_format", "parallel", ("2d",)),
    Rule("embedding_optimizer", "parallel", ("2d",), unless={*EMBEDDING_OPTIMIZERS} - {SCALED}),
    Rule("delayed_accumulator", "embedding_optimizer", (SCALED,)),
    Rule("row_density row_format dedup", "parallel", ("hybrid", "2d")),
    Rule("dynamic_rows", "parallel", ("des",)),
    Rule("hash_size", "dynamic_rows", ()),
    Rule("hash_size", "zipf", ()),
    Rule("density format refresh_every policy transport", "modes", ("dct",)),
    Rule("density", "format", ("bfloat16", "float32"), unless=(1.0,)),
    Rule("refresh_every", "policy", ("fixed",)),
    Rule("local_size", "modes", ("dct",), unless=(1,)),
    Rule("row_density row_format sync_density sync_format", "modes", ("dct",)),
    Rule("embedding_dim", "model", ("dlrm", "fm", "deepfm")),
    Rule("bottom", "model", ("dlrm",)),
    Rule("top", "model", ("dlrm", "deepfm")),
    Rule("resume", "out", None),
    Rule("resume", "overwrite", ()),
)


def broken(given: Collection[str], options: argparse.Namespace) -> str | None:
    """What the first rule that is broken says: option, rule and value; None if all hold.

    Args:
        given: names of the options that were given.
        options: all of them, with their values.
    """
    return next(_broken(given, options), None)


def _broken(given: Collection[str], options: argparse.Namespace) -> Iterator[str]:
    for names, setting, values, unless in RULES:
        got = getattr(options, setting)
        is_given = got is not None and got is not False
        held = got if isinstance(got, list) else [got]
        fine = is_given if values is None else not is_given
        if values:
            fine = not set(held).isdisjoint(values)
        for name in names.split():
            value = getattr(options, name)
            if fine or name not in given or (unless and value in unless):
                continue
            option = flag(name) + (f" {value}" if unless else "")
            if values == ():
                yield f"{option} must come without {flag(setting)}, got both"
            else:
                wanted = f" {' or '.join(map(str, values))}" if values else ""
                shown = ",".join(map(str, held)) if is_given else "none"
                yield f"{option} must come with {flag(setting)}{wanted}, got {shown}"


def flag(name: str) -> str:
    """As it is on the command line."""
    return f"--{name.replace('_', '-')}"
