"""Trainings as users write them, one for each door: they go on from their last checkpoint.

A checkpoint is a step of which every rank's file is there: each writes its own to a temporary name,
renames it, and removes the one before once all ranks have come so far. A rank that goes on removes
its later ones, or they could be taken for parts of a checkpoint of the next run.
"""

import dataclasses
import gc
import hashlib
import os
import shutil
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from dct_embeddings import ReplicaSync, RowWiseAdagrad, ShardedEmbeddingBags, plan_shards
from dct_parallel import DCTAverager, DCTState, dct_fully_shard_hook, dct_hook, node_mesh
from ranks import batch, ddp, mlp, train_step

STEPS, EVERY = 12, 3  # and steps from one checkpoint to the next
DEPTH = 2  # of the model: three buckets of DDP, or three messages of FSDP2


@dataclasses.dataclass
class Job:
    """What a rank is told.

    Attributes:
        port: of the store.
        hosts: whether rank 0 hosts the store; otherwise the process that started the ranks, as
            torchrun does.
        seconds: the timeout of every group.
        replicas: rows of the mesh, at doors that have one; or 0.
        mark: is called with the name of what begins.
    """

    door: str
    rank: int
    world: int
    port: int
    hosts: bool
    seconds: float
    folder: Path
    replicas: int
    options: dict[str, Any]
    mark: Callable[[str], None] = print

    def mesh(self) -> DeviceMesh | None:
        """As docs/guide/cluster.md makes one whose groups have a timeout of their own."""
        if self.door == "DDP" and self.replicas:
            return node_mesh(self.world // self.replicas, "cpu")
        if not self.replicas:
            return None
        timeout = timedelta(seconds=self.seconds)
        grid = torch.arange(self.world).view(self.replicas, -1)
        groups = [
            dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=timeout)[0]
            for ranks in (grid.T, grid)
        ]
        names = ("replicate", "shard")
        return DeviceMesh.from_group(groups, "cpu", mesh=grid, mesh_dim_names=names)


class _Training:
    """Checkpoints of `parts`, a file per rank."""

    parts: dict[str, Any]

    def __init__(self, job: Job, mesh: DeviceMesh | None) -> None:
        self.job = job

    def load(self) -> int:
        """Go on from the last checkpoint; how many steps it has."""
        ranks = range(self.job.world)
        steps = [n for n in range(1, STEPS + 1) if all(self._path(n, r).exists() for r in ranks)]
        dist.barrier()  # all have looked
        for step in range(max(steps, default=0) + 1, STEPS + 1):  # of a save that was cut short
            self._path(step, self.job.rank).unlink(missing_ok=True)
        if not steps:
            return 0
        saved = torch.load(self._path(steps[-1], self.job.rank), weights_only=True)
        for name, part in self.parts.items():
            part.load_state_dict(saved[name])
        return steps[-1]

    def save(self, steps: int) -> None:
        path = self._path(steps, self.job.rank)
        torch.save(self.content(), f"{path}.tmp")
        os.replace(f"{path}.tmp", path)
        dist.barrier()
        self._path(steps - EVERY, self.job.rank).unlink(missing_ok=True)

    def content(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def _path(self, steps: int, rank: int) -> Path:
        return self.job.folder / f"{steps}-{rank}.pt"


class _Hook(_Training):
    def __init__(self, job: Job, mesh: DeviceMesh | None) -> None:
        super().__init__(job, mesh)
        self.ddp = ddp(mlp(depth=DEPTH))
        self.state = DCTState(self.ddp, mesh=mesh, **job.options)
        self.ddp.register_comm_hook(self.state, dct_hook)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.01, momentum=0.9)
        self.parts = {"model": self.ddp.module, "optimizer": self.optimizer, "dct": self.state}

    def step(self, number: int) -> None:
        train_step(self.ddp, self.optimizer, *batch(number, self.job.rank))


class _Averager(_Training):
    def __init__(self, job: Job, mesh: DeviceMesh | None) -> None:
        super().__init__(job, mesh)
        self.model = mlp(depth=DEPTH)
        self.averager = DCTAverager(self.model, **job.options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.parts = {"model": self.model, "optimizer": self.optimizer, "dct": self.averager}

    def step(self, number: int) -> None:
        train_step(self.model, self.optimizer, *batch(number, self.job.rank))
        self.averager.average_parameters()


class _FullySharded(_Training):
    """By torch.distributed.checkpoint, which writes .metadata last."""

    def __init__(self, job: Job, mesh: DeviceMesh | None) -> None:
        super().__init__(job, mesh)
        self.model = mlp(depth=DEPTH)
        for layer in (self.model[0], self.model[2], self.model):
            fully_shard(layer, mesh=mesh["shard"])
        self.state = dct_fully_shard_hook(self.model, mesh=mesh, **job.options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def step(self, number: int) -> None:
        train_step(self.model, self.optimizer, *batch(number, self.job.rank))

    def load(self) -> int:
        steps = [int(path.parent.name) for path in self.job.folder.glob("*/.metadata")]
        if not steps:
            return 0
        content = self._to_save()
        dcp.load(content, checkpoint_id=self.job.folder / str(max(steps)))
        weights, momentum = content["model"], content["optimizer"]
        set_state_dict(
            self.model, self.optimizer, model_state_dict=weights, optim_state_dict=momentum
        )
        return max(steps)

    def save(self, steps: int) -> None:
        dcp.save(self._to_save(), checkpoint_id=self.job.folder / str(steps))
        dist.barrier()
        if self.job.rank == 0:
            shutil.rmtree(self.job.folder / str(steps - EVERY), ignore_errors=True)

    def _to_save(self) -> dict[str, Any]:
        weights, momentum = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": momentum, "dct": self.state}

    def content(self) -> dict[str, Any]:
        return self._to_save() | {"dct": self.state.state_dict()}


class _Replicas(_Training):
    ROWS, WIDTH, BATCH = (400, 250), 8, 40

    def __init__(self, job: Job, mesh: DeviceMesh | None) -> None:
        super().__init__(job, mesh)
        generator = torch.Generator().manual_seed(0)
        tables = [torch.randn(rows, self.WIDTH, generator=generator) for rows in self.ROWS]
        plan = plan_shards(self.ROWS, mesh["shard"].size())
        self.bags = ShardedEmbeddingBags(tables, plan, mesh)
        self.optimizer = RowWiseAdagrad([self.bags.weight], lr=0.1)
        self.sync = ReplicaSync(self.bags, optimizer=self.optimizer, every=2, **job.options)
        self.parts = {"bags": self.bags, "optimizer": self.optimizer}

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(100 * number + self.job.rank)
        drawn = torch.rand(len(self.ROWS), self.BATCH, generator=generator) ** 2
        ids = (drawn * torch.tensor(self.ROWS).unsqueeze(1)).long()
        self.optimizer.zero_grad()
        out = self.bags(ids.flatten(), torch.ones_like(ids))
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sin().mean().backward()
        self.optimizer.step()
        self.sync.step()

    def save(self, steps: int) -> None:
        self.sync.flush()
        super().save(steps)


DOORS = {"DDP": _Hook, "averager": _Averager, "FSDP2": _FullySharded, "replicas": _Replicas}


def train(job: Job) -> None:
    """A rank, from its start to its end. Marks: make, step, save, end, and then a digest."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("SIGTERM"))
    os.environ |= {"RANK": str(job.rank), "WORLD_SIZE": str(job.world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job.port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": str(not job.hosts)}
    os.environ |= {"TORCHELASTIC_RESTART_COUNT": "0"}
    dist.init_process_group("gloo", timeout=timedelta(seconds=job.seconds))
    mesh = job.mesh()
    job.mark("make")
    training = DOORS[job.door](job, mesh)
    for step in range(training.load(), STEPS):
        job.mark("step")
        training.step(step)
        if (step + 1) % EVERY == 0:
            job.mark("save")
            training.save(step + 1)
    job.mark("end")
    job.mark(_digest(training.content()))
    dist.barrier()
    del training, mesh
    gc.collect()  # the model ends before its process group
    dist.destroy_process_group()


def _digest(content: Any) -> str:
    """Of all tensors in it, and their names."""
    digest = hashlib.sha256()

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                add(f"{name}.{key}", value[key])
        elif isinstance(value, torch.Tensor):
            local = value.to_local() if hasattr(value, "to_local") else value
            digest.update(f"{name} {local.dtype} {tuple(local.shape)}".encode())
            digest.update(local.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())

    add("", content)
    return digest.hexdigest()
