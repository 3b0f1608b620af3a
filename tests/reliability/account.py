"""Conservation of gradients and weight changes, checked against sums in float64."""

import torch
import torch.distributed as dist

ROUNDINGS = 16 * 2.0**-24  # relative; errors grow as the square root of the number of values


class Account:
    """Checks for each entry that all contributions are in the weights or pending in a residual.

    Sums are in units of the mean over ranks, so the number of ranks can change.

    Args:
        sizes: sizes of the parameters, in the order of the flat tensors below.
        start: initial weights [numel].
    """

    def __init__(self, sizes, start):
        self._sizes, numel = list(sizes), sum(sizes)
        self._start = start.double()
        self.contributions = torch.zeros(numel, dtype=torch.float64)  # of this rank and group
        self.before = torch.zeros_like(self.contributions)  # mean contributions of earlier groups
        self.squares = torch.zeros(len(self._sizes), dtype=torch.float64)  # of the largest values
        self.puts = 1
        self.tolerance = torch.zeros(numel, dtype=torch.float64)  # additional tolerance
        self.may_lose = torch.zeros(numel, dtype=torch.bool)  # until the next check
        self.lost = torch.zeros(numel, dtype=torch.bool)  # permanently non-finite in the weights

    def put(self, values, times=1.0):
        """Add `times` * values [numel], this rank's contribution. A negative `times` removes it."""
        self.contributions += times * values.double()
        self.squares += self._largest(values) ** 2
        self.puts += 1

    def check(self, weights, pending, group):
        """Raise unless all contributions are applied or pending. Collective.

        Args:
            weights: current weights, the same on every rank.
            pending: this rank's pending contributions, in units of the sum over ranks.
        """
        ranks = group.size()
        shared = torch.stack([self.contributions, pending.double(), self.tolerance])
        dist.all_reduce(shared, group=group)
        contributions, pending_of_all, tolerance = shared
        expected = self.before + contributions / ranks
        applied = weights.double() - self._start
        got = applied + pending_of_all / ranks
        largest = self._largest(weights) + self._largest(self._start)
        largest += self._largest(pending_of_all / ranks)
        most = ROUNDINGS * (self.squares.sqrt() + self.puts**0.5 * largest)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        room = torch.repeat_interleave(most, torch.tensor(self._sizes)) + tolerance / ranks
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
                f"{applied[at]} in the weights and {pending_of_all[at] / ranks} pending, "
                f"expected {expected[at]}, tolerance {room[at]}"
            )

    def regroup(self, group):
        """Add up the contributions of this group, before a different group continues."""
        dist.all_reduce(self.contributions, group=group)
        self.before += self.contributions / group.size()
        self.contributions.zero_()

    def _largest(self, values):
        parts = values.double().nan_to_num(0, 0, 0).split(self._sizes)
        return torch.stack([part.abs().max() if len(part) else part.sum() for part in parts])
