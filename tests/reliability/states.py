"""States of the doors read from files that are torn or another's: on one rank of two."""

import logging
import shutil
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dct_parallel import DCTAverager, dct_fully_shard_hook, merge_states
from ranks import batch, ddp, hooked, mlp, shard_mesh, train_step

from .torn import cuts, places

WIDTH = 96


def _ddp(width, density):
    return (*hooked(ddp(mlp(width, 4)), density=density), lambda: None)


def _averager(width, density):
    model = mlp(width, 4)
    averager = DCTAverager(model, density=density, period=2)
    return model, averager, averager.average_parameters


def _fsdp2(width, density):
    mesh = shard_mesh(2, 1)
    model = fully_shard(mlp(width, 4), mesh=mesh["shard"])
    return model, dct_fully_shard_hook(model, mesh=mesh, density=density), lambda: None


DOORS = {"DDP": _ddp, "averager": _averager, "FSDP2": _fsdp2}
FOREIGN = ("run", "rank", "model", "setting")


class _Run:
    """A model that is trained through a door."""

    def __init__(self, door, width=WIDTH, density=0.5):
        self.width = width
        self.model, self.holder, self._then = DOORS[door](width, density)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def train(self, steps):
        for step in steps:
            train_step(self.model, self._optimizer, *batch(step, dist.get_rank(), self.width))
            self._then()

    def bits(self):
        """All numbers of the state and the model; not the run's own name."""
        leaves = [leaf for leaf in _leaves(self.holder.state_dict()) if leaf[0] != "run_id"]
        return [value for _, value in leaves] + [_local(p) for p in self.model.parameters()]


def _local(tensor):
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _leaves(state):
    for key, value in state.items():
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield key, _local(value) if isinstance(value, torch.Tensor) else value


def _equal(ours, theirs):
    return len(ours) == len(theirs) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(ours, theirs, strict=True)
    )


def _save(run, folder, way):
    if way == "torch.save":
        torch.save(run.holder.state_dict(), folder / f"dct{dist.get_rank()}.pt")
    else:
        dcp.save({"dct": run.holder}, checkpoint_id=folder)
    dist.barrier()


def _load(run, folder, way):
    if way == "torch.save":
        path = folder / f"dct{dist.get_rank()}.pt"
        run.holder.load_state_dict(torch.load(path, weights_only=True))
    elif way == "DCP":
        dcp.load({"dct": run.holder}, checkpoint_id=folder)
    elif isinstance(run.model, torch.nn.parallel.DistributedDataParallel):
        run.holder.load_state_dict(merge_states(folder))
    else:
        run.holder.load_merged(folder)


def torn(rank, door, way, folder, cases, seed):
    """What `run` of the part gives, of this rank."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # of DeviceMesh, FSDP and DCP
    logging.disable()  # of DCP, which logs every error that it raises
    whole, cut = folder / "whole", folder / "cut"
    if rank == 0:
        whole.mkdir()
    dist.barrier()
    run, alone = _Run(door), _Run(door)
    run.train(range(4))
    alone.train(range(4))
    _save(run, whole, way)
    run.train(range(4, 7))
    alone.train(range(4, 7))
    before, failures, refused = run.bits(), [], 0
    paths = sorted(
        path for path in whole.iterdir() if way != "torch.save" or str(rank) in path.name
    )
    for case, path, left in cuts(paths, cases, seed):
        if rank == 0:
            shutil.copytree(whole, cut)
        dist.barrier()
        if rank == 0 or way == "torch.save":
            (cut / path.name).write_bytes(path.read_bytes()[:left])
        dist.barrier()
        what = f"{path.name} of {left} bytes"
        try:
            _load(run, cut, way)
        except BaseException:  # torch's own, in most cases; DCP's are no Exceptions
            refused += 1
        else:
            failures.append({"case": case, "what": f"{what} was taken"})
        if not _equal(run.bits(), before):
            failures.append({"case": case, "what": f"{what}: something changed"})
        dist.barrier()
        if rank == 0:
            shutil.rmtree(cut)
    run.train(range(7, 10))
    alone.train(range(7, 10))
    if not _equal(run.bits(), alone.bits()):
        failures.append({"case": cases[-1], "what": "the run went on otherwise"})
    return {"failures": failures, "refused": refused, "max_places": len(places(paths))}


def foreign(rank, door, folder, cases, seed):
    """What `run` of the part gives, of this rank."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # of DeviceMesh and FSDP
    failures = []
    for case in cases:
        what, here = FOREIGN[case], folder / FOREIGN[case]
        if rank == 0:
            here.mkdir()
        dist.barrier()
        other = {"model": {"width": 64}, "setting": {"density": 0.25}}.get(what, {})
        source = _Run(door, **other)
        source.train(range(4))
        _save(source, here, "torch.save")
        run = _Run(door)
        run.train(range(4))
        before, error = run.bits(), None
        path = here / f"dct{1 - rank if what == 'rank' else rank}.pt"
        try:
            if what != "run":
                run.holder.load_state_dict(torch.load(path, weights_only=True))
            else:  # on one rank: the next step says it
                own = run.holder.state_dict() if rank == 0 else torch.load(path, weights_only=True)
                run.holder.load_state_dict(own)
                run.train(range(4, 6))
        except (ValueError, RuntimeError) as raised:
            error = str(raised)
        if error is None or "dct::" not in error:
            failures.append({"case": case, "what": f"of another {what}: {error}"})
        if what != "run" and not _equal(run.bits(), before):
            failures.append({"case": case, "what": f"of another {what}: something changed"})
    return {"failures": failures, "refused": len(cases) - len(failures)}
