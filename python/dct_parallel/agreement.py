"""What every rank of a group holds, told through the group's store.

Not by a collective: ranks that disagree about a message's size hang in it, or end in an abort that
names nothing. The store answers whatever the ranks do, so all of them can say what is wrong.
"""

import json
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dct_kernels import checks

from .groups import timeout_of

POLL_SECONDS = 0.02  # a wait in the store would keep other threads of this process from it


class Agreement:
    """Rounds of `exchange` among the ranks of a group, which all make it and call it alike.

    Args:
        group: the ranks.
        device: whose backend's timeout bounds the wait for the others.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._ranks = dist.get_process_group_ranks(group)
        self._own = dist.get_rank()
        self._timeout = timeout_of(group, device)
        store = group.get_group_store()
        number = store.add(f"dct/agreements/{self._own}", 1)  # every rank's own count: the same
        self._store = dist.PrefixStore(f"dct/agreement{number}", store)
        self._round = 0

    def exchange(
        self, op: str, values: Mapping[str, Any], patience: timedelta | None = None
    ) -> dict[int, dict[str, Any]]:
        """{rank: what it told}, in the group's order, once every rank has told its own.

        Args:
            op: what the ranks are at, for the error.
            values: what JSON can hold.
            patience: how long to wait for the others; default and at most the group's timeout.

        Raises:
            RuntimeError: some ranks have told nothing by then; it names them.
        """
        self._round += 1
        self._store.set(self._key(self._own), json.dumps(values))
        patience = min(patience or self._timeout, self._timeout)
        deadline = time.monotonic() + patience.total_seconds()
        missing = self._ranks
        while missing := [r for r in missing if not self._store.check([self._key(r)])]:
            if time.monotonic() >= deadline:
                rule = f"the same within {patience.total_seconds():g} s"
                got = f"nothing from rank {', '.join(map(str, missing))}"
                checks.fail(op, "every rank", rule, got, RuntimeError, verb="do")
            time.sleep(POLL_SECONDS)
        return {rank: json.loads(self._store.get(self._key(rank))) for rank in self._ranks}

    def _key(self, rank: int) -> str:
        return f"{self._round}/{rank}"


def require_alike(
    op: str, values: Mapping[str, object], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Raise, naming every rank's, if some of `values` is not the same on all; on all of them.

    Collective, and for the time of a set-up. They are compared as texts: none need be fit for
    anything, so that a rank that has a wrong one does not leave the others waiting.
    """
    told = {name: str(value) for name, value in values.items()}
    require_same(op, Agreement(group, device).exchange(op, told))


def require_same(op: str, told: Mapping[Any, Mapping[str, Any]]) -> None:
    """Raise, naming every rank's, if some value differs between ranks: on all of them alike."""
    for name in next(iter(told.values())):
        if len({json.dumps(values.get(name)) for values in told.values()}) > 1:
            got = ", ".join(f"{values.get(name)} on rank {rank}" for rank, values in told.items())
            checks.fail(op, name, "the same on every rank", got)
