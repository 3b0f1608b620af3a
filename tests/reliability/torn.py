"""Where files are cut off."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path


def places(paths: Sequence[Path]) -> list[tuple[Path, int]]:
    """(a file, bytes that are left of it): every 4 kB, and all but one."""
    sizes = {path: path.stat().st_size for path in paths}
    return [
        (path, cut)
        for path, size in sizes.items()
        for cut in sorted({*range(0, size, 4096), size - 1})
    ]


def cuts(paths: Sequence[Path], cases: Sequence[int], seed: int) -> Iterator[tuple[int, Path, int]]:
    """(case, a file, bytes that are left of it): in all places, then at random."""
    found = places(paths)
    for case in cases:
        if case < len(found):
            path, cut = found[case]
        else:
            choose = random.Random(seed * 0x9E3779B1 + case)
            path = choose.choice(list(paths))
            cut = choose.randrange(path.stat().st_size)
        yield case, path, cut
