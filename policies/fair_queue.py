"""Shares places between tenants, and between the keys of each: who goes next, and who gives way.

What it does: whoever holds the fewest places goes next; among equals, whoever has waited longest for a turn. So places
are shared max-min fairly (Bertsekas and Gallager, "Data Networks", section 6.5.2): one that wants less than its share
gets all it wants, the others share the rest evenly.

Why places and not requests: a place is what is scarce. One that sends long requests holds its places longer, and is
served less often for it. Nothing is remembered of one that neither holds a place nor waits.

Known problems: classes are strict, so a higher one can keep a lower one waiting for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

Name = TypeVar("Name")


@dataclass(slots=True, eq=False)
class Claim:
    """Holds what one request wants.

    Parameters
    ----------
    tenant, key : who wants it
    size : places it takes at once
    rank : its class; a lower one goes first
    """

    tenant: str
    key: str
    size: int = 1
    rank: int = 0


class _KeyQueue:
    __slots__ = ("claims", "size", "turn")

    def __init__(self, turn: int) -> None:
        self.claims: deque[Claim] = deque()
        self.size = 0
        self.turn = turn


class _TenantQueue:
    __slots__ = ("keys", "size", "turn")

    def __init__(self, turn: int) -> None:
        self.keys: dict[str, _KeyQueue] = {}
        self.size = 0
        self.turn = turn


class FairQueue:
    """Keeps the books of one pool of places.

    Parameters
    ----------
    num_ranks : classes

    Attributes
    ----------
    num_waiting, num_running : claims
    held, wanted : places taken, places that the waiting want
    holds_room : free places are kept for a waiting claim that needs more of them
    """

    def __init__(self, num_ranks: int = 1) -> None:
        self._ranks: list[dict[str, _TenantQueue]] = [{} for _ in range(num_ranks)]
        self._held_by_tenant: dict[str, int] = {}
        self._held_by_key: dict[tuple[str, str], int] = {}
        self._turn = 0
        self.num_waiting = 0
        self.num_running = 0
        self.held = 0
        self.wanted = 0
        self.holds_room = False

    # Places

    def start(self, claim: Claim) -> None:
        """Note that a claim has its places."""
        tenant, who = claim.tenant, (claim.tenant, claim.key)
        self._held_by_tenant[tenant] = self._held_by_tenant.get(tenant, 0) + claim.size
        self._held_by_key[who] = self._held_by_key.get(who, 0) + claim.size
        self.held += claim.size
        self.num_running += 1

    def stop(self, claim: Claim) -> None:
        """Note that it gave them back."""
        _take_off(self._held_by_tenant, claim.tenant, claim.size)
        _take_off(self._held_by_key, (claim.tenant, claim.key), claim.size)
        self.held -= claim.size
        self.num_running -= 1

    # The queue

    def push(self, claim: Claim) -> None:
        """Let a claim wait behind those of its key."""
        tenants = self._ranks[claim.rank]
        self._turn += 1
        tenant = tenants.get(claim.tenant)
        if tenant is None:
            tenant = tenants[claim.tenant] = _TenantQueue(self._turn)
        key = tenant.keys.get(claim.key)
        if key is None:
            key = tenant.keys[claim.key] = _KeyQueue(self._turn)
        key.claims.append(claim)
        key.size += claim.size
        tenant.size += claim.size
        self.wanted += claim.size
        self.num_waiting += 1

    def remove(self, claim: Claim) -> bool:
        """Take a waiting claim out; False if it does not wait."""
        tenant = self._ranks[claim.rank].get(claim.tenant)
        key = tenant and tenant.keys.get(claim.key)
        if not tenant or not key or claim not in key.claims:
            return False
        key.claims.remove(claim)
        key.size -= claim.size
        tenant.size -= claim.size
        self.wanted -= claim.size
        self.holds_room = False
        self.num_waiting -= 1
        if not key.claims:
            del tenant.keys[claim.key]
        if not tenant.keys:
            del self._ranks[claim.rank][claim.tenant]
        return True

    def take_next(self, room: int, may_start: Callable[[Claim], bool] | None = None) -> Claim | None:
        """Start the claim whose turn it is; None where none waits, may start, or fits ``room``.

        One that is too large for the room keeps it free: small ones would otherwise pass it for ever.

        Parameters
        ----------
        may_start : passes over claims that something else holds back
        """
        self.holds_room = False
        for tenants in self._ranks:
            for tenant, key in self._in_turn(tenants):
                claim = key.claims[0]
                if may_start is not None and not may_start(claim):
                    continue
                if claim.size > room and self.held:
                    self.holds_room = True
                    return None
                self._turn += 1
                tenant.turn = key.turn = self._turn
                self.remove(claim)
                self.start(claim)
                return claim
        return None

    def _in_turn(self, tenants: dict[str, _TenantQueue]) -> Iterator[tuple[_TenantQueue, _KeyQueue]]:
        by_tenant, by_key = self._held_by_tenant, self._held_by_key
        for name, tenant in sorted(tenants.items(), key=lambda item: (by_tenant.get(item[0], 0), item[1].turn)):
            keys = tenant.keys.items()
            for _, key in sorted(keys, key=lambda item: (by_key.get((name, item[0]), 0), item[1].turn)):
                yield tenant, key

    def waiting(self) -> Iterator[Claim]:
        """Yield all claims that wait."""
        for tenants in self._ranks:
            for tenant in tenants.values():
                for key in tenant.keys.values():
                    yield from key.claims

    def waiting_of(self, tenant: str, key: str) -> int:
        """Return the places that a key's waiting claims want, over all classes."""
        queues = [tenants[tenant].keys.get(key) for tenants in self._ranks if tenant in tenants]
        return sum(queue.size for queue in queues if queue is not None)

    def wanted_by(self, tenant: str) -> int:
        """Return the places that a tenant's waiting claims want, over all classes."""
        return sum(tenants[tenant].size for tenants in self._ranks if tenant in tenants)

    def load_of(self, tenant: str) -> int:
        """Return the places that a tenant holds and waits for."""
        return self._held_by_tenant.get(tenant, 0) + self.wanted_by(tenant)

    def share_of(self, tenant: str, num_places: int) -> float:
        """Return the places that a tenant can count on: an even share, and half of what it holds beyond it.

        The others may take back what is beyond.
        """
        names = {name for tenants in self._ranks for name in tenants}
        names.add(tenant)
        even = num_places / len(names | self._held_by_tenant.keys())
        return even + max(0.0, self._held_by_tenant.get(tenant, 0) - even) / 2

    # Who gives way

    def victim_for(self, claim: Claim) -> Claim | None:
        """Return the waiting claim that should give way to one that would come now; None if that one should not come.

        The newest of the lowest class below it, of the greediest there; else, in its own class, the newest of a tenant
        (or, within its tenant, of a key) that holds and waits for more than it would. Nothing is taken out.
        """
        for rank in range(len(self._ranks) - 1, claim.rank, -1):
            if self._ranks[rank]:
                tenant = max(self._ranks[rank], key=self.load_of)
                return self._newest(rank, tenant)
        tenants = self._ranks[claim.rank]
        if not tenants:
            return None
        greediest = max(tenants, key=self.load_of)
        if greediest != claim.tenant and self.load_of(greediest) > self.load_of(claim.tenant) + claim.size:
            return self._newest(claim.rank, greediest)
        return self.victim_within(claim)

    def victim_within(self, claim: Claim) -> Claim | None:
        """Likewise of the claim's own tenant and class: the newest of a greedier key."""
        mine = self._ranks[claim.rank].get(claim.tenant)
        if mine is None:
            return None
        loads = {name: key.size + self._held_by_key.get((claim.tenant, name), 0) for name, key in mine.keys.items()}
        key = max(loads, key=lambda name: loads[name])
        own = loads.get(claim.key, self._held_by_key.get((claim.tenant, claim.key), 0))
        return mine.keys[key].claims[-1] if key != claim.key and loads[key] > own + claim.size else None

    def _newest(self, rank: int, tenant: str) -> Claim:
        keys = self._ranks[rank][tenant].keys
        by_key = self._held_by_key
        greediest = max(keys, key=lambda name: keys[name].size + by_key.get((tenant, name), 0))
        return keys[greediest].claims[-1]

    @property
    def is_idle(self) -> bool:
        """Tell whether nobody waits, nothing is held, and nothing is remembered."""
        return not (
            self.num_waiting
            or self.wanted
            or self.held
            or any(self._ranks)
            or self._held_by_tenant
            or self._held_by_key
        )


def _take_off(counts: dict[Name, int], name: Name, amount: int) -> None:
    left = counts[name] - amount
    if left:
        counts[name] = left
    else:
        del counts[name]
