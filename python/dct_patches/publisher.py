"""The side that has new weights, and a snapshot of the weights that the receivers have."""

import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from os import PathLike
from typing import Any

import torch
from torch import Tensor

import dct_kernels
from dct_kernels import checks
from dct_kernels.layout import HEADER_BYTES
from dct_kernels.patch_layout import MOST_WORDS, words_offset
from dct_parallel import groups

from . import engines
from .files import folder_path
from .part import SIXTEEN_BITS, Part, checksum, checksums, require_equal, to_host
from .patch import WeightPatch, require_unsharded
from .shards import NamedTensors, device_of, group_of, local_parts, named
from .subscriber import WeightSubscriber


class WeightPublisher:
    """Finds the entries of weights that changed since the last confirmed patch.

    It keeps a snapshot of the weights that receivers have. If the tensors are DTensors, all ranks
    of their mesh call every method, and each rank handles its own shards.

    Args:
        named_tensors: {name: tensor} or pairs, for example `model.named_parameters()`, with the
            values of the checkpoint that the receivers load. DTensors must be sharded along their
            first dimension, or replicated, on one 1-D mesh.
        dtype: torch.bfloat16 or torch.float16, in which float32 tensors are published. Tensors of
            other dtypes are published in their own dtype.
        rename: returns the name of a tensor in patches. Default: names do not change.

    Attributes:
        id, version: of the last confirmed version. The initial weights have version 0.
    """

    @checks.names_keywords
    def __init__(
        self,
        named_tensors: NamedTensors,
        *,
        dtype: torch.dtype = torch.bfloat16,
        rename: Callable[[str], str] | None = None,
    ) -> None:
        op = "WeightPublisher"
        checks.require_dtype(op, "dtype", dtype, SIXTEEN_BITS)
        if rename is not None:
            checks.require_type(op, "rename", rename, Callable, "a function")  # type: ignore[arg-type]
        self._dtype, self._rename = dtype, rename or str
        tensors = named(op, named_tensors, self._rename)
        self._group = group_of(op, tensors)
        with groups.sharing_errors(op, self._group):
            parts = local_parts(op, tensors, self._group)
            self._snapshot = {name: self._published(part) for name, part in parts.items()}
            self._update_checksums()
        self._pending: WeightPatch | None = None
        self.id, self.version = "", 0
        self.id = self._new_id(op)

    @classmethod
    def resume(
        cls,
        folder: str | PathLike[str],
        named_tensors: NamedTensors,
        *,
        dtype: torch.dtype = torch.bfloat16,
        rename: Callable[[str], str] | None = None,
    ) -> "WeightPublisher":
        """Create a publisher that continues a folder of `WeightPatch.save` after a restart.

        The arguments are those of the constructor, but the snapshot has the values in the folder.
        Raises the errors of `WeightPatch.load` and `WeightSubscriber.load`.
        """
        op = "WeightPublisher.resume"
        tensors = named(op, named_tensors)
        made = cls(tensors, dtype=dtype, rename=rename)
        with groups.sharing_errors(op, made._group):
            whole = {
                name: torch.empty(tensor.shape, dtype=made._dtype_of(tensor), device="cpu")
                for name, tensor in named(op, tensors, made._rename).items()
            }
            subscriber = WeightSubscriber(whole)
            made.version = subscriber.update(folder)
            made.id = str(subscriber.id)
            for part in made._snapshot.values():
                part.values.copy_(whole[part.name].view(-1)[part.offset :][: part.numel])
            made._update_checksums()
        made._new_id(op)  # compares the ids of all ranks
        return made

    @torch.no_grad()
    def diff(self, named_tensors: NamedTensors) -> WeightPatch:
        """Return the changes of the weights since the last confirmed patch.

        A patch that was not confirmed is forgotten. Names, shapes, dtypes and devices must be those
        of the constructor. Synchronizes with the device once.

        Raises:
            ValueError, TypeError: the argument is invalid.
            RuntimeError: the snapshot was damaged, or another rank raised an error.
        """
        op = "WeightPublisher.diff"
        with groups.sharing_errors(op, self._group):
            new = local_parts(op, named(op, named_tensors, self._rename), self._group)
            rule = "as before shape, offset, size, dtype and device"
            before, now = map(self._described, (self._snapshot, new))
            require_equal(op, "named_tensors", rule, before, now)
            self._pending = None
            drafts = [self._draft(base, new[name].values) for name, base in self._snapshot.items()]
            rows = to_host([row for _, row in drafts])
            parts = []
            for base, (payload, _), row in zip(self._snapshot.values(), drafts, rows, strict=True):
                old_sum, new_sum = row[HEADER_BYTES:].view(torch.int64).tolist()
                if old_sum != base.new:
                    rule = f"unchanged in {base.name!r} (create a new publisher, send a full copy)"
                    checks.fail(op, "snapshot", rule, "other bits", RuntimeError)
                info = dct_kernels.patch_info(row[:HEADER_BYTES]) if len(payload) else None
                if info is None or info.overflow or info.nbytes >= base.data.numel():
                    part = self._published(new[base.name])
                else:
                    part = replace(base, whole=False, data=payload[: info.nbytes].clone())
                parts.append(replace(part, old=old_sum, new=new_sum))
        id = self._new_id(op)
        self._pending = WeightPatch(id, self.id, self.version + 1, parts, self._group)
        return self._pending

    @torch.no_grad()
    def confirm(self, patch: WeightPatch) -> None:
        """Advance the snapshot to the last patch of `diff`, which the receivers have.

        Call it after `patch.save(folder)`, or after `broadcast_patch`, has returned.
        """
        pending = self._require_pending("WeightPublisher.confirm", patch)
        self._pending = None
        for part in pending.parts:
            base = self._snapshot[part.name]
            part.write(base.values)
            self._snapshot[part.name] = replace(base, new=part.new)
        self.id, self.version = pending.id, pending.version

    def full(self) -> WeightPatch:
        """Return a copy of the last confirmed version, for a new subscriber or a new folder."""
        parts = [replace(part, data=part.data.clone()) for part in self._snapshot.values()]
        return WeightPatch(self.id, None, self.version, parts, self._group)

    def to_indices_and_values(self, patch: WeightPatch) -> list[engines.SparseValues]:
        """Return the changed entries as vLLM's `SparseWeightPatch` expects them.

        Call it before `confirm`. If the tensors are sharded, each rank returns its own entries.

        Returns:
            (name, indices, values, full_shape) of each tensor with changes: ascending int32 indices
            [n] of the flattened whole tensor, and values [n] in its dtype.

        Raises:
            ValueError: it is not the last patch of `diff`. A tensor with changes has 2**31 or more
                elements, or no floating-point dtype. A new value is NaN, which vLLM rejects.
        """
        op = "WeightPublisher.to_indices_and_values"
        return engines.indices_and_values(op, self._changes(self._require_pending(op, patch)))

    def save_delta_checkpoint(
        self, patch: WeightPatch, folder: str | PathLike[str], encoding: str = "overwrite"
    ) -> None:
        """Save a patch in the format of the delta checkpoints of SGLang, slime and miles.

        Version 0 of such a chain is the checkpoint that the engine was started with, and must have
        the initial weights of the publisher. Call it before `confirm`.

        Args:
            patch: the last patch of `diff`, of whole tensors. "overwrite" needs less than 4 GiB.
            folder: the chain. The patch becomes its folder `weight_v000001` (`patch.version`).
            encoding: "overwrite" (positions and values of changed bytes) or "xor".

        Raises:
            ValueError, TypeError: an argument is invalid.
            OSError: writing failed, or the chain has this version, which an engine may have read.
        """
        op = "WeightPublisher.save_delta_checkpoint"
        checks.require_choice(op, "encoding", encoding, ("overwrite", "xor"))
        changes = self._changes(self._require_pending(op, patch))
        require_unsharded(op, patch)
        engines.save_delta(op, changes, patch.version, folder_path(op, folder), encoding)

    def _dtype_of(self, tensor: Tensor) -> torch.dtype:
        return self._dtype if tensor.dtype == torch.float32 else tensor.dtype

    def _published(self, part: Part) -> Part:
        """A copy in the dtype of patches. NaN of float32 changes as in `diff_pack`."""
        copied = part.values.to(self._dtype_of(part.values), copy=True)
        if part.dtype == torch.float32:
            copied.masked_fill_(part.values.isnan(), float("nan"))
        return replace(part, dtype=copied.dtype, data=copied.view(torch.uint8))

    def _update_checksums(self) -> None:
        sums = checksums({name: part.values for name, part in self._snapshot.items()})
        self._snapshot = {n: replace(part, new=sums[n]) for n, part in self._snapshot.items()}

    def _described(self, parts: dict[str, Part]) -> dict[str, tuple[Any, ...]]:
        return {
            name: (p.shape, p.offset, p.numel, self._dtype_of(p.values), p.data.device)
            for name, p in parts.items()
        }

    def _draft(self, base: Part, new: Tensor) -> tuple[Tensor, Tensor]:
        """(the payload, if any; a header and the checksums of the snapshot and of `new`)."""
        if base.dtype not in SIXTEEN_BITS:
            sums = torch.cat([checksum(base.values), checksum(new)]).view(torch.uint8)
            return sums[:0], torch.cat([sums.new_zeros(HEADER_BYTES), sums])
        smaller = (base.data.numel() - words_offset(base.numel)) // 2  # words, than the tensor
        capacity = max(1, min(smaller, MOST_WORDS))
        nbytes = dct_kernels.patch_bytes(base.numel, capacity)
        payload = torch.empty(nbytes, dtype=torch.uint8, device=new.device)
        sums = torch.empty(2, dtype=torch.int64, device=new.device)
        dct_kernels.diff_pack(new, base.values, payload, sums, capacity)
        return payload, torch.cat([payload[:HEADER_BYTES], sums.view(torch.uint8)])

    def _changes(self, patch: WeightPatch) -> Iterator[tuple[Part, Tensor, Tensor]]:
        for part in patch.parts:
            old = self._snapshot[part.name].values
            new = old.clone()
            part.write(new)
            yield part, old, new

    def _require_pending(self, op: str, patch: WeightPatch) -> WeightPatch:
        checks.require_type(op, "patch", patch, WeightPatch, "a WeightPatch")
        if self._pending is None or patch.id != self._pending.id:
            rule = f"the last patch of diff that is not confirmed, {self._pending}"
            checks.fail(op, "patch", rule, patch.id)
        return self._pending

    def _new_id(self, op: str) -> str:
        """A random id, which all ranks share. Raises an error if their versions differ."""
        values = {"new": uuid.uuid4().hex, "id": self.id}
        if self._group is not None:
            timeout = groups.timeout_of(self._group, device_of(self._group))
            gathered = groups.gather_values(op, values, self._group, timeout)
            new = [values.pop("new") for values in gathered.values()]
            groups.require_same(op, gathered)
            return str(new[0])
        return values["new"]
