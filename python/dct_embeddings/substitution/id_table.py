"""A hash table in tensors, from ids to places 1, 2, 3, ... in order of insertion.

Linear hashing (Litwin, 1980): buckets are added in proportion to the number of ids, and each new
bucket receives ids from one older bucket. So the table is never rehashed as a whole. The number of
tensor operations does not depend on the number of ids in a call.
"""

import torch
from torch import Tensor

SLOTS = 8  # per bucket
LOAD = 2  # ids per bucket on average, so that three in four ids are in their first slot
NO_PLACE = 0  # the place of an id that was not added


class IdTable:
    """Maps ids from 0 to 2^63 - 1 to places, integers from 1 up in order of insertion.

    A slot holds the place of an id. The hash of an id determines its bucket and first slot. If that
    slot is occupied, the id gets the next free slot of the bucket. If the bucket is full, which is
    rare, the id is put into a sorted list.

    Args:
        capacity: maximum number of ids, less than 2^31. Reserves 24 bytes per id; the CPU allocates
            pages only when ids are added.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._ids = torch.empty(1 + capacity, dtype=torch.int64, device=device)  # by place
        self._ids[NO_PLACE] = -1
        slots = (capacity // LOAD + 1) * SLOTS
        self._places = torch.empty(slots, dtype=torch.int32, device=device)
        self._places[:SLOTS] = NO_PLACE
        self._buckets = self._level = 1  # level: the largest power of 2 <= buckets
        self._count = 0
        self._others = self._ids.new_empty(0)  # ids whose buckets were full, ascending
        self._places_of_others = self._places.new_empty(0)

    def __len__(self) -> int:
        return self._count

    @property
    def ids(self) -> Tensor:
        """All added ids, in the order of their places."""
        return self._ids[1 : 1 + self._count]

    def find(self, ids: Tensor) -> Tensor:
        """Return the place of each id, int32 [n], or NO_PLACE. The host waits."""
        slot = self._first_slots(mix(ids))
        places = self._places.index_select(0, slot)
        left = rest = (self._ids.index_select(0, places) != ids).nonzero().squeeze(1)
        for _ in range(SLOTS - 1):
            if len(rest) == 0:
                return places
            # index_select is several times faster than indexing.
            ids, slot = ids.index_select(0, rest), _next(slot.index_select(0, rest))
            found = self._places.index_select(0, slot)
            places.index_copy_(0, left, found)
            rest = (self._ids.index_select(0, found) != ids).nonzero().squeeze(1)
            left = left.index_select(0, rest)
        return places.index_copy_(0, left, self._among_others(ids.index_select(0, rest)))

    def add(self, ids: Tensor) -> None:
        """Add new and distinct ids, which get the next places in their order."""
        first, self._count = self._count, self._count + len(ids)
        places = torch.arange(1 + first, 1 + self._count, dtype=torch.int32, device=ids.device)
        self._ids[1 + first : 1 + self._count] = ids
        self._grow(self._count // LOAD + 1)
        slot = self._first_slots(mix(ids))
        for _ in range(SLOTS):
            free = self._places[slot] == NO_PLACE
            self._places[slot[free]] = places[free]  # of ids with the same slot, one gets it
            left = self._places[slot] != places
            places, slot = places[left], _next(slot[left])
        if len(places):
            self._places_of_others = torch.cat([self._places_of_others, places])
            self._others, order = self._ids[self._places_of_others].sort()
            self._places_of_others = self._places_of_others[order]

    def _among_others(self, ids: Tensor) -> Tensor:
        if len(self._others) == 0:
            return self._places.new_full((len(ids),), NO_PLACE)
        index = torch.searchsorted(self._others, ids).clamp(max=len(self._others) - 1)
        return torch.where(self._others[index] == ids, self._places_of_others[index], NO_PLACE)

    def _first_slots(self, hashed: Tensor) -> Tensor:
        slots = hashed & (2 * self._level * SLOTS - 1)
        return slots - (slots >= self._buckets * SLOTS) * (self._level * SLOTS)

    def _grow(self, buckets: int) -> None:
        """Add buckets up to this number. Bucket i receives ids from bucket i - `level`."""
        while self._buckets < buckets:
            if self._buckets == 2 * self._level:
                self._level *= 2
            more = min(buckets, 2 * self._level) - self._buckets
            start = (self._buckets - self._level) * SLOTS
            old = self._places[start : start + more * SLOTS]
            leaves = mix(self._ids[old]) & self._level * SLOTS != 0
            start = self._buckets * SLOTS
            self._places[start : start + more * SLOTS] = torch.where(leaves, old, NO_PLACE)
            old[leaves] = NO_PLACE
            self._buckets += more


def mix(ids: Tensor) -> Tensor:
    """Hash each id to a non-negative int64. Every bit of the id affects the result."""
    x = ids * -0x61C8864680B583EB
    x = (x ^ x >> 32) * -0x4B47D0C5A2D2F58B
    return x ^ x >> 31  # not negative, because shifts repeat the sign


def _next(slot: Tensor) -> Tensor:
    """The next slot of the same bucket, cyclically."""
    return (slot & -SLOTS) | (slot + 1 & SLOTS - 1)
