"""Lines in Criteo's layout, written by hand."""

INTS = ["1", "", "0", "-2", "7", "1000000", "", "3", "2", "5", "1", "", "12"]
CATEGORICALS = ["00000001", "", "0000000b", "deadbeef", "not-hex", *["0000002a"] * 21]


def line(label="1", ints=INTS, categoricals=CATEGORICALS):
    return "\t".join([label, *ints, *categoricals])
