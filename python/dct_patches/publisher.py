"""The side that has new weights, and a snapshot of the weights that the receivers have."""

import uuid
from collections.abc import Callable, Iterator
from os import PathLike

import torch
from torch import Tensor

import dct_kernels
from dct_kernels import checks
from dct_kernels.patch_layout import MOST_WORDS, words_offset
from dct_parallel.groups import gather_values, require_same, sharing_errors, timeout_of

from . import engines
from .folder import folder_path, remove_unlisted_files
from .part import SIXTEEN_BITS, Part, checksum, checksums, to_host
from .patch import WeightPatch
from .shards import NamedTensors, Shard, cast, group_of, local_shards, named
from .subscriber import WeightSubscriber

HEADER_NUMBERS = 8  # of a payload, as int64


class WeightPublisher:
    """Finds the entries of weights that changed since the last confirmed patch.

    It keeps a snapshot of the weights that receivers have, in `dtype`, on their device.
    The first patch changes the weights that the constructor receives, so pass the weights of the
    checkpoint that the receivers load. If the tensors are DTensors, all ranks of their mesh call
    every method, and each rank handles its own shards.

    Args:
        named_tensors: {name: tensor} or pairs, for example `model.named_parameters()`. DTensors
            must be sharded along their first dimension, or replicated, on one 1-D mesh.
        dtype: torch.bfloat16 or torch.float16. float32 tensors are published in this dtype, rounded
            to nearest even. Other tensors are published in their own dtype; if it does not have 16
            bits, every patch contains the whole tensor.
        rename: returns the name of a tensor in patches. Default: names do not change.

    Attributes:
        id: the id of the last confirmed version.
        version: its number, which is 0 for the initial weights.

    Raises:
        ValueError, TypeError: an argument is invalid.

    >>> publisher = WeightPublisher(model.named_parameters())
    >>> publisher.full().save(folder)
    >>> patch = publisher.diff(model.named_parameters())  # after an optimizer step
    >>> patch.save(folder)
    >>> publisher.confirm(patch)
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
        self._dtype, self._rename = dtype, rename
        tensors = named(op, named_tensors)
        self._group = group_of(op, tensors)
        with sharing_errors(op, self._group):
            shards = local_shards(op, tensors, self._group, rename)
            self._snapshot = {n: s._replace(local=self._copied(s.local)) for n, s in shards.items()}
            self._sums = self._checksums()
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
        """Create a publisher that continues a folder after a restart.

        Its snapshot and id are those of the folder's last version, so no full copy is necessary.
        Files that the stopped publisher did not complete are removed.

        Args:
            folder: a folder to which `WeightPatch.save` wrote.
            named_tensors, dtype, rename: as for the constructor. The values may differ from those
                in the folder.

        Raises:
            ValueError, TypeError: an argument is invalid, a file is damaged, or the folder has
                tensors with other names, shapes or dtypes.
            FileNotFoundError: the folder has no full copy, or lacks a file.
            RuntimeError: another rank raised an error.
        """
        op, made = "WeightPublisher.resume", cls(named_tensors, dtype=dtype, rename=rename)
        with sharing_errors(op, made._group):
            full = WeightPatch.load(folder)
            assert full is not None  # there is always something after no version
            whole = {
                part.name: torch.empty(part.shape, dtype=part.dtype, device="cpu")
                for part in full.parts
            }
            subscriber = WeightSubscriber(whole)
            subscriber.update(folder)
            if made._is_first_rank() and whole.keys() != made._snapshot.keys():
                found = sorted(whole.keys() ^ made._snapshot.keys())
                checks.fail(op, "named_tensors", "the names of the folder", found, verb="have")
            for name, (shape, offset, local) in made._snapshot.items():
                source = whole[name]
                expected = [*source.shape], source.dtype
                if ([*shape], local.dtype) != expected:
                    got = [*shape], local.dtype
                    checks.fail(op, f"named_tensors[{name!r}]", f"{expected}", got)
                local.copy_(source.view(-1)[offset : offset + local.numel()])
            made._sums = made._checksums()
            made.id, made.version = str(subscriber.id), int(subscriber.version or 0)
            if made._is_first_rank():
                remove_unlisted_files(folder_path(op, folder))
        made._new_id(op)  # compares the ids of all ranks
        return made

    @torch.no_grad()
    def diff(self, named_tensors: NamedTensors) -> WeightPatch:
        """Return the changes of the weights since the last confirmed patch.

        A patch that was not confirmed is forgotten. Synchronizes with the device once. A tensor is
        sent whole if its payload would not be smaller. Until the call returns, the payloads may
        need as much memory as the snapshot.

        Args:
            named_tensors: as in the constructor, with the same names, shapes, dtypes and devices.

        Returns:
            The patch. Tensors in it do not share memory with the weights.

        Raises:
            ValueError, TypeError: the argument is invalid.
            RuntimeError: the snapshot was damaged, or another rank raised an error.
        """
        op = "WeightPublisher.diff"
        with sharing_errors(op, self._group):
            tensors = named(op, named_tensors)
            shards = local_shards(op, tensors, self._group, self._rename)
            self._require_same(op, shards)
            self._pending = None
            drafts = {name: self._draft(name, shard.local) for name, shard in shards.items()}
            numbers = to_host([numbers for _, numbers in drafts.values()])
            parts = []
            for name, shard in shards.items():
                *header, old, new = numbers[: HEADER_NUMBERS + 2]
                numbers = numbers[HEADER_NUMBERS + 2 :]
                if old != self._sums[name]:
                    raise RuntimeError(
                        f"dct::{op}: the snapshot of {name!r} must not change, got other bits: "
                        "create a new WeightPublisher, and send a full copy"
                    )
                data = self._data(name, shard.local, drafts[name][0], header)
                parts.append(self._part(name, data, old, new))
        id = self._new_id(op)
        self._pending = WeightPatch(id, self.id, self.version + 1, parts, self._group)
        return self._pending

    @torch.no_grad()
    def confirm(self, patch: WeightPatch) -> None:
        """Advance the snapshot to a patch that the receivers have.

        Call it after `patch.save(folder)`, or after `broadcast_patch`, has returned.

        Raises:
            ValueError, TypeError: it is not the last patch of `diff`, or was confirmed.
        """
        pending = self._require_pending("WeightPublisher.confirm", patch)
        self._pending = None
        for part in pending.parts:
            part.write(self._snapshot[part.name].local)
            self._sums[part.name] = part.new
        self.id, self.version = pending.id, pending.version

    def full(self) -> WeightPatch:
        """Return a copy of the last confirmed version, for a new subscriber or a new folder."""
        parts = [
            self._part(name, shard.local.clone().view(torch.uint8), None, self._sums[name])
            for name, shard in self._snapshot.items()
        ]
        return WeightPatch(self.id, None, self.version, parts, self._group)

    def to_indices_and_values(self, patch: WeightPatch) -> "list[engines.SparseValues]":
        """Return the changed entries as vLLM's `SparseWeightPatch` expects them.

        Call it before `confirm`. If the tensors are sharded, each rank returns the entries of its
        shards, with positions in the whole tensor.

        Returns:
            A list of (name, indices, values, full_shape), one per tensor with changes: indices
            int32 [n] in the flattened tensor, ascending, and values [n] in the tensor's dtype.

        Raises:
            ValueError, TypeError: it is not the last patch of `diff`, or was confirmed. A tensor
                has 2**31 or more elements. A changed entry is NaN, which vLLM rejects. A tensor
                that changed is not of a floating-point dtype.
        """
        op = "WeightPublisher.to_indices_and_values"
        self._require_pending(op, patch)
        return engines.indices_and_values(op, self._changes(patch))

    def save_delta_checkpoint(
        self, patch: WeightPatch, folder: str | PathLike[str], encoding: str = "overwrite"
    ) -> None:
        """Save a patch in the format of the delta checkpoints of SGLang, slime and miles.

        Version 0 of such a chain is the checkpoint that the engine was started with, and must have
        the initial weights of the publisher. The patch becomes the folder `weight_v000001` (the
        number is `patch.version`), which is complete when it appears. Call it before `confirm`.

        Args:
            patch: the last patch of `diff`, of whole tensors.
            folder: the folder of the chain. It is created if it does not exist.
            encoding: "overwrite" (positions and values of changed bytes) or "xor".

        Raises:
            ValueError, TypeError: an argument is invalid. With "overwrite", a tensor has 4 GiB or
                more.
            FileExistsError: the folder has a patch with this number. An engine may have read it, so
                it cannot be replaced.
            OSError: writing failed. The chain did not change.
        """
        op = "WeightPublisher.save_delta_checkpoint"
        checks.require_choice(op, "encoding", encoding, ("overwrite", "xor"))
        self._require_pending(op, patch)
        if self._group is not None:
            checks.fail(op, "patch", "of whole tensors", "a patch of shards")
        engines.save_delta(
            op, self._changes(patch), patch.version, folder_path(op, folder), encoding
        )

    def _draft(self, name: str, new: Tensor) -> tuple[Tensor, Tensor]:
        """(the payload, int64 [10]: its header and the checksums of the snapshot and of `new`)."""
        old = self._snapshot[name].local
        if old.dtype not in SIXTEEN_BITS:
            header = torch.zeros(HEADER_NUMBERS, dtype=torch.int64, device=old.device)
            return header, torch.cat([header, checksum(old), checksum(new)])
        smaller = (2 * old.numel() - words_offset(old.numel())) // 2  # words, than the whole tensor
        capacity = max(1, min(smaller, MOST_WORDS))
        nbytes = dct_kernels.patch_bytes(old.numel(), capacity)
        payload = torch.empty(nbytes, dtype=torch.uint8, device=old.device)
        sums = torch.empty(2, dtype=torch.int64, device=old.device)
        dct_kernels.diff_pack(new, old, payload, sums, capacity)
        return payload, torch.cat([payload[: 8 * HEADER_NUMBERS].view(torch.int64), sums])

    def _data(self, name: str, new: Tensor, payload: Tensor, header: list[int]) -> Tensor:
        """A copy of the used bytes of the payload, or of the whole tensor if that is smaller."""
        old = self._snapshot[name].local
        if old.dtype in SIXTEEN_BITS:
            raw = torch.tensor(header, dtype=torch.int64, device="cpu").view(torch.uint8)
            info = dct_kernels.patch_info(raw)
            if not info.overflow and info.nbytes < old.nbytes:
                return payload[: info.nbytes].clone()
        return self._copied(new).view(torch.uint8)

    def _part(self, name: str, data: Tensor, old: int | None, new: int) -> Part:
        shape, offset, local = self._snapshot[name]
        whole = data.numel() == local.nbytes
        return Part(name, shape, local.dtype, offset, local.numel(), whole, old, new, data)

    def _changes(self, patch: WeightPatch) -> Iterator[engines.Change]:
        for part in patch.parts:
            old = self._snapshot[part.name].local
            new = old.clone()
            part.write(new)
            yield engines.Change(part.name, part.shape, part.offset, old, new)

    def _copied(self, local: Tensor) -> Tensor:
        """A copy of `local` in the dtype in which it is published."""
        published = cast(local, self._dtype) if local.dtype == torch.float32 else local
        return published.clone() if published is local else published

    def _checksums(self) -> dict[str, int]:
        sums = checksums([shard.local for shard in self._snapshot.values()])
        return dict(zip(self._snapshot, sums, strict=True))

    def _require_same(self, op: str, shards: dict[str, Shard]) -> None:
        """Raise unless the tensors are those of the snapshot."""
        if shards.keys() != self._snapshot.keys():
            found = sorted(shards.keys() ^ self._snapshot.keys())
            rule = "the same names in every call"
            checks.fail(op, "named_tensors", rule, f"{found} in only one", verb="have")
        for name, (shape, offset, local) in shards.items():
            snapshot = self._snapshot[name]
            dtype = self._dtype if local.dtype == torch.float32 else local.dtype
            got = [*shape], offset, dtype, local.device
            expected = (
                [*snapshot.shape],
                snapshot.offset,
                snapshot.local.dtype,
                snapshot.local.device,
            )
            if got != expected:
                rule = f"shape, offset, dtype and device {expected}, as before"
                checks.fail(op, f"named_tensors[{name!r}]", rule, got, verb="have")

    def _require_pending(self, op: str, patch: WeightPatch) -> WeightPatch:
        checks.require_type(op, "patch", patch, WeightPatch, "a WeightPatch")
        if self._pending is None or patch.id != self._pending.id:
            last = None if self._pending is None else self._pending.id
            rule = f"the last patch of diff that is not confirmed, {last}"
            checks.fail(op, "patch", rule, patch.id)
        return self._pending

    def _is_first_rank(self) -> bool:
        return self._group is None or self._group.rank() == 0

    def _new_id(self, op: str) -> str:
        """A random id, which all ranks share. Raises an error if their versions differ."""
        id = uuid.uuid4().hex
        if self._group is None:
            return id
        devices = [shard.local.device for shard in self._snapshot.values()]
        timeout = timeout_of(self._group, devices[0])
        gathered = gather_values(op, {"new": id, "id": self.id}, self._group, timeout)
        new = [values.pop("new") for values in gathered.values()]
        require_same(op, gathered)
        return str(new[0])
