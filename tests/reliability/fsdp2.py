"""Random programs for dct_fully_shard_hook, on meshes of replicas and shards."""

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate

from dct_parallel import dct_fully_shard_hook

from .common import TRANSPORTS, Odd, draw_format, draw_shapes, flat, mesh_of, refused, values
from .gradients import GradientRunner, draw_step, folder

SHAPES = [(1,), (7,), (130,), (40, 33), (61, 31), (1, 900), (8, 4, 3, 3)]  # FSDP2: no scalars
MESHES = {2: [(2, 1), (1, 2)], 3: [(3, 1), (1, 3)], 4: [(2, 2), (4, 1), (1, 4)]}


def draw(draw):
    """Return (the number of ranks, settings, calls) of a random program."""
    ranks = draw.choice([2, 2, 2, 3, 4])
    units = [draw_shapes(draw, SHAPES) for _ in range(draw.choice([1, 1, 2]))]
    settings = {
        "mesh": draw.choice(MESHES[ranks][:1] * 3 + MESHES[ranks]),
        "units": units,
        "frozen": draw.random() < 0.15,
        "options": draw_format(draw)
        | {"transport": draw.choice(TRANSPORTS), "start_step": draw.choice([0, 0, 1, 2])},
        "scale": draw.choice([None, 1.0, 2.0**10]),
    }
    if draw.random() < 0.1:
        settings["options"]["refresh_every"] = 3
    return ranks, settings, [_call(draw, ranks) for _ in range(draw.randint(4, 12))]


def _call(draw, ranks):
    roll = draw.random()
    if roll < 0.65:
        return ("step", draw_step(draw, ranks))
    if roll < 0.73:
        steps = [draw_step(draw, ranks) for _ in range(draw.randint(1, 3))]
        return ("replay", draw.choice(["same", "new", "dcp"]), steps)
    if roll < 0.79:
        return ("resize", draw.choice(MESHES[ranks]), draw.choice(TRANSPORTS))
    if roll < 0.82:
        return ("move", draw.choice(TRANSPORTS), "new")
    if roll < 0.91:
        return ("unfreeze",)
    return ("check",)


class Units(nn.Module):
    """`Odd` models: one in the root, and others that are wrapped separately."""

    def __init__(self, units, frozen):
        super().__init__()
        self.root = Odd(units[0], [0] if frozen else [])
        self.inner = nn.ModuleList(Odd(shapes) for shapes in units[1:])

    def forward(self, *grads):
        out, at = 0, 0
        for module in (self.root, *self.inner):
            count = len(module.p)
            out = out + module(*grads[at : at + count])
            at += count
        return out


class Runner(GradientRunner):
    """Runs a program on one rank. All ranks are in the mesh."""

    ON_IDLE_RANKS = ()
    TAKES_BACK_ALL_PASSES = False

    def __init__(self, rank, mesh, units, frozen, options, scale):
        warnings.filterwarnings("ignore", category=FutureWarning)  # raised by FSDP and DCP
        self.rank, self._units, self._options = rank, units, options
        self._frozen = frozen and len(units[0]) > 1
        self._scaler = torch.amp.GradScaler(
            "cpu", init_scale=scale or 1.0, growth_interval=3, enabled=scale is not None
        )
        self._group = dist.group.WORLD
        self._make(mesh)
        self._reset_account()

    def _make(self, mesh, weights=None):
        """Create a model, a state and an optimizer. Keep the scaler and the account."""
        self._mesh = mesh_of(*mesh)
        self._model = Units(self._units, self._frozen)
        if weights is not None:
            parts = weights.split([p.numel() for p in self._model.parameters()])
            for p, part in zip(self._model.parameters(), parts, strict=True):
                p.data.copy_(part.view(p.shape))
        for module in self._model.inner:
            fully_shard(module, mesh=self._mesh["shard"])
        fully_shard(self._model, mesh=self._mesh["shard"])
        self._all = list(self._model.parameters())
        self._parameters = [p for p in self._all if p.requires_grad]
        outside = DTensor.from_local(torch.zeros(3), self._mesh["shard"], [Replicate()])
        self._outside = nn.Parameter(outside)  # an optimizer cannot mix DTensors with other tensors
        self._optimizer = torch.optim.SGD([*self._parameters, self._outside], lr=1.0)
        scaled = {"grad_scaler": self._scaler, "optimizer": self._optimizer}
        self._state = dct_fully_shard_hook(self._model, mesh=self._mesh, **scaled, **self._options)
        self._layout = self._compute_positions()

    def _compute_positions(self):
        """Return (message, position) of each entry. FSDP splits and pads the first dimension."""
        shards, messages, places = self._mesh["shard"].size(), [], []
        for number, module in enumerate((self._model.root, *self._model.inner)):
            start = 0
            for p in [p for p in module.p if p.requires_grad]:
                rows = -(-p.shape[0] // shards)
                row = torch.arange(p.shape[0]).repeat_interleave(p[0].numel())
                within = torch.arange(p.numel()) % max(p[0].numel(), 1)
                messages.append(number * shards + row // rows)
                places.append(start + row % rows * p[0].numel() + within)
                start += rows * p[0].numel()
        return torch.cat(messages), torch.cat(places)

    # Calls of a program

    def resize(self, mesh, transport):
        self.check()
        with folder(self._group) as place:
            saved = self._save(place)
            self._state.close()
            self._options = self._options | {"transport": transport}
            self._make(mesh, saved["weights"])
            self._state.load_merged(place)

    def unfreeze(self):
        """Unfreeze parameters and create a new state. Loading the old state must raise."""
        if not self._frozen:
            return
        self.check()
        saved, weights = self._state.state_dict(), self._flat(self._all)
        for p in self._all:
            p.requires_grad_(True)
        with refused(ValueError):
            self._model(*values(self._all, 0, self.rank)).backward()
        self._state.close()
        self._frozen = False
        self._make(self._mesh.shape, weights)
        with refused(ValueError):
            self._state.load_state_dict(saved)
        self._reset_account()

    # Helpers

    def _backward(self, gradients, exchanged):
        self._model.set_requires_gradient_sync(exchanged)
        self._scaler.scale(self._model(*gradients)).backward()

    def _flat(self, parameters):
        return flat(p.full_tensor() for p in parameters)

    def _set_weights(self, weights):
        parts = weights.split([p.numel() for p in self._all])
        with torch.no_grad():
            for p, part in zip(self._all, parts, strict=True):
                own, rows = p.to_local(), -(-p.shape[0] // self._mesh["shard"].size())
                first = rows * self._mesh.get_local_rank("shard")
                own.copy_(part.view(p.shape)[first : first + len(own)])

    def _replace(self, weights):
        self._make(self._mesh.shape, weights)

    def _gradient(self):
        return flat(p.grad.full_tensor() for p in self._parameters)

    def _pending(self):
        """Return all pending gradients of this replica, in units of the sum over all ranks."""
        ((_, entry),) = self._state.state_dict()["replicas"].items()
        names = {p: name for name, p in self._model.named_parameters()}
        replicas, parts = self._mesh["replicate"].size(), []
        for p in self._parameters:
            saved = entry["parameters"][names[p]]
            pending = saved["residual"].full_tensor()
            if "owner_residual" in saved:  # in units of the mean
                pending = pending + replicas * saved["owner_residual"].full_tensor()
            parts.append(pending)
        return flat(parts)

    def _positions(self):
        return self._layout

    def _sends_with(self, rank):
        shards = self._mesh["shard"].size()  # a message holds means over a shard group
        return rank // shards == self.rank // shards
