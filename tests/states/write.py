"""Writes 6004d3a.zip beside it: states as that commit saved them. Runs there alone:

    git worktree add OLD 6004d3a; cd OLD
    sed 's/dct_embeddings/dct_parallel/; s/scale=2/accumulator_scale=0.5/' HERE/write.py > write.py
    DCT_BACKEND=eager PYTHONPATH=.:python:tests:tests/parallel python write.py HERE/6004d3a.zip

A folder for each case, with a file for each rank, or what torch.distributed.checkpoint writes. What
loads them, test_saved_states.py, makes its models by the functions below. Gradients are small
integers, which pack well, and an arbitrary number in one place of 64.
"""

import io
import sys
import tempfile
import warnings
import zipfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dct_embeddings import (
    DynamicFeatureRows,
    EquivalentSubstitution,
    FactorizationMachine,
    FeatureRows,
    LinearTerms,
    MomentumScaledRowWiseAdagrad,
    ReplicaSync,
    RowWiseAdagrad,
    ShardedEmbeddingBags,
    merge_feature_rows,
    plan_shards,
)
from dct_parallel import (
    DCTAverager,
    DCTState,
    dct_fully_shard_hook,
    dct_hook,
    merge_states,
    node_mesh,
)
from ranks import Dictated, run_ranks

SIZES = (20_000, 100, 14_000)  # three blocks, of which two ranks own two and one
FEW = (300, 17)
SHAPES = {"gather": ((301, 7), (1, 900), (31,)), "shard": ((1100, 64), (40,))}
TABLES, WIDTH = (40, 25), 8
STEPS = 5


def gradients(shapes, step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    found = []
    for shape in shapes:
        shape = (shape,) if isinstance(shape, int) else shape
        grad = torch.randint(-2, 3, shape, generator=generator).float()
        grad.view(-1)[::64] = torch.randn(grad.view(-1)[::64].shape, generator=generator)
        found.append(grad)
    return found


def data_parallel(transport, local_size):
    model = DistributedDataParallel(Dictated(SIZES))
    mesh = node_mesh(local_size, "cpu") if local_size else None
    state = DCTState(model, density=0.01, transport=transport, mesh=mesh)
    model.register_comm_hook(state, dct_hook)
    return model, state


def averaged():
    module = nn.Module()
    module.p = nn.ParameterList(map(torch.zeros, FEW))
    return module, DCTAverager(module, density=0.1, period=2)


def fully_sharded(transport, shapes):
    warnings.filterwarnings("ignore", category=FutureWarning)  # of DeviceMesh, FSDP and DCP
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(Dictated(shapes), mesh=mesh["shard"])
    return model, dct_fully_shard_hook(model, mesh, 0.05, transport=transport)


def tables(seed):
    warnings.filterwarnings("ignore", category=FutureWarning)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(rows, WIDTH, generator=generator) for rows in TABLES]
    bags = ShardedEmbeddingBags(weights, plan_shards(TABLES, 2), mesh)
    optimizer = MomentumScaledRowWiseAdagrad([bags.weight], lr=0.1, scale=2, delayed=True)
    return bags, optimizer


def features(kind, seed):
    if kind == "dynamic":
        rows = DynamicFeatureRows(1 + WIDTH, 100, 0.3, seed=3)
    else:
        generator = torch.Generator().manual_seed(seed)
        rows = FeatureRows(torch.randn(60, 1 + WIDTH, generator=generator))
    return rows, RowWiseAdagrad([rows.weight], 0.1)


def _saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _data_parallel(rank, transport, local_size):
    model, state = data_parallel(transport, local_size)
    for step in range(STEPS):
        model(*gradients(SIZES, step, rank)).backward()
    return _saved(state.state_dict())


def _averaged(rank):
    module, averager = averaged()
    for step in range(STEPS):
        with torch.no_grad():
            for parameter, grad in zip(module.p, gradients(FEW, step, rank), strict=True):
                parameter -= 0.1 * grad
        averager.average_parameters()
    return _saved(averager.state_dict())


def _fully_sharded(rank, folder, transport):
    shapes = SHAPES[transport]
    model, state = fully_sharded(transport, shapes)
    for step in range(STEPS):
        model(*gradients(shapes, step, rank)).backward()
    dcp.save({"dct": state}, checkpoint_id=folder)


def _tables(rank):
    bags, optimizer = tables(seed=0)
    sync = ReplicaSync(bags, optimizer, every=2, density=0.1)
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        if step == STEPS - 1:  # after which there is something of one step
            sync.flush()
        drawn = torch.rand(len(TABLES), 4, generator=generator)
        ids = (drawn * torch.tensor(TABLES).unsqueeze(1)).long()
        optimizer.zero_grad()
        bags(ids.flatten(), torch.ones_like(ids)).sin().sum().backward()
        optimizer.step()
        sync.step()
    return _saved({"bags": bags.state_dict(), "optimizer": optimizer.state_dict()})


def _features(rank, kind):
    rows, optimizer = features(kind, seed=0)
    if kind == "dynamic":
        rows.attach("sum", optimizer.state[rows.weight]["sum"])
    layer = EquivalentSubstitution(rows, [LinearTerms(), FactorizationMachine(WIDTH, first=1)])
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        ids = torch.randint(60, (24,), generator=generator)
        optimizer.zero_grad()
        linear, pairs = layer(ids, torch.full((2, 4), 3))
        (linear + pairs).sin().sum().backward()
        optimizer.step()
    return _saved({"rows": rows.state_dict(), "optimizer": optimizer.state_dict()})


def main():
    files = {}

    def keep(case, saved):
        files.update({f"{case}/rank{rank}.pt": data for rank, data in enumerate(saved)})
        return [torch.load(io.BytesIO(data), weights_only=True) for data in saved]

    for transport, of_one, of_mesh in (("gather", 2, 4), ("shard", 3, 5)):
        for version, ranks, local_size in ((of_one, 2, None), (of_mesh, 4, 2)):
            case = f"version{version}"
            states = keep(case, run_ranks(_data_parallel, ranks, transport, local_size))
            assert all(state["version"] == version for state in states)
            if version in (2, 5):
                files[f"{case}/merged.pt"] = _saved(merge_states(states))
    keep("averager", run_ranks(_averaged, 2))
    for transport in ("gather", "shard"):
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(_fully_sharded, 4, folder, transport)
            for path in Path(folder).iterdir():
                files[f"fully_sharded_{transport}/{path.name}"] = path.read_bytes()
    keep("two_dimensional", run_ranks(_tables, 4))
    keep("feature_rows", run_ranks(_features, 2, "static"))
    states = keep("dynamic_rows", run_ranks(_features, 2, "dynamic"))
    merged = merge_feature_rows([state["rows"] for state in states])
    files["dynamic_rows/merged.pt"] = _saved(merged)
    with zipfile.ZipFile(sys.argv[1], "w", zipfile.ZIP_LZMA) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_LZMA)


if __name__ == "__main__":
    main()
