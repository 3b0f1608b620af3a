"""One interface to dct_hook, dct_fully_shard_hook and DCTAverager, for tests of all three.

A test passes a flat tensor of gradients, or of weight changes for `LocalSteps`.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dct_parallel import DCTAverager, dct_fully_shard_hook
from support.nodes import all_pending, meshed_state
from support.ranks import Dictated, gathered, owed, shard_mesh, through_a_file, weights


class Hook:
    """Trains with DDP and dct_hook, without a mesh of nodes."""

    local_size = None  # ranks per node, or shards per replica in `Sharded`

    def __init__(self, sizes, bucket_cap_mb=25, fused=False, unused=False, **settings):
        options = {"bucket_cap_mb": bucket_cap_mb, "find_unused_parameters": unused}
        self.model = DistributedDataParallel(Dictated(sizes), **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, fused=fused)
        settings = {"optimizer": self.optimizer, **settings}
        self.state = meshed_state(self.model, self.local_size, **settings)
        self.parameters = list(self.model.module.p)
        self.group = self.state._topology.between
        self.applied = 0  # sum of the results of all steps, float64

    def loss(self, numbers):
        """Return a loss whose gradient is `numbers`."""
        self.model.zero_grad()
        parts = numbers.split([parameter.numel() for parameter in self.parameters])
        pairs = zip(parts, self.parameters, strict=True)
        return self.model(*(part.view(parameter.shape) for part, parameter in pairs))

    def step(self, numbers):
        """Exchange this rank's numbers; return the flat mean gradient."""
        self.loss(numbers).backward()
        mean = self._flat([parameter.grad for parameter in self.parameters])
        self.applied = self.applied + mean.double()
        return mean

    def weights(self):
        return self._flat(self.parameters)

    def pending(self):
        """Return the pending part of the mean gradient, summed over ranks: flat, in float64."""
        return all_pending(self.state.state_dict())

    def parts(self):
        """Return the dict that dcp.save and dcp.load take."""
        return {"dct": self.state}

    def file(self):
        """Return this rank's checkpoint after torch.save and torch.load."""
        return through_a_file({"dct": self.state.state_dict()})

    def load(self, saved):
        self.state.load_state_dict(saved["dct"])

    def _flat(self, tensors):
        return torch.cat([tensor.detach().flatten() for tensor in tensors])


class NodeMesh(Hook):
    """Trains with DDP, dct_hook and a mesh of nodes."""

    def __init__(self, sizes, local_size=2, **settings):
        self.local_size = local_size
        super().__init__(sizes, **settings)


class Sharded(Hook):
    """Trains with FSDP2 and dct_fully_shard_hook on a mesh of (replicas, shards)."""

    local_size = 2

    def __init__(self, sizes, mesh=(2, 2), **settings):
        self.mesh = shard_mesh(*mesh)
        self.model = fully_shard(Dictated(sizes), mesh=self.mesh["shard"])
        self.parameters = list(self.model.p)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        settings = {"optimizer": self.optimizer, **settings}
        self.state = dct_fully_shard_hook(self.model, mesh=self.mesh, **settings)
        self.group = self.mesh["replicate"].get_group()
        self.applied = 0

    def pending(self):
        replicas, shards = self.mesh.shape
        pending = []
        (entry,) = self.state.state_dict()["replicas"].values()
        for saved in entry["parameters"].values():
            residual = saved["residual"].full_tensor().double()
            if "owner_residual" in saved:  # a part of the mean, not of the sum
                residual = residual + replicas * saved["owner_residual"].full_tensor().double()
            pending.append(sum(gathered(residual.flatten())[::shards]) / replicas)
        return torch.cat(pending)

    def _flat(self, tensors):
        return torch.cat([tensor.detach().full_tensor().flatten() for tensor in tensors])


class LocalSteps(Hook):
    """Trains with DCTAverager. Numbers are weight changes, and results are averaged weights."""

    def __init__(self, sizes, start_step=0, dtype=torch.float32, **settings):  # start_step unused
        self.model = nn.ParameterList(torch.zeros(size, dtype=dtype) for size in sizes)
        self.state = DCTAverager(self.model, **{"period": 1} | settings)
        self.group = self.state.process_group
        self.applied = 0

    @torch.no_grad()
    def step(self, numbers):
        parts = numbers.split([parameter.numel() for parameter in self.model])
        for parameter, part in zip(self.model, parts, strict=True):
            parameter += part.view(parameter.shape)
        self.state.average_parameters()
        self.applied = self.weights().double()
        return self.weights()

    def weights(self):
        return weights(self.model)

    def pending(self):
        total = torch.cat([part.double() for part in owed(self.state.state_dict()).values()])
        dist.all_reduce(total)
        return total / dist.get_world_size()

    def parts(self):  # weights differ per rank between averagings, so each rank has a key
        return {"dct": self.state, f"weights of {dist.get_rank()}": self.model.state_dict()}

    def file(self):
        return super().file() | {"weights": through_a_file(self.model.state_dict())}

    def load(self, saved):
        self.model.load_state_dict(saved["weights"])
        super().load(saved)
