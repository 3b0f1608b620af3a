"""Patches over gloo, and of sharded tensors."""

import errno
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dct_patches.files
from dct_patches import WeightPatch, WeightPublisher, WeightSubscriber, broadcast_patch
from support.ranks import on_ranks
from support.weights import assert_bits, bits, initial, published, receiver, step


class Peers:
    """A publisher on one rank, and subscribers on the others. All ranks compute all weights."""

    def __init__(self, rank, sender=1):
        self.sender, self.weights = sender, initial()
        self.publisher = WeightPublisher(self.weights) if rank == sender else None
        self.restart_subscriber()

    def restart_subscriber(self):
        self.received = receiver(self.weights)
        self.subscriber = None if self.publisher else WeightSubscriber(self.received)

    def broadcast(self, patch):
        return broadcast_patch(patch, self.sender, subscriber=self.subscriber)

    def full(self):
        self.broadcast(self.publisher and self.publisher.full())

    def step(self, version):
        step(self.weights, 0.05, version)
        patch = self.broadcast(self.publisher and self.publisher.diff(self.weights))
        if self.publisher:
            self.publisher.confirm(patch)
        assert patch.version == version

    def check(self):
        if self.subscriber:
            assert_bits(bits(self.received), published(self.weights))


@on_ranks(3)
def test_broadcast(rank):
    peers = Peers(rank)
    peers.full()
    peers.check()
    for version in (1, 2):
        peers.step(version)
        peers.check()
    if rank == 2:
        peers.restart_subscriber()
    with pytest.raises((ValueError, RuntimeError), match="patch with base None"):
        peers.step(3)
    assert not peers.publisher or peers.publisher.version == 2  # not confirmed
    peers.full()
    peers.step(3)
    peers.check()
    if peers.publisher:  # it is restarted
        peers.publisher = WeightPublisher(peers.weights)
    with pytest.raises((ValueError, RuntimeError), match="load a full copy"):
        peers.step(1)
    peers.full()
    peers.step(1)
    peers.check()


@on_ranks(2)
def test_refused_broadcasts(rank):
    peers = Peers(rank, sender=0)
    patch = peers.publisher and peers.publisher.full()

    def refused(message, patch, src=0):
        with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
            broadcast_patch(patch, src, subscriber=peers.subscriber)

    refused("src must be in", patch, 2)
    refused("patch must be a WeightPatch on rank src, got None", None)
    extra = patch or WeightPatch("", None, 0, [])
    refused("src must be the same on every rank, got 0 on rank 0, 1 on rank 1", extra, rank)
    refused("patch must be None on ranks that receive, got WeightPatch", extra)
    peers.broadcast(patch)
    peers.check()


def _mesh(*shape):
    warnings.filterwarnings("ignore", category=FutureWarning)  # from DeviceMesh
    return init_device_mesh("cpu", shape)


def _sharded(weights, mesh):
    """The weights as DTensors; `mask` is replicated, and `position` is a plain tensor."""
    made = {name: tensor.clone() for name, tensor in weights.items()}
    for name in made.keys() - {"position"}:
        placement = Replicate() if name == "mask" or not made[name].dim() else Shard(0)
        made[name] = distribute_tensor(made[name], mesh, [placement])
    return made


@on_ranks(3)
def test_sharded_tensors(rank, tmp_path):
    """Rows that do not divide by the ranks, and ranks without rows. Rank 0 reads the versions."""
    mesh, weights = _mesh(3), initial()
    publisher = WeightPublisher(_sharded(weights, mesh))
    publisher.full().save(tmp_path)
    received = receiver(weights)
    subscriber = WeightSubscriber(received)

    def publish(seed):
        step(weights, 0.05, seed)
        patch = publisher.diff(_sharded(weights, mesh))
        patch.save(tmp_path, keep=2)
        publisher.confirm(patch)
        if rank == 0:
            assert subscriber.update(tmp_path) == patch.version
            assert_bits(bits(received), published(weights))
        dist.barrier()
        return patch

    for seed in range(1, 4):
        patch = publish(seed)
    with pytest.raises(ValueError, match=r"patch must be of whole tensors \(save works"):
        patch.to_bytes()
    ranges = {p.name: (p.offset, p.numel) for p in patch.parts}
    assert ranges["layer.weight"] == [(0, 44 * 70), (44 * 70, 44 * 70), (88 * 70, 42 * 70)][rank]
    first = {"mask", "position", "scale", "empty"}  # tensors that the first rank sends
    assert ranges.keys() == weights.keys() - (first if rank else set())

    publisher = WeightPublisher.resume(tmp_path, _sharded(initial(), mesh))
    assert (publisher.id, publisher.version) == (patch.id, 3)
    step(weights, 0.05, 5)
    weights["position"] -= 1  # integers that change have no values for vLLM
    patch = publisher.diff(_sharded(weights, mesh))
    for name, indices, new, _ in publisher.to_indices_and_values(patch):
        assert torch.equal(weights[name].to(new.dtype).view(-1)[indices], new), name
    with pytest.raises(ValueError, match="patch must be of whole tensors"):
        publisher.save_delta_checkpoint(patch, tmp_path)

    before = (tmp_path / "index.json").read_bytes()
    dist.barrier()
    replacing = dct_patches.files.replacing
    if rank == 1:  # its disk is full
        dct_patches.files.replacing = _no_space
    with pytest.raises((OSError, RuntimeError), match="No space left"):
        patch.save(tmp_path)
    dct_patches.files.replacing = replacing
    assert (tmp_path / "index.json").read_bytes() == before
    publish(6)
    replicated = {"a": distribute_tensor(torch.ones(2), mesh, [Replicate()])}
    assert len(WeightPublisher(replicated).full().parts) == (rank == 0)


def _no_space(path):
    raise OSError(errno.ENOSPC, "No space left on device")


@on_ranks(2)
def test_a_module_of_fsdp2(rank, tmp_path):
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(70, 71), mesh=_mesh(2))
    publisher = WeightPublisher(model.named_parameters())
    publisher.full().save(tmp_path)
    model(torch.randn(8, 70)).square().mean().backward()
    torch.optim.AdamW(model.parameters(), lr=1e-3).step()
    publisher.diff(model.named_parameters()).save(tmp_path)
    whole = {name: tensor.detach().full_tensor() for name, tensor in model.named_parameters()}
    if rank == 0:
        received = receiver(whole)
        assert WeightSubscriber(received).update(tmp_path) == 1
        assert_bits(bits(received), published(whole))
    both = distribute_tensor(torch.ones(4), _mesh(1, 2), [Replicate(), Shard(0)])
    columns = distribute_tensor(torch.ones(4, 4), _mesh(2), [Shard(1)])
    with pytest.raises(ValueError, match=r"sharded along its first dimension \(Shard\(0\)\)"):
        WeightPublisher({"a": columns})
    with pytest.raises(ValueError, match="DTensors on one mesh with one dimension"):
        WeightPublisher({"a": both})
    with pytest.raises(TypeError, match=r"named_tensors.* must be a plain dense tensor"):
        WeightSubscriber(model.named_parameters())
