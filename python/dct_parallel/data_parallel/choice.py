"""Which transport each bucket takes: the one that was asked for, or the fastest on a link."""

import dataclasses
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from dct_kernels import checks

from . import link as links
from .bf16 import Bf16
from .bucket_plan import BucketPlan, Settings
from .gather import Gather
from .link import Link
from .run import Run
from .shard import Shard
from .transports import Transport

TRANSPORTS: dict[str, type[Transport]] = {Gather.name: Gather, Shard.name: Shard}
AUTO = "auto"
PROBE = "probe"


class Choice:
    """What `DCTState` was given as `transport` and `link`, and what comes of it.

    The same on all ranks: it goes by formulas, and a link that is measured is the first rank's.

    Attributes:
        name: of the transport that was asked for.
        given: the link, "probe", a file, or None.
    """

    # Of which "auto" chooses:
    TRANSPORTS: tuple[type[Transport] | type[Bf16], ...] = (Gather, Shard, Bf16)

    def __init__(self, transport: str, link: Link | str | os.PathLike[str] | None) -> None:
        if transport not in (AUTO, *TRANSPORTS):
            rule = " or ".join(map(repr, (AUTO, *TRANSPORTS)))
            checks.fail("DCTState", "transport", rule, repr(transport))
        if not isinstance(link, (Link, str, os.PathLike, type(None))):
            rule = "a Link, 'probe' or a path"
            checks.fail("DCTState", "link", rule, type(link).__name__, TypeError)
        if link is not None and transport != AUTO:
            checks.fail("DCTState", "link", f"None with transport {transport!r}", repr(link))
        self.name = transport
        self.given = link
        self._link = link if isinstance(link, Link) else None

    def settle(
        self, run: Run, group: dist.ProcessGroup, device: torch.device, settings: Settings
    ) -> None:
        """Get to know the link, if one is to be known; a collective then. One rank reads a file."""
        if self.given is None:
            return
        error = None
        if self._link is None and self.given == PROBE:
            self._link = links.probe(group, device, settings)
        elif not isinstance(self.given, Link) and self._link is None and group.rank() == 0:
            try:
                self._link = links.read(self.given, group.size())
            except ValueError as refused:  # by all ranks, once they know
                error = str(refused)
        told = run.of_first_rank("DCTState", {"link": self._link, "error": error})
        if told["error"] is not None:
            raise ValueError(told["error"])
        self._link = Link.from_json(told["link"])

    @property
    def kind(self) -> str:
        """Of link: what ranks must have alike to take part in `settle`."""
        return "none" if self.given is None else PROBE if self.given == PROBE else "given"

    @property
    def keeps_owners(self) -> bool:
        """Whether some bucket may have owners, whose residuals are part of the state then."""
        return self.name == Shard.name or self._link is not None

    def plan(
        self,
        names: tuple[str, ...],
        sizes: tuple[int, ...],
        settings: Settings,
        ranks: int,
    ) -> BucketPlan:
        """The plan of a bucket; see there."""
        transport = TRANSPORTS.get(self.name, Gather)
        plan = BucketPlan(names, sizes, settings, transport, ranks)
        if self._link is None:
            return plan
        return min(self._timed(plan, self._link), key=lambda timed: timed[0])[1]

    def reason(self, plans: Sequence[BucketPlan]) -> str:
        """Why these plans are as they are."""
        if self.name != AUTO:
            return "as asked"
        if self._link is None:
            return "auto: no link is known"
        times = dict.fromkeys((transport.name for transport in self.TRANSPORTS), 0.0)
        chosen = 0.0
        for plan in plans:
            for seconds, other in self._timed(plan, self._link):
                times[other.transport.name] += 1e3 * seconds
                if other.transport is plan.transport:
                    chosen += 1e3 * seconds
        each = ", ".join(f"{name} {ms:.2f}" for name, ms in times.items())
        return f"auto: {chosen:.2f} ms by its formulas; {each}"

    def _timed(self, plan: BucketPlan, link: Link) -> list[tuple[float, BucketPlan]]:
        """The same bucket by each transport, and the seconds that it takes."""
        timed = []
        for transport in self.TRANSPORTS:
            other = dataclasses.replace(plan, transport=transport)
            timed.append((transport.seconds(other, link), other))
        return timed
