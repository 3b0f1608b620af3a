"""What programs at the two hooks share: a step, and what it puts in, takes and loses."""

import contextlib
import copy
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from .account import Account
from .common import (
    BLOCK,
    beside,
    digest,
    flat,
    from_first,
    poison,
    refused,
    require_equal,
    through_a_file,
    values,
)

DENSE = 2.0**-6  # roundings of a mean in bfloat16
_THEN = ["apply"] * 6 + ["take_back"] * 2 + ["drop"]


def draw_step(draw, ranks):
    step = {"seed": draw.randrange(10**6), "then": draw.choice(_THEN)}
    if draw.random() < 0.25:
        step |= {"passes": draw.randint(2, 3), "no_sync": draw.random() < 0.5}
    if draw.random() < 0.2:
        value, count = draw.choice(["nan", "inf", "-inf"]), draw.choice([1, 1, 3, 500])
        step["bad"] = (draw.randrange(ranks), value, draw.randrange(1000), count)
    elif draw.random() < 0.1:
        step["outside"] = True  # what overflows is in no gradient of the model
    if draw.random() < 0.3:
        step["look"] = True
    return step


class GradientDoor:
    """A rank of a run with a hook, which sends gradients.

    Subclasses have `_model`, `_group` (all ranks of the mean), `_state`, `_options`, `_all` (the
    parameters), `_parameters` (those that are trained), `_optimizer` (of these and `_outside`),
    `_scaler` and `account`; and the methods without a body here.
    """

    idle = False
    RETURNS_ALL = True  # by take_back: also what earlier passes of a step have sent

    def _backward(self, gradients, exchanged):
        """A pass; whether its gradients are sent."""

    def _gradient(self):
        """The mean, flat, of the last passes."""

    def _flat(self, parameters):
        """Their weights, in full."""

    def _set(self, weights):
        """All parameters, from `_flat`."""

    def _renew(self, weights):
        """A new model, state and optimizer, as far as a load expects; scaler and account stay."""

    def _owed(self):
        """What is pending here, flat, in units of the ranks' sum."""

    def _placed(self):
        """Of every entry the number of its message, and the place in it."""

    def _hurts(self, rank):
        """Whether what is not finite on `rank` is so in the messages of this one."""

    # What a program calls:

    def step(self, step):
        bad, passes = step.get("bad"), step.get("passes", 1)
        compressed = self._state.step >= self._state.start_step
        together = passes == 1 or step["no_sync"] or not compressed  # one exchange
        scale, bad_pass = self._scaler.get_scale(), step["seed"] % passes
        self._optimizer.zero_grad(set_to_none=step["seed"] % 2 == 0)
        total, earlier, hit = 0, None, self._hit(bad)
        near = hit  # what is not finite, and what it takes with it
        for number in range(passes):
            gradients = values(self._all, step["seed"] + number, self.rank)
            kept = [g for g, p in zip(gradients, self._all, strict=True) if p.requires_grad]
            if bad and number == bad_pass:
                poison(kept, self.rank, bad)
            total = total + flat(kept)
            exchanged = number == passes - 1 or not together
            if number and exchanged and not together:
                earlier = self._gradient() / scale
            self._backward(gradients, exchanged)
            if hit.any() and exchanged and number >= bad_pass:
                near = self._beside(near if together else near | self._first())
        mean = self._gradient() / scale
        require_equal(mean, self._group, "gradients")
        if step.get("look"):
            self._look()
        if compressed:
            lost = near & (bool(bad) and self._hurts(bad[0]))
            self.account.put(torch.where(lost, 0.0, total))
            if not together:
                self.account.may_lose |= near
        else:
            self._require_dense(mean, total, hit)
        told = near | self._first() if hit.any() else near  # of an overflow, in what came
        if not self._applied(step, mean):
            if step["then"] == "drop":
                self._leaves(mean, -1, told) if compressed else None
            elif earlier is not None and not self.RETURNS_ALL:
                self._leaves(earlier, -1, told)
        elif not compressed:
            self._leaves(mean, 1, hit)
        else:
            self.account.may_lose |= told

    def replay(self, how, steps):
        """Once more from a checkpoint, in the same objects or new ones: bit for bit the same."""
        self.check()
        with folder(self._group) as place:
            saved = self._save(place if how == "dcp" else None)
            ends = []
            for again in (False, True):
                if again:
                    self._restore(saved, how, place)
                for step in steps:
                    self.step(step)
                ends.append(digest([self._flat(self._all), self._state.state_dict()]))
        assert ends[0] == ends[1] or self._options.get("policy") == "fixed"

    def move(self, transport, how):
        """To a different transport, through a checkpoint."""
        self.check()
        with folder(self._group) as place:
            saved = self._save(place if how == "dcp" else None)
            self._options = self._options | {"transport": transport}
            self._restore(saved, how, place)

    def check(self):
        weights = self._flat(self._parameters)
        require_equal(weights, self._group, "weights")
        self.account.check(-weights, self._owed(), self._group)

    def end(self):
        self.check()
        self._look()
        self._state.close()
        self._state.close()
        with refused(ValueError, RuntimeError):
            self._backward(values(self._all, 0, self.rank), True)

    # What they stand on:

    def _applied(self, step, mean):
        """Whether the optimizer stepped, as the program or the scaler decides."""
        overflows = bool(step.get("outside")) and self._scaler.is_enabled()
        self._outside.grad = torch.full_like(self._outside, torch.inf if overflows else 0.0)
        if step["then"] == "take_back":
            for _ in range(1 + step["seed"] % 2):  # again: nothing
                self._state.take_back()
        if step["then"] != "apply":
            return False
        before = self._scaler.get_scale()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        skipped = self._scaler.is_enabled() and (overflows or not mean.isfinite().all())
        assert skipped == (self._scaler.get_scale() < before)
        return not skipped

    def _look(self):
        stats = self._state.stats()
        assert stats["step"] == self._state.step
        for name in ("density", "overflow"):
            assert stats[name] is None or 0 <= stats[name] <= 1
        assert "bucket" in self._state.plan()
        for figures in self._state.parameter_stats().values():
            assert 0 <= figures["density"] <= 1 and figures["residual_norm"] >= 0

    def _leaves(self, mean, times, but):
        """What was applied or thrown away without having been put in, or having come back."""
        self.account.put(torch.where(but | ~mean.isfinite(), 0.0, mean), times)
        self.account.may_lose |= but

    def _require_dense(self, mean, total, hit):
        told = torch.stack([total.double(), total.double().abs()])
        dist.all_reduce(told, group=self._group)
        expected, room = told / self._group.size()
        assert ((mean - expected).abs() <= DENSE * room)[~hit].all(), "dense mean"

    def _hit(self, bad):
        """The entries that were not finite on some rank."""
        mask = torch.zeros(sum(p.numel() for p in self._parameters), dtype=torch.bool)
        if bad and bad[0] < self._group.size():
            mask[bad[2] : bad[2] + bad[3]] = True
        return mask

    def _beside(self, mask):
        """These entries, and in few bits those that share a scale."""
        return beside(mask, *self._placed(), self._options["format"])

    def _first(self):
        """The entries that tell of an overflow: the first of payloads."""
        return self._placed()[1] % BLOCK == 0

    def _account_anew(self):
        """Of weights to which nothing is pending."""
        weights = self._flat(self._parameters)
        self.account = Account([p.numel() for p in self._parameters], -weights)
        self.account.lost |= ~weights.isfinite()

    def _save(self, place):
        """What a run goes on from; the state in a folder as well, unless `place` is None."""
        if place is not None:
            dcp.save({"dct": self._state}, checkpoint_id=place, process_group=self._group)
        return {
            "weights": self._flat(self._all),
            "state": through_a_file(self._state.state_dict()),
            "scaler": self._scaler.state_dict(),
            "account": copy.deepcopy(self.account),
        }

    def _restore(self, saved, how, place):
        if how == "same":
            self._set(saved["weights"])
        else:
            self._state.close()
            self._renew(saved["weights"])
        if how == "dcp":
            dcp.load({"dct": self._state}, checkpoint_id=place, process_group=self._group)
        else:
            self._state.load_state_dict(saved["state"])
        self._scaler.load_state_dict(saved["scaler"])
        self.account = copy.deepcopy(saved["account"])


@contextlib.contextmanager
def folder(group):
    """One for all ranks of a group of the first ranks."""
    with tempfile.TemporaryDirectory() as own:
        yield from_first(own, group)
        dist.barrier(group)
