"""Random programs for DCTState and dct_hook with DDP."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dct_parallel import DCTState, dct_hook, merge_states
from support.ranks import owed, through_a_file

from .common import (
    TRANSPORTS,
    Odd,
    broadcast_from_rank_0,
    draw_format,
    draw_shapes,
    flat,
    gather_objects,
    group_of,
    refused,
)
from .gradients import GradientRunner, draw_step, folder


def draw(draw):
    """Return (the largest number of ranks, settings, calls) of a random program."""
    ranks = draw.choice([1, 2, 2, 2, 3, 3])
    most = max(ranks, draw.choice([2, 2, 3]))
    shapes = draw_shapes(draw)
    settings = {
        "ranks": ranks,
        "shapes": shapes,
        "frozen": [0] if draw.random() < 0.15 else [],
        "options": draw_format(draw)
        | {"transport": draw.choice(TRANSPORTS), "start_step": draw.choice([0, 0, 1, 2])},
        "bucket_mb": draw.choice([0.0005, 0.004, 0.02, 25]),
        "view": draw.random() < 0.3,
        "scale": draw.choice([None, 1.0, 2.0**10]),
    }
    if draw.random() < 0.1:
        settings["options"]["refresh_every"] = 3
    return most, settings, [_call(draw, most) for _ in range(draw.randint(4, 14))]


def _call(draw, most):
    roll = draw.random()
    if roll < 0.62:
        return ("step", draw_step(draw, most))
    if roll < 0.72:
        steps = [draw_step(draw, most) for _ in range(draw.randint(1, 3))]
        return ("replay", draw.choice(["same", "new", "new", "dcp"]), steps)
    if roll < 0.80:
        return ("resize", draw.randint(1, most), draw.choice(TRANSPORTS), draw.random() < 0.2)
    if roll < 0.83:
        return ("move", draw.choice(TRANSPORTS), draw.choice(["new", "dcp"]))
    if roll < 0.91:
        return ("unfreeze",)
    return ("check",)


class Runner(GradientRunner):
    """Runs a program on one rank. Ranks outside the group are idle until a `resize`."""

    ON_IDLE_RANKS = ("resize", "unfreeze")  # also called on idle ranks

    def __init__(self, rank, shapes, frozen, options, bucket_mb, view, scale, ranks):
        self.rank, self._frozen = rank, [i for i in frozen if i < len(shapes) - 1]
        self._shapes, self._options = shapes, options
        self._ddp_options = {"bucket_cap_mb": bucket_mb, "gradient_as_bucket_view": view}
        self._scaler = torch.amp.GradScaler(
            "cpu", init_scale=scale or 1.0, growth_interval=3, enabled=scale is not None
        )
        self._join(ranks)
        if not self.idle:
            self._make()
            self._reset_account()

    def _join(self, ranks):
        self.idle = self.rank >= ranks
        self._group = group_of(ranks)

    def _make(self, weights=None):
        """Create a DDP model, a state and an optimizer. Keep the scaler and the account."""
        self._model = Odd(self._shapes, self._frozen)
        self._all = list(self._model.p)
        self._parameters = [p for p in self._all if p.requires_grad]
        if weights is not None:
            self._set_weights(weights)
        group = self._group
        self._ddp = DistributedDataParallel(self._model, process_group=group, **self._ddp_options)
        self._outside = nn.Parameter(torch.zeros(3))
        self._optimizer = torch.optim.SGD([*self._parameters, self._outside], lr=1.0)
        scaled = {"grad_scaler": self._scaler, "optimizer": self._optimizer}
        self._state = DCTState(self._ddp, **scaled, **self._options)
        self._ddp.register_comm_hook(self._state, dct_hook)
        self._exchanged = 0  # number of exchanges; DDP rebuilds its buckets after the first one

    def _set_weights(self, weights):
        parts = weights.split([p.numel() for p in self._all])
        for p, part in zip(self._all, parts, strict=True):
            p.data.copy_(part.view(p.shape))

    # Calls of a program

    def replay(self, how, steps):
        if self._exchanged > 1:  # earlier checkpoints do not contain the final buckets
            super().replay(how, steps)

    def resize(self, ranks, transport, by_dcp):
        with folder(dist.group.WORLD) as place:
            saved = None
            if not self.idle:
                self.check()
                self.account.regroup(self._group)
                saved = self._save(place if by_dcp else None)
                self._state.close()
            states = [one["state"] for one in gather_objects(saved) if one is not None]
            merged = merge_states(place if by_dcp else states)
        saved = broadcast_from_rank_0(saved)
        self._options = self._options | {"transport": transport}
        self._join(ranks)
        self.account = saved["account"]
        if not self.idle:
            self._make(saved["weights"])
            self._scaler.load_state_dict(saved["scaler"])
            self._state.load_state_dict(through_a_file(merged))

    def unfreeze(self):
        """Unfreeze parameters and create a new state. Loading the old state must raise."""
        if not self._frozen:
            return
        self._frozen = []
        if self.idle:
            return
        self.check()
        saved, weights = self._state.state_dict(), flat(self._all)
        self._state.close()
        self._make(weights)
        with refused(ValueError):
            self._state.load_state_dict(saved)
        self._reset_account()

    # Helpers

    def _pending(self):
        return flat(part for _, part in sorted(owed(self._state.state_dict()).items()))

    def _backward(self, gradients, exchanged):
        with contextlib.nullcontext() if exchanged else self._ddp.no_sync():
            self._scaler.scale(self._ddp(*gradients)).backward()
        self._exchanged += exchanged

    def _gradient(self):
        return flat(p.grad for p in self._parameters)

    def _flat(self, parameters):
        return flat(parameters)

    def _replace(self, weights):
        settled = self._exchanged > 1  # the checkpoint contains the final buckets
        self._make(weights)
        self._exchanged = 2 * settled

    def _positions(self):
        placed, own = {}, {f"p.{i}": p for i, p in enumerate(self._all)}
        for number, names in enumerate(self._state._buckets.names()):
            sizes = [own[name].numel() for name in names]
            for name, part in zip(names, torch.arange(sum(sizes)).split(sizes), strict=True):
                p = own[name]  # entries are in memory order, without gaps
                placed[p] = number, part.as_strided(p.shape, p.stride()).reshape(-1)
        messages = [torch.full_like(placed[p][1], placed[p][0]) for p in self._parameters]
        return torch.cat(messages), torch.cat([placed[p][1] for p in self._parameters])

    def _sends_with(self, rank):
        return rank == self.rank
