"""Tables with ids of a power law, as they are asked for: known without numpy, for the help."""

from typing import NamedTuple


class Zipf(NamedTuple):
    """Categoricals in the place of Criteo's: `tables` of them, none missing, with as many values as
    a table of `rows` has place for. Value v has a probability of about (v + 1)^-exponent. Tables
    interact in pairs of neighbours."""

    tables: int
    rows: int
    exponent: float
