"""The ops on weight patches: the changed entries of 16-bit weights, bit for bit.

The body of each function only checks its arguments. The decorator `define` adds the call of the op.
"""

# mypy: disable-error-code="return"

import torch
from torch import Tensor

from . import checks, patch_layout
from ._ops import define
from .checks import UINT8

WEIGHTS = tuple(patch_layout.DTYPE_CODES)


def _status(patch: Tensor, *_: object) -> Tensor:
    return patch.new_empty(1, dtype=torch.int32)


@define(
    "(Tensor weights, Tensor snapshot, Tensor(a!) patch, Tensor(b!)? checksums, SymInt capacity) "
    "-> ()"
)
def diff_pack(
    weights: Tensor, snapshot: Tensor, patch: Tensor, checksums: Tensor | None, capacity: int
) -> None:
    """Pack the entries of `weights` whose bits differ from `snapshot`, in one pass over memory.

    Bits are compared, so 0.0 differs from -0.0, and a NaN differs from a NaN with other bits. If
    `weights` is float32, its cast to the dtype of `snapshot` is compared and packed (rounded to
    nearest even; every NaN becomes the positive quiet NaN). If the changes need more than
    `capacity` words, the patch has the overflow flag, and readers reject it. The snapshot does not
    change; `patch_apply` on the snapshot updates it. Mutates `patch` and `checksums`.

    Args:
        weights: float32, or the dtype of `snapshot` [numel].
        snapshot: bfloat16 or float16 [numel].
        patch: uint8 [nbytes], 16-byte aligned, nbytes = `patch_bytes(numel, capacity)`. Bytes after
            the last word are not written. `patch_info` returns the number of bytes to send.
        checksums: None, or int64 [2], written: the `checksum` of the snapshot and of the weights.
        capacity: maximum number of 16-bit words, 1 to 2**32 - 1.

    Raises:
        ValueError, TypeError: an argument is invalid.

    Source: this project. docs/reference/payload.md defines the format.

    >>> old = torch.ones(4, dtype=torch.bfloat16)
    >>> new = torch.tensor([1.0, 1.0078125, 1.0, -2.0], dtype=torch.bfloat16)
    >>> patch = torch.empty(patch_bytes(4, 8), dtype=torch.uint8)
    >>> diff_pack(new, old, patch, None, 8)
    >>> patch_info(patch).words, patch_info(patch).nbytes  # a step of 1, and a full value
    (3, 74)
    >>> patch_apply(patch, old), torch.equal(old, new)
    (tensor([0], dtype=torch.int32), True)
    """
    op, like = "diff_pack", ("snapshot", snapshot)
    checks.require_tensor(op, "snapshot", snapshot, WEIGHTS)
    checks.require_tensor(op, "weights", weights, (torch.float32, snapshot.dtype), like=like)
    checks.require_numel(op, "weights", weights, snapshot.numel(), "like snapshot")
    checks.require_tensor(op, "patch", patch, UINT8, like=like)
    checks.require_int(op, "capacity", capacity, 1, patch_layout.MOST_WORDS)
    nbytes = patch_layout.patch_bytes(snapshot.numel(), capacity)
    if patch.numel() != nbytes:
        rule = f"{nbytes} bytes for {snapshot.numel()} elements and capacity {capacity}"
        checks.fail(op, "patch", rule, patch.numel(), verb="have")
    written = {"patch": patch}
    if checksums is not None:
        checks.require_tensor(op, "checksums", checksums, (torch.int64,), like=like)
        checks.require_numel(op, "checksums", checksums, 2, "(of the snapshot and of the weights)")
        written["checksums"] = checksums
    checks.memory(op, written, {"weights": weights, "snapshot": snapshot}, ("patch",))


@define("(Tensor patch, SymInt numel, ScalarType dtype) -> Tensor", _status)
def patch_check(patch: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """Validate a patch from an untrusted source, without the weights.

    Args:
        patch: uint8 [nbytes], 16-byte aligned: the whole patch, or its first
            `patch_info(patch).nbytes` bytes or more. Any content and any size are allowed.
        numel: number of elements of the weights.
        dtype: dtype of the weights, torch.bfloat16 or torch.float16.

    Returns:
        status int32 [1]: 0, or a sum of the flags 1 (the header is invalid, has another numel or
        dtype, or the words do not fit in the patch), 2 (the numbers of the blocks are invalid, or
        their sum differs from the header), 4 (the positions of a block are not ascending or outside
        the block, or it has a wrong number of full values) and 8 (overflow).

    Raises:
        ValueError, TypeError: an argument is invalid.

    Source: this project.

    >>> patch_check(torch.zeros(64, dtype=torch.uint8), 4, torch.bfloat16)
    tensor([1], dtype=torch.int32)
    """
    op = "patch_check"
    checks.require_tensor(op, "patch", patch, UINT8)
    checks.require_int(op, "numel", numel, 0, 2**63 - 1)
    checks.require_dtype(op, "dtype", dtype, WEIGHTS)
    checks.memory(op, {}, {"patch": patch}, ("patch",))


@define("(Tensor patch, Tensor(a!) weights) -> Tensor", _status)
def patch_apply(patch: Tensor, weights: Tensor) -> Tensor:
    """Set the changed entries of `weights`, and return the same status as `patch_check`.

    If the status has the flag 1, 2 or 8, no entry changes. If it has the flag 4, no entry of an
    invalid block changes. Steps are added to the old bit patterns, so apply a patch only to
    weights with the bits of the snapshot, and only once. The `checksum` of the weights shows
    whether they have these bits. Mutates `weights`.

    Args:
        patch: as given to `patch_check`.
        weights: bfloat16 or float16 [numel].

    Returns:
        status int32 [1], see `patch_check`.

    Raises:
        ValueError, TypeError: an argument is invalid.

    Source: this project.

    >>> patch_apply(torch.zeros(64, dtype=torch.uint8), torch.ones(4, dtype=torch.bfloat16))
    tensor([1], dtype=torch.int32)
    """
    op, like = "patch_apply", ("weights", weights)
    checks.require_tensor(op, "weights", weights, WEIGHTS)
    checks.require_tensor(op, "patch", patch, UINT8, like=like)
    checks.memory(op, {"weights": weights}, {"patch": patch}, ("patch",))


@define("(Tensor weights) -> Tensor", lambda weights: weights.new_empty(1, dtype=torch.int64))
def checksum(weights: Tensor) -> Tensor:
    """Return a checksum of the bits and positions of all entries.

    It is a sum modulo 2**64 of hashes, so it does not depend on the order of the sum. It detects
    errors, but not manipulation.

    Args:
        weights: bfloat16 or float16 [numel].

    Returns:
        int64 [1]. 0 if there are no entries.

    Raises:
        ValueError, TypeError: an argument is invalid.

    Source: the hash is NH from UMAC (RFC 4418) with fixed keys (docs/reference/ops.md).

    >>> checksum(torch.zeros(1, dtype=torch.bfloat16))
    tensor([3482255180180717546])
    """
    checks.require_tensor("checksum", "weights", weights, WEIGHTS)
