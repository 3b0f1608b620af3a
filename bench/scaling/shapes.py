"""Parameter shapes of the models that bench/scale.py knows."""

import math
from collections.abc import Sequence
from itertools import pairwise

from dlrm.data.features import INTS, TABLES, table_rows

Shape = tuple[int, ...]


def dlrm(
    hash_size: int = 4000,
    embedding_dim: int = 16,
    bottom: Sequence[int] = (512, 256, 64),
    top: Sequence[int] = (512, 256),
) -> list[Shape]:
    """DLRM as dlrm builds it, tables and all: data-parallel throughout."""
    vectors = TABLES + 1
    pairs = vectors * (vectors - 1) // 2
    tables = [(rows, embedding_dim) for rows in table_rows(hash_size)]
    bottom_mlp = _linear([INTS, *bottom, embedding_dim])
    return tables + bottom_mlp + _linear([embedding_dim + pairs, *top, 1])


def transformer(layers: int = 12, width: int = 768, vocabulary: int = 50257) -> list[Shape]:
    """GPT-2's blocks (attention 4 width^2, MLP 8 width^2) and tied embeddings; default: small."""
    block = [(3 * width, width), (3 * width,), (width, width), (width,)]
    block += [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    block += [(width,)] * 4  # two layer norms
    return [(vocabulary, width), (1024, width), *(block * layers), (width,), (width,)]


def numel(shapes: Sequence[Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _linear(widths: Sequence[int]) -> list[Shape]:
    return [shape for a, b in pairwise(widths) for shape in ((b, a), (b,))]
