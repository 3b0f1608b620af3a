"""DeepSpeed on the process group "dct": ZeRO, and its collectives (make recipes)."""

import os

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("deepspeed", reason="deepspeed is in the environment of make recipes")

from dct_parallel import process_group
from support.programs import run_as_torchrun
from support.ranks import batch, mlp

STEPS = 40
STAGES = {0: "all_reduce", 1: "all_reduce", 2: "all_reduce", 3: "reduce_scatter"}
BACKENDS = ("gloo", "dct")


def _start(backend):
    """Initialize DeepSpeed, and return it. It sets its accelerator when it is imported."""
    os.environ |= {"DS_ACCELERATOR": "cpu"}
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it bypasses process groups
    process_group.configure(min_bytes=4000)
    deepspeed.init_distributed(dist_backend=backend, verbose=False)
    assert dist.get_backend() == backend
    return deepspeed


def _losses(backend):
    """{stage: losses of the steps}, and the collectives that were compressed in each stage."""
    deepspeed, losses, compressed = _start(backend), {}, {}
    for stage in STAGES:
        config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
        config |= {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
        config |= {"zero_allow_untested_optimizer": True}
        model = mlp()
        # DeepSpeed does not initialize the padding of parameters of odd sizes (docs/guide).
        model[-1] = torch.nn.Linear(64, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        before = process_group.stats()
        losses[stage] = []
        for step in range(STEPS):
            x, y = (t.bfloat16() for t in batch(step % 4, dist.get_rank()))
            loss = (engine(x) - y).float().square().mean()
            engine.backward(loss)
            engine.step()
            losses[stage].append(loss.item())
        after = process_group.stats().items()
        compressed[stage] = [name for name, calls in after if calls != before.get(name)]
    return torch.tensor(list(losses.values())), compressed


def test_zero_trains_in_int8_as_on_gloo():
    (dense, nothing), (found, compressed) = (run_as_torchrun(_losses, 2, b)[0] for b in BACKENDS)
    assert nothing == {stage: [] for stage in STAGES}
    assert compressed == {stage: [collective] for stage, collective in STAGES.items()}
    assert (dense[:, -4:].mean(1) < 0.8 * dense[:, :4].mean(1)).all()
    assert torch.allclose(found, dense, atol=0.01) and not torch.equal(found, dense)


def _collectives(backend):
    """The cases of DeepSpeed's tests/unit/comm/test_dist.py and more, with 3 and 3000 entries."""
    comm, found = _start(backend).comm, {}
    rank, ranks = comm.get_rank(), comm.get_world_size()
    for numel in (3, 3000):
        x = torch.linspace(1, 2, numel) * (rank + 1)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            comm.all_reduce(y := x.to(dtype, copy=True))
            comm.inference_all_reduce(z := x.to(dtype, copy=True))
            found |= {f"all-reduce, {dtype}, {numel}": y, f"inference, {dtype}, {numel}": z}
        comm.all_reduce_coalesced(ys := [x.clone(), 2 * x])
        scattered, gathered = torch.empty(numel), torch.empty(ranks * numel)
        comm.reduce_scatter_fn(scattered, x.repeat(ranks))
        comm.allgather_fn(gathered, x)
        comm.all_to_all_single(swapped := torch.empty(ranks * numel), gathered * (rank + 1))
        comm.broadcast(sent := x.clone(), 0)
        comm.all_reduce(most := x.clone(), op=comm.ReduceOp.MAX)
        found |= {f"coalesced, {numel}": torch.cat(ys), f"scattered, {numel}": scattered}
        exact = {"gathered": gathered, "swapped": swapped, "sent": sent, "most": most}
        found |= {f"{name}, exact, {numel}": tensor for name, tensor in exact.items()}
    comm.barrier()
    return found


def test_collectives_of_deepspeed():
    dense, found = (run_as_torchrun(_collectives, 2, backend)[0] for backend in BACKENDS)
    for name, tensor in dense.items():
        assert torch.allclose(found[name].float(), tensor.float(), rtol=0.02), name
        assert torch.equal(found[name], tensor) == ("exact" in name or name.endswith(" 3")), name
