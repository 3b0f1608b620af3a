"""Random programs for ReplicaSync on ShardedEmbeddingBags."""

import copy
import random
from functools import partial

import torch
import torch.distributed as dist

from dct_embeddings import (
    MomentumScaledRowWiseAdagrad,
    ReplicaSync,
    RowWiseAdagrad,
    ShardedEmbeddingBags,
    plan_shards,
)

from .account import Account
from .common import (
    BLOCK,
    SCALES,
    TRANSPORTS,
    broadcast_from_rank_0,
    digest,
    draw_format,
    gather_objects,
    mesh_of,
    refused,
    require_equal,
    with_same_scale,
)

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.125),
    "rowwise": partial(RowWiseAdagrad, lr=0.125),
    "delayed": partial(MomentumScaledRowWiseAdagrad, lr=0.125, scale=2, delayed=True),
}
_WRONG = ["second", "copy", "every", "owned", "ids", "momentum"]
BFLOAT16 = 2.0**-7  # relative error of rounding a change and the sum of changes


def draw(draw):
    """Return (the largest number of ranks, settings, calls) of a random program."""
    shards = draw.choice([1, 1, 1, 2])
    replicas = draw.choice([1, 2, 2, 2, 3] if shards == 1 else [1, 2])
    most = max(replicas, draw.choice([2, 2, 3]) if shards == 1 else 2)
    options = {"every": draw.choice([1, 2, 3])}
    if draw.random() < 0.25:
        options |= {"format": draw.choice(["float32", "bfloat16"])}
    else:
        options |= draw_format(draw) | {"transport": draw.choice(TRANSPORTS)}
    settings = {
        "mesh": (replicas, shards),
        "rows": [draw.choice([3, 40, 150]) for _ in range(draw.randint(shards, 3))],
        "width": draw.choice([1, 4, 8, 19]),
        "optimizer": draw.choice(list(OPTIMIZERS)),
        "options": options,
        "dedup": draw.random() < 0.3,
        "sparse": draw.random() < 0.6,
    }
    if draw.random() < 0.1:  # more than a block
        settings["rows"][0], settings["width"] = 2000, 19
    calls = [_call(draw, most) for _ in range(draw.randint(5, 18))]
    return most * shards, settings, calls


def _call(draw, most):
    roll = draw.random()
    if roll < 0.70:
        return ("step", draw_step(draw, most))
    if roll < 0.78:
        steps = [draw_step(draw, most) for _ in range(draw.randint(1, 5))]
        return ("replay", draw.choice(["same", "new"]), steps)
    if roll < 0.82:
        return ("sync",)
    if roll < 0.87:
        return ("check",)
    if roll < 0.92:
        return ("resize", draw.randint(1, most))
    return ("wrong", draw.choice(_WRONG))


def draw_step(draw, most):
    step = {"seed": draw.randrange(10**6), "batch": draw.choice([0, 1, 4, 30])}
    if draw.random() < 0.2:
        step["passes"] = 2
    if draw.random() < 0.1:
        step["skipped"] = True
    if draw.random() < 0.1:
        step["bad"] = (draw.randrange(most), draw.choice(["nan", "inf", "-inf"]))
    return step


class Runner:
    """Runs a program on one rank. Ranks outside the mesh are idle until a `resize`."""

    ON_IDLE_RANKS = ("resize",)  # also called on idle ranks

    def __init__(self, rank, mesh, rows, width, optimizer, options, dedup, sparse):
        self.rank, self._rows, self._width = rank, rows, width
        self._optimizer_name, self._options = optimizer, options
        self._bag_options = {"dedup": dedup, "sparse": sparse}
        self._make(*mesh)

    def _make(self, replicas, shards):
        self.idle = self.rank >= replicas * shards
        self._mesh = mesh_of(replicas, shards)
        if self.idle:
            return
        self._group = self._mesh.get_group("replicate")
        generator = torch.Generator().manual_seed(0)
        tables = [
            torch.randint(-8, 9, (n, self._width), generator=generator) / 8 for n in self._rows
        ]
        plan = plan_shards(self._rows, shards, [0] if self._rows[0] >= shards > 1 else [])
        self._bags = ShardedEmbeddingBags(tables, plan, self._mesh, **self._bag_options)
        self._optimizer = OPTIMIZERS[self._optimizer_name]([self._bags.weight])
        self._sync = ReplicaSync(self._bags, optimizer=self._optimizer, **self._options)
        self._reset_account()

    def _reset_account(self):
        """Create new accounts. Nothing may be pending."""
        weight = self._bags.weight.detach()
        self.account = Account([weight.numel()], weight.flatten())
        self._state_account = Account([len(weight)], self._state())
        self._since = torch.zeros(weight.numel(), dtype=torch.float64)  # since the last sync
        self._touched, self._union = (torch.zeros(len(weight), dtype=torch.bool) for _ in "ab")
        self._steps = 0

    # Calls of a program

    def step(self, step):
        self._optimizer.zero_grad()
        draw = torch.Generator().manual_seed(31 * step["seed"] + self.rank)
        scale = random.Random(step["seed"]).choice(SCALES)
        for _ in range(step.get("passes", 1)):
            lengths = torch.randint(0, 4, (len(self._rows), step["batch"]), generator=draw)
            ids = [
                (torch.rand(int(n.sum()), generator=draw) ** 2 * rows).long()
                for n, rows in zip(lengths, self._rows, strict=True)
            ]
            out = self._bags(torch.cat(ids), lengths)
            slopes = torch.randn(out.shape, generator=draw) * scale
            if step.get("bad", (-1,))[0] == self.rank and slopes.numel():
                slopes.view(-1)[-1] = float(step["bad"][1])
            (out * slopes).sum().backward()
        if not step.get("skipped"):
            weight, state = self._bags.weight.detach().clone(), self._state()
            self._record_touched_rows()
            self._optimizer.step()
            moved = (self._bags.weight.detach().double() - weight.double()).flatten()
            grown = self._state().double() - state.double()
            self._since += moved.nan_to_num(0, 0, 0).abs()
            self.account.put(torch.where(moved.isfinite(), moved, 0.0))
            self._state_account.put(torch.where(grown.isfinite(), grown, 0.0))
        self._steps += 1
        if self._steps == self._options["every"]:
            self._prepare_sync()
        self._sync.step()
        if self._steps == 0:
            self._require_equal_replicas()

    def sync(self):
        self._prepare_sync()
        self._sync.sync()
        self._require_equal_replicas()

    def check(self):
        """After a flush, all replicas must be equal and contain all changes."""
        self._prepare_sync()
        self._sync.flush()
        self._require_equal_replicas()
        nothing = torch.zeros(len(self.account.contributions))
        self.account.check(self._bags.weight.detach().flatten(), nothing, self._group)
        self._state_account.check(self._state(), nothing[: len(self._touched)], self._group)
        self._union.zero_()

    def replay(self, how, steps):
        """Repeat steps from a checkpoint; results must be bitwise equal."""
        self.check()
        saved = copy.deepcopy([self._bags.state_dict(), self._optimizer.state_dict()])
        ends = []
        for again in (False, True):
            if again:
                if how == "new":
                    self._make(*self._mesh.shape)
                self._load(saved)
            for step in steps:
                self.step(step)
            self.check()
            ends.append(digest([self._bags.weight, self._state()]))
        assert ends[0] == ends[1]

    def resize(self, replicas):
        saved = None
        if not self.idle:
            self.check()
            saved = self._bags.state_dict(), self._optimizer.state_dict()
        saved_by_rank = gather_objects(saved)
        self._make(replicas, broadcast_from_rank_0(self._mesh.shape[1]))
        if not self.idle:
            self._load(copy.deepcopy(saved_by_rank[self._mesh.get_local_rank("shard")]))

    def wrong(self, kind):
        """An invalid call must raise and change nothing."""
        bags, optimizer = self._bags, self._optimizer
        before = digest([bags.weight, self._state()])
        with refused(ValueError, TypeError):
            if kind == "second":
                ReplicaSync(bags, optimizer=optimizer)
            elif kind == "copy":
                copy.deepcopy(self._sync)
            elif kind == "owned":
                other = torch.tensor([[0, 0, 77]])
                bags.load_state_dict(bags.state_dict() | {"owned": other})
            elif kind == "ids":
                lengths = torch.ones(len(self._rows), 1, dtype=torch.int64)
                bags(torch.full((len(self._rows),), 10**6), lengths)
            elif kind == "momentum" and self._optimizer_name == "sgd":
                optimizer.param_groups[0]["momentum"] = 0.9
                optimizer.step()
            else:
                ReplicaSync(bags, optimizer=optimizer, every=0)
        for group in optimizer.param_groups:
            group.update({"momentum": 0} if "momentum" in group else {})
        assert digest([bags.weight, self._state()]) == before

    def end(self):
        self.check()

    # Helpers

    def _state(self):
        """Return the optimizer's sums of squares [rows], including pending ones, or zeros."""
        state = self._optimizer.state.get(self._bags.weight, {})
        if "sum" not in state:
            return torch.zeros(len(self._bags.weight))
        return state["sum"] + state.get("pending", 0)

    def _record_touched_rows(self):
        grad = self._bags.weight.grad
        if grad is not None:
            dense = grad.to_dense() if grad.is_sparse else grad
            rows = torch.zeros(len(dense), dtype=torch.bool)
            if grad.is_sparse:
                rows[grad._indices()[0]] = True
            self._touched |= rows | dense.any(1)

    def _prepare_sync(self):
        """Before a sync, record which entries the sync may lose or round."""
        bad = ~self._bags.weight.detach().isfinite()
        bad_state = ~self._state().isfinite()
        flags = torch.cat([self._touched.view(-1, 1), bad, bad_state.view(-1, 1)], 1).int()
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
        touched, bad, bad_state = flags[:, 0] > 0, flags[:, 1:-1] > 0, flags[:, -1] > 0
        self._state_account.may_lose |= bad_state
        self._union |= touched
        at = torch.arange(self._union.sum() * self._width)
        if bad.any():
            within = with_same_scale(bad[self._union].flatten(), 0, at, self._options["format"])
            bad[self._union] |= (within | (at % BLOCK == 0)).view(-1, self._width)
        self.account.may_lose |= bad.flatten()
        if self._options["format"] == "bfloat16" and "density" not in self._options:
            self.account.tolerance += BFLOAT16 * self._since
            self._union.zero_()
        self._touched.zero_()
        self._since.zero_()
        self._steps = 0

    def _require_equal_replicas(self):
        require_equal([self._bags.weight, self._state()], self._group, "replicas")

    def _load(self, saved):
        weights, state = saved
        self._bags.load_state_dict(weights)
        self._optimizer.load_state_dict(state)
        self._reset_account()
