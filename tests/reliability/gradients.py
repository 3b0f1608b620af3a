"""Base class of the runners of both hooks, with steps, checkpoints and the account."""

import contextlib
import copy
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from support.ranks import through_a_file

from .account import Account
from .common import (
    BLOCK,
    broadcast_from_rank_0,
    digest,
    flat,
    poison,
    refused,
    require_equal,
    values,
    with_same_scale,
)

DENSE = 2.0**-6  # relative rounding error of a mean in bfloat16
_THEN = ["apply"] * 6 + ["take_back"] * 2 + ["drop"]


def draw_step(draw, ranks):
    step = {"seed": draw.randrange(10**6), "then": draw.choice(_THEN)}
    if draw.random() < 0.25:
        step |= {"passes": draw.randint(2, 3), "no_sync": draw.random() < 0.5}
    if draw.random() < 0.2:
        value, count = draw.choice(["nan", "inf", "-inf"]), draw.choice([1, 1, 3, 500])
        step["bad"] = (draw.randrange(ranks), value, draw.randrange(1000), count)
    elif draw.random() < 0.1:
        step["outside"] = True  # a gradient outside the model overflows
    if draw.random() < 0.3:
        step["stats"] = True
    return step


class GradientRunner:
    """Runs a program with a hook on one rank.

    Subclasses implement the methods without a body, and define these attributes:

    - `_model`, `_state`, `_scaler` and `account`
    - `_options`: the options of `_state`
    - `_group`: the process group over which gradients are averaged
    - `_all`: all parameters
    - `_parameters`: the trained parameters
    - `_optimizer`: the optimizer of `_parameters` and `_outside`
    """

    idle = False
    TAKES_BACK_ALL_PASSES = True  # take_back also restores entries sent in earlier backward passes

    def _backward(self, gradients, exchanged):
        """Run a backward pass; `exchanged` says whether its gradients are sent."""

    def _gradient(self):
        """Return the flat mean gradient."""

    def _flat(self, parameters):
        """Return the flat, unsharded weights."""

    def _set_weights(self, weights):
        """Set all parameters from the result of `_flat`."""

    def _replace(self, weights):
        """Create a model, a state and an optimizer, into which a checkpoint is loaded."""

    def _pending(self):
        """Return this rank's pending gradients, flat, in units of the sum over ranks."""

    def _positions(self):
        """Return the message of each entry and the entry's position in it."""

    def _sends_with(self, rank):
        """Whether non-finite gradients of `rank` enter the messages of this rank."""

    # Calls of a program

    def step(self, step):
        bad, passes = step.get("bad"), step.get("passes", 1)
        compressed = self._state.step >= self._state.start_step
        together = passes == 1 or step["no_sync"] or not compressed  # one exchange
        scale, bad_pass = self._scaler.get_scale(), step["seed"] % passes
        self._optimizer.zero_grad(set_to_none=step["seed"] % 2 == 0)
        total, earlier, hit = 0, None, self._nonfinite_mask(bad)
        near = hit  # non-finite entries, and entries that are lost with them
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
                near = self._with_same_scale(near if together else near | self._first_of_payloads())
        mean = self._gradient() / scale
        require_equal(mean, self._group, "gradients")
        if step.get("stats"):
            self._check_stats()
        if compressed:
            lost = near & (bool(bad) and self._sends_with(bad[0]))
            self.account.put(torch.where(lost, 0.0, total))
            if not together:
                self.account.may_lose |= near
        else:
            self._require_dense(mean, total, hit)
        affected = near | self._first_of_payloads() if hit.any() else near
        if not self._applied(step, mean):
            if step["then"] == "drop":
                self._record(mean, -1, affected) if compressed else None
            elif earlier is not None and not self.TAKES_BACK_ALL_PASSES:
                self._record(earlier, -1, affected)
        elif not compressed:
            self._record(mean, 1, hit)
        else:
            self.account.may_lose |= affected

    def replay(self, how, steps):
        """Repeat steps from a checkpoint. Results must be equal unless `refresh_every` is set."""
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
        assert ends[0] == ends[1] or "refresh_every" in self._options

    def move(self, transport, how):
        """Load a checkpoint into a state with a different transport."""
        self.check()
        with folder(self._group) as place:
            saved = self._save(place if how == "dcp" else None)
            self._options = self._options | {"transport": transport}
            self._restore(saved, how, place)

    def check(self):
        weights = self._flat(self._parameters)
        require_equal(weights, self._group, "weights")
        self.account.check(-weights, self._pending(), self._group)

    def end(self):
        self.check()
        self._check_stats()
        self._state.close()
        self._state.close()
        with refused(ValueError, RuntimeError):
            self._backward(values(self._all, 0, self.rank), True)

    # Helpers

    def _applied(self, step, mean):
        """Step the optimizer, unless the program or scaler skips it; return whether it stepped."""
        overflows = bool(step.get("outside")) and self._scaler.is_enabled()
        self._outside.grad = torch.full_like(self._outside, torch.inf if overflows else 0.0)
        if step["then"] == "take_back":
            for _ in range(1 + step["seed"] % 2):  # a second call has no effect
                self._state.take_back()
        if step["then"] != "apply":
            return False
        before = self._scaler.get_scale()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        skipped = self._scaler.is_enabled() and (overflows or not mean.isfinite().all())
        assert skipped == (self._scaler.get_scale() < before)
        return not skipped

    def _check_stats(self):
        stats = self._state.stats()
        assert stats["step"] == self._state.step
        for name in ("density", "overflow"):
            assert stats[name] is None or 0 <= stats[name] <= 1
        assert "bucket" in self._state.plan()
        for figures in self._state.parameter_stats().values():
            assert 0 <= figures["density"] <= 1 and figures["residual_norm"] >= 0

    def _record(self, mean, times, affected):
        """Add a mean to the account (`times` is 1), or remove a dropped one (`times` is -1)."""
        self.account.put(torch.where(affected | ~mean.isfinite(), 0.0, mean), times)
        self.account.may_lose |= affected

    def _require_dense(self, mean, total, hit):
        sums = torch.stack([total.double(), total.double().abs()])
        dist.all_reduce(sums, group=self._group)
        expected, room = sums / self._group.size()
        assert ((mean - expected).abs() <= DENSE * room)[~hit].all(), "dense mean"

    def _nonfinite_mask(self, bad):
        """Return a mask of the entries that `bad` makes non-finite."""
        mask = torch.zeros(sum(p.numel() for p in self._parameters), dtype=torch.bool)
        if bad and bad[0] < self._group.size():
            mask[bad[2] : bad[2] + bad[3]] = True
        return mask

    def _with_same_scale(self, mask):
        """Extend the mask to all entries that share a scale with masked ones."""
        return with_same_scale(mask, *self._positions(), self._options["format"])

    def _first_of_payloads(self):
        """Return a mask of the first entry of each block, which can be NaN after an overflow."""
        return self._positions()[1] % BLOCK == 0

    def _reset_account(self):
        """Create a new account. Nothing may be pending."""
        weights = self._flat(self._parameters)
        self.account = Account([p.numel() for p in self._parameters], -weights)
        self.account.lost |= ~weights.isfinite()

    def _save(self, place):
        """Return a checkpoint. Also save the state to the folder `place`, unless it is None."""
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
            self._set_weights(saved["weights"])
        else:
            self._state.close()
            self._replace(saved["weights"])
        if how == "dcp":
            dcp.load({"dct": self._state}, checkpoint_id=place, process_group=self._group)
        else:
            self._state.load_state_dict(saved["state"])
        self._scaler.load_state_dict(saved["scaler"])
        self.account = copy.deepcopy(saved["account"])


@contextlib.contextmanager
def folder(group):
    """A temporary folder that the ranks of the group share."""
    with tempfile.TemporaryDirectory() as local:
        yield broadcast_from_rank_0(local, group)
        dist.barrier(group)
