"""Random programs for DCTAverager."""

import copy

import torch
import torch.distributed as dist

from dct_parallel import DCTAverager
from support.ranks import owed, through_a_file

from .account import Account
from .common import (
    TRANSPORTS,
    Odd,
    broadcast_from_rank_0,
    digest,
    draw_format,
    draw_shapes,
    flat,
    group_of,
    poison,
    refused,
    require_equal,
    values,
    with_same_scale,
)


def draw(draw):
    """Draw a random program. Return (maximum number of ranks, settings, calls)."""
    ranks = draw.choice([1, 2, 2, 2, 3, 3])
    most = max(ranks, draw.choice([2, 2, 3]))
    period = draw.choice([1, 2, 2, 3, 4])
    options = draw_format(draw) | {"period": period, "transport": draw.choice(TRANSPORTS)}
    if draw.random() < 0.1:
        options["refresh_every"] = 3
    shapes = draw_shapes(draw)
    settings = {
        "ranks": ranks,
        "shapes": shapes,
        "dtypes": [draw.choice(["float32", "float32", "bfloat16", "float16"]) for _ in shapes],
        "frozen": [0] if draw.random() < 0.2 else [],
        "options": options,
    }
    calls = [_call(draw, most) for _ in range(draw.randint(5, 20))]
    if draw.random() < 0.3:
        options["step_ahead"] = True
    return most, settings, calls


def _call(draw, most):
    roll = draw.random()
    if roll < 0.70:
        return ("step", draw_step(draw, most))
    if roll < 0.78:
        steps = [draw_step(draw, most) for _ in range(draw.randint(1, 4))]
        return ("replay", draw.choice(["same", "new"]), steps)
    if roll < 0.82:
        return ("flush",)
    if roll < 0.86:
        return ("resize", draw.randint(1, most))
    if roll < 0.94:
        return ("unfreeze",)
    return ("check",)


def draw_step(draw, most):
    step = {"seed": draw.randrange(10**6)}
    if draw.random() < 0.1:  # one rank skips the step, as a GradScaler may
        step["skipped_by"] = draw.randrange(most)
    if draw.random() < 0.12:
        value = draw.choice(["nan", "inf", "-inf"])
        count = draw.choice([1, 1, 3, 500])
        step["bad"] = (draw.randrange(most), value, draw.randrange(1000), count)
    return step


class Runner:
    """Runs a program on one rank. Ranks outside the group are idle until a `resize`."""

    ON_IDLE_RANKS = ("resize", "unfreeze")  # also called on idle ranks

    def __init__(self, rank, ranks, shapes, dtypes, frozen, options):
        self.rank, self._shapes, self._options = rank, shapes, options
        self._dtypes = [getattr(torch, dtype) for dtype in dtypes]
        self._frozen = [i for i in frozen if i < len(shapes) - 1]
        self._join(ranks)
        self._make([torch.zeros(()).expand(p.shape) for p in Odd(shapes).p])

    def _join(self, ranks):
        self.idle, self._ranks = self.rank >= ranks, ranks
        self._group = group_of(ranks)

    def _make(self, weights):
        model = Odd(self._shapes, self._frozen)
        for p, dtype, contributions in zip(model.p, self._dtypes, weights, strict=True):
            p.data = p.data.to(dtype)
            p.data.copy_(contributions)
        self._model = model
        self._parameters = [p for p in model.p if p.requires_grad]
        self.account = Account(
            [p.numel() for p in self._parameters], flat(p.float() for p in self._parameters)
        )
        if not self.idle:
            self._optimizer = torch.optim.SGD(self._parameters, lr=1.0)
            self._averager = self._new()
            # Changes since the last averaging, and entries that are non-finite on this rank.
            self._since = torch.zeros_like(self.account.contributions)
            self._bad = torch.zeros(len(self._since), dtype=torch.bool)

    def _new(self):
        return DCTAverager(self._model, process_group=self._group, **self._options)

    # Calls of a program

    def step(self, step):
        before = flat(p.double() for p in self._parameters)
        if step.get("skipped_by") != self.rank:
            self._optimizer.zero_grad()
            moves = values(self._model.p, step["seed"], self.rank)
            for p, move in zip(self._model.p, moves, strict=True):
                if p.requires_grad:
                    p.grad = move.to(p.dtype)
            if step.get("bad"):
                poison([p.grad for p in self._parameters], self.rank, step["bad"])
            self._optimizer.step()
        moved = flat(p.double() for p in self._parameters) - before
        self._bad |= ~moved.isfinite()
        moved = moved.nan_to_num(0, 0, 0)
        self.account.put(moved)
        self._since += moved
        self._average()

    def flush(self):
        if self._on_any_rank(self._bad):
            with refused(RuntimeError):
                self._averager.flush()
            return
        self._averager.flush()
        self._since.zero_()
        require_equal(flat(self._parameters), self._group, "weights")
        assert not any(s["residual"].any() for s in self._entry()["parameters"].values())

    def replay(self, how, steps):
        """Repeat steps from a checkpoint. Results must be equal unless `refresh_every` is set."""
        names = "account", "_since", "_bad"
        saved = through_a_file(self._averager.state_dict())
        kept = copy.deepcopy([getattr(self, name) for name in names])
        weights = [p.detach().clone() for p in self._model.p]
        ends = []
        for again in (False, True):
            if again:
                self._restore(saved, weights, how)
                for name, value in zip(names, kept, strict=True):
                    setattr(self, name, value)
            for step in steps:
                self.step(step)
            weights_now = flat(p.double() for p in self._parameters)
            ends.append(digest([weights_now, self._averager.state_dict()]))
        assert ends[0] == ends[1] or "refresh_every" in self._options

    def resize(self, ranks):
        self._restart(ranks)

    def unfreeze(self):
        self._frozen = []
        self._restart(self._ranks)

    def check(self):
        stats = self._averager.stats()
        assert stats["step"] == self._averager.step
        assert stats["overflow"] is None or 0 <= stats["overflow"] <= 1
        base = self._base()
        require_equal(base, self._group, "bases")
        self.account.check(base, self._pending() + self._local_change(), self._group)

    def end(self):
        self.check()
        assert "averaging" in self._averager.plan()

    # Helpers

    def _average(self):
        averager, step = self._averager, self._averager.step + 1
        averages = step % averager.period == 0
        if averages and self._on_any_rank(self._bad):
            with refused(RuntimeError):
                averager.average_parameters()
            # Non-finite entries, and entries that share a scale with them, lose their changes.
            self.account.put(torch.where(self._with_same_scale(self._bad), self._since, 0.0), -1)
            self._bad.zero_()
        else:
            averager.average_parameters()
        if averages:
            self._since.zero_()
            starts = flat(self._start_weights())
            assert torch.equal(flat(p.double() for p in self._parameters), starts)
            if not self._options.get("step_ahead"):
                require_equal(starts, self._group, "weights")
        assert averager.step == step

    def _local_change(self):
        """Return the change of the weights since the last averaging."""
        moved = flat(p.double() for p in self._parameters) - flat(self._start_weights())
        return torch.where(self._bad, self._since, moved)

    def _start_weights(self):
        """Yield the weights after the last averaging, rounded to their dtype."""
        for p, part in zip(self._parameters, self._entry()["parameters"].values(), strict=True):
            base = part["base"].to(p.dtype)
            ahead = (part["base"] + part["residual"]).to(p.dtype)
            use_ahead = ahead.isfinite() & bool(self._options.get("step_ahead"))
            yield torch.where(use_ahead, ahead, base).double()

    def _with_same_scale(self, mask):
        return with_same_scale(mask, 0, torch.arange(len(mask)), self._options["format"])

    def _on_any_rank(self, mask):
        flag = mask.any().int().view(1)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        return bool(flag)

    def _entry(self):
        (entry,) = self._averager.state_dict()["ranks"].values()
        return entry

    def _base(self):
        return flat(s["base"] for s in self._entry()["parameters"].values())

    def _pending(self):
        return flat(owed(self._averager.state_dict()).values())

    def _restore(self, saved, weights, how):
        if how == "new":
            self._model = Odd(self._shapes, self._frozen)
            for p, contributions in zip(self._model.p, weights, strict=True):
                p.data = p.data.to(contributions.dtype)
            self._parameters = [p for p in self._model.p if p.requires_grad]
            self._optimizer = torch.optim.SGD(self._parameters, lr=1.0)
            self._averager = self._new()
        for p, contributions in zip(self._model.p, weights, strict=True):
            p.data.copy_(contributions)
        self._averager.load_state_dict(saved)

    def _restart(self, ranks):
        """Flush the averager, and create a new one with the same weights for `ranks` ranks."""
        weights = None
        if not self.idle:
            while self._on_any_rank(self._bad):
                self.step({"seed": 0, "skipped_by": self.rank})
            self.flush()
            self.check()
            weights = [p.detach() for p in self._model.p]
        weights = broadcast_from_rank_0(weights)
        self._join(ranks)
        self._make(weights)
