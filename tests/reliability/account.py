"""What ranks put in, and what must have come of it: the float64 model of one process."""

import torch
import torch.distributed as dist

ROUNDINGS = 16 * 2.0**-24  # of float32, in units of what was rounded; errors add up as their root


class Account:
    """Per entry: all that ranks put in is in the weights, or pending in some rank's residual.

    In units of the ranks' mean, so that it goes on with a different number of ranks.

    Args:
        sizes: of the parameters, in the order of the flat tensors below.
        start: the weights [numel].
    """

    def __init__(self, sizes, start):
        self._sizes, numel = list(sizes), sum(sizes)
        self._start = start.double()
        self.own = torch.zeros(numel, dtype=torch.float64)  # put in by this rank, of this group
        self.before = torch.zeros_like(self.own)  # the mean of earlier groups
        self.squares = torch.zeros(len(self._sizes), dtype=torch.float64)  # of what was rounded
        self.puts = 1
        self.rough = torch.zeros(numel, dtype=torch.float64)  # more that roundings may lose
        self.may_lose = torch.zeros(numel, dtype=torch.bool)  # until the next check
        self.lost = torch.zeros(numel, dtype=torch.bool)  # not finite in the weights, for good

    def put(self, values, times=1.0):
        """This rank's gradients [numel], or a negative: what leaves by the program's own doing."""
        self.own += times * values.double()
        self.squares += self._largest(values) ** 2
        self.puts += 1

    def check(self, weights, owed, group):
        """Collective.

        Args:
            weights: of which all that was put in is the change; the same on every rank.
            owed: this rank's share of what is pending, in units of the ranks' sum.
        """
        ranks = group.size()
        told = torch.stack([self.own, owed.double(), self.rough])
        dist.all_reduce(told, group=group)
        own, owed_by_all, rough = told
        expected = self.before + own / ranks
        applied = weights.double() - self._start
        got = applied + owed_by_all / ranks
        largest = self._largest(weights) + self._largest(self._start)
        largest += self._largest(owed_by_all / ranks)
        most = ROUNDINGS * (self.squares.sqrt() + self.puts**0.5 * largest)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        room = torch.repeat_interleave(most, torch.tensor(self._sizes)) + rough / ranks
        off = ~((got - expected).abs() <= room) & ~self.lost
        given_up = off & self.may_lose
        self.before += torch.where(given_up & got.isfinite(), got - expected, 0.0)
        self.lost |= given_up & ~got.isfinite()
        self.may_lose.zero_()
        wrong = (off & ~given_up).nonzero().flatten()
        if len(wrong):
            at = wrong[0]
            raise AssertionError(
                f"{len(wrong)} entries of {len(off)} are not conserved, the first is {at}: "
                f"{applied[at]} in the weights and {owed_by_all[at] / ranks} pending, "
                f"{expected[at]} put in; the room is {room[at]}"
            )

    def regroup(self, group):
        """Before a different group goes on with it: all that was put in is the mean's."""
        dist.all_reduce(self.own, group=group)
        self.before += self.own / group.size()
        self.own.zero_()

    def _largest(self, values):
        parts = values.double().nan_to_num(0, 0, 0).split(self._sizes)
        return torch.stack([part.abs().max() if len(part) else part.sum() for part in parts])
