"""Runs a test function on several gloo ranks, one process per rank."""

import contextlib
import functools
import gc
import importlib
import inspect
import io
import re
import tempfile
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from dct_parallel import DCTState, dct_hook
from support.forked import run_forked


def run_ranks(function, world_size, *args, timeout=120, backend="gloo"):
    """[function(rank, *args) on rank 0, 1, ...], with warnings as errors.

    `run_forked` documents the errors and the timeout.
    """
    with tempfile.TemporaryDirectory() as folder:
        calls = [(rank, world_size, backend, folder, function, args) for rank in range(world_size)]
        return run_forked(_rank, calls, timeout)


def on_ranks(world_size, **options):
    """Decorates a test(rank, ...) that runs on each of `world_size` ranks.

    A string `world_size` is the name of the test argument that has the number of ranks.
    """

    def decorated(function):
        _, *arguments = inspect.signature(function).parameters.values()
        names = [parameter.name for parameter in arguments]
        body = functools.partial(_body, function.__module__, function.__name__)

        @functools.wraps(function)
        def test(**given):
            count = given[world_size] if isinstance(world_size, str) else world_size
            run_ranks(body, count, *(given[name] for name in names), **options)

        if isinstance(world_size, str) and world_size not in names:
            arguments.append(inspect.Parameter(world_size, inspect.Parameter.POSITIONAL_OR_KEYWORD))
        test.__signature__ = inspect.Signature(arguments)
        return test

    return decorated


def _body(module, name, *arguments):
    """Runs a test on one rank. Pickle cannot send the undecorated test, so this looks it up."""
    return getattr(importlib.import_module(module), name).__wrapped__(*arguments)


@contextlib.contextmanager
def warned(file=None):
    """Yield a list, which finally has the texts of DCT's warnings. They must point to `file`."""
    texts = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    ours = [warning for warning in caught if str(warning.message).startswith("DCT: ")]
    assert file is None or all(warning.filename == file for warning in ours)
    texts += [str(warning.message) for warning in ours]


def _rank(rank, world_size, backend, folder, function, args):
    torch.manual_seed(rank)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = function(rank, *args)
    # All ranks wait in the store, because the last message of a barrier could be lost.
    store.set(f"done{rank}", "")
    store.wait([f"done{other}" for other in range(world_size)])
    gc.collect()  # frees models before their group is destroyed
    dist.destroy_process_group()
    return result


def set_timeout(seconds, group=None):
    """Set a group's timeout (default group: all ranks). torch >= 2.14 has a public function."""
    public = getattr(dist, "set_timeout", None)
    (public or dist.distributed_c10d._set_pg_timeout)(timedelta(seconds=seconds), group)


def shorten_timeouts(seconds):
    """Set the timeout of all groups of this process."""
    for group in dist.distributed_c10d._world.pg_map:
        set_timeout(seconds, group)


def corrupting(collective, change):
    """Return the collective with `change(output)` after it, or when its work is awaited."""

    def in_flight(output, *args, **options):
        work = collective(output, *args, **options)
        if work is None:
            change(output)
            return None
        return _Late(work, functools.partial(change, output))

    return in_flight


class _Late:
    def __init__(self, work, change):
        self._work, self._change = work, change

    def wait(self):
        self._work.wait()
        self._change()


def refused(text, call, error=(ValueError, TypeError)):
    """Check that the call raises an error that contains `text`, a regular expression."""
    try:
        call()
    except error as raised:
        assert re.search(text, str(raised)), raised
    else:
        raise AssertionError(f"no error: {text}")


class Dictated(nn.Module):
    """A model whose gradients are its inputs."""

    def __init__(self, sizes):
        super().__init__()
        self.p = nn.ParameterList(torch.zeros(size) for size in sizes)

    def forward(self, *grads):
        return sum((p * g).sum() for p, g in zip(self.p, grads, strict=True))


def ddp(module, **kwargs):
    """DDP with buckets of a few thousand elements."""
    return DistributedDataParallel(module, bucket_cap_mb=0.02, **kwargs)


def hooked(model, **options):
    """(the model with `dct_hook`, the DCTState with these options)."""
    state = DCTState(model, **options)
    model.register_comm_hook(state, dct_hook)
    return model, state


def gathered(tensor):
    """Every rank's `tensor`, in rank order."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return parts


def assert_same(tensor):
    """Compare a tensor across ranks. If it differs, all ranks fail and report the position."""
    first, *others = gathered(tensor)
    differences = []
    for rank, other in enumerate(others, start=1):
        if not torch.equal(first, other):
            at = (first != other).nonzero()
            where = tuple(at[0].tolist())
            differences.append(
                f"rank {rank} in {len(at)} of {first.numel()} elements, the first at {where}: "
                f"{other[where].item()} where rank 0 has {first[where].item()}"
            )
    assert not differences, "; ".join(differences)


def mlp(width=64, depth=4):
    """A model with several buckets, large weights to compress, and small dense parameters."""
    torch.manual_seed(1234)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def batch(step, rank, width=64, rows=16):
    """A regression batch that differs between steps and ranks."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(rows, width, generator=generator)
    return x, x.sum(1, keepdim=True).sin()


def integers(sizes, step, rank, limit=60):
    """Integer gradients, with exact sums. They differ between steps and ranks."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randint(-limit, limit + 1, (n,), generator=generator).float() for n in sizes]


def train_step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def train(model, optimizer, rank, steps):
    for step in steps:
        train_step(model, optimizer, *batch(step, rank))


def through_a_file(saved, weights_only=True):
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def shard_mesh(replicas=2, shards=2):
    warnings.filterwarnings("ignore", category=FutureWarning)  # from DeviceMesh, FSDP and DCP
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def entry(state_dict):
    """The part of the only rank or replica in a `state_dict()`."""
    (only,) = (state_dict.get("ranks") or state_dict["replicas"]).values()
    return only


def owed(state_dict):
    """{parameter: pending changes of this rank to the sum of gradients}, from both residuals."""
    state = entry(state_dict)
    ranks = state["world_size"]
    return {
        name: parts["residual"] + ranks * sum(parts["owner_residual"])
        for name, parts in state["parameters"].items()
    }


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def assert_same_states(ours, theirs, path=()):
    """Check that two state dicts are bitwise equal."""
    assert type(ours) is type(theirs), path
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), path
        for key in ours:
            assert_same_states(ours[key], theirs[key], (*path, key))
    elif isinstance(ours, tuple):
        assert len(ours) == len(theirs), path
        for one, other in zip(ours, theirs, strict=True):
            assert_same_states(one, other, path)
    elif isinstance(ours, torch.Tensor):
        ours, theirs = (getattr(t, "_local_tensor", t) for t in (ours, theirs))
        assert torch.equal(ours, theirs), path
    else:
        assert ours == theirs, path
