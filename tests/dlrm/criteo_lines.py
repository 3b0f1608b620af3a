"""Lines in Criteo's layout: one written by hand, and files of generated rows."""

import gzip

import numpy as np

from dlrm.data.synthetic import Generator

INTS = ["1", "", "0", "-2", "7", "1000000", "", "3", "2", "5", "1", "", "12"]
CATEGORICALS = ["00000001", "", "0000000b", "deadbeef", "not-hex", *["0000002a"] * 21]


def line(label="1", ints=INTS, categoricals=CATEGORICALS):
    return "\t".join([label, *ints, *categoricals])


def write_rows(path, seed, rows, before=()):
    """Write lines, then the first `rows` rows of a generator. A *.gz file is compressed."""
    block = Generator(seed).rows(np.arange(rows))
    lines = [
        line(
            str(label),
            ["" if x < 0 else str(x) for x in ints],
            ["" if v < 0 else f"{v:08x}" for v in values],
        )
        for label, ints, values in zip(block.labels, block.ints, block.values, strict=True)
    ]
    with (gzip.open if path.suffix == ".gz" else open)(path, "wt") as file:
        file.writelines(f"{text}\n" for text in (*before, *lines))
    return path
