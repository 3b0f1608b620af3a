"""How many bytes a rank sends in a collective, by formula: rings, as gloo and NCCL have them."""


def all_reduce_bytes(nbytes: int, world_size: int) -> int:
    """Bytes each rank sends in a ring all-reduce of `nbytes`: reduce-scatter, then all-gather."""
    return 2 * (world_size - 1) * nbytes // world_size


def all_gather_bytes(nbytes: int, world_size: int) -> int:
    """Bytes each rank sends in an all-gather to which it contributes `nbytes`."""
    return (world_size - 1) * nbytes
