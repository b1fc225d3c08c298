"""Bulkheads: the places of what computes answers, each with a queue of its own.

A bulkhead is one engine on a GPU, all engines that take turns on a CPU, or one remote model. One that is full, or that
does not answer, holds up nobody who wants another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from backends.protocol import Backend, Load, Priority
from gateway.access.key_limits import NO_LIMITS, KeyLimits
from policies.fair_queue import Claim, FairQueue
from policies.queue_wait import HeldTime

# Of a model that does not say how much it takes at once.
DEFAULT_PLACES = 256
# Below this share of free KV memory an engine whose own queue is not empty takes no more.
_LEAST_KV_FREE = 0.1
# While nothing has ended in a full bulkhead, nobody knows how long requests would wait. Then so many times its places
# may, or so many requests if that is more: a burst is no overload yet.
_ROUNDS_UNMEASURED = 2
_LEAST_UNMEASURED = 32
# One place is kept free from the greediest tenant, for those who asked so lately and want less.
_LATELY_S = 10.0
_MOST_LATELY = 64
# Of fewer places one is too many to keep free.
_LEAST_SHARED = 4


class Bulkhead:
    """Holds places, and who waits for them.

    Parameters
    ----------
    num_places : most requests computed at once
    loads : tell of the KV memory of the engines behind it; none where it cannot run short

    Attributes
    ----------
    queue : the books
    held_time : how long places are held
    """

    def __init__(self, num_places: int, loads: Sequence[Callable[[], Load]] = ()) -> None:
        self.num_places = num_places
        self.queue = FairQueue(num_ranks=len(Priority))
        self.held_time = HeldTime()
        self._loads = tuple(loads)
        self._asked_s: dict[str, float] = {}

    def note_asked(self, tenant: str, now_s: float) -> None:
        """Note that a tenant asks for places."""
        self._asked_s.pop(tenant, None)
        self._asked_s[tenant] = now_s
        if len(self._asked_s) > _MOST_LATELY:
            del self._asked_s[next(iter(self._asked_s))]

    def num_kept_free(self, tenant: str, num_places: int, now_s: float) -> int:
        """Return the places that a tenant leaves free of so many.

        One, where nobody holds and waits for more than it does and somebody who asked lately wants less: whoever is
        modest then finds a place, where it would else wait for somebody's answer to end. With 8 places, and one tenant
        of four that asks for all, that halves what the others wait (p99) for 6 % of the goodput.
        """
        if num_places < _LEAST_SHARED:
            return 0
        own, is_modest_about = self.queue.load_of(tenant), False
        for name, at_s in self._asked_s.items():
            if name == tenant or now_s - at_s >= _LATELY_S:
                continue
            load = self.queue.load_of(name)
            if load > own:
                return 0
            is_modest_about |= load < own
        return int(is_modest_about)

    @property
    def is_short_of_memory(self) -> bool:
        """Tell whether requests wait inside an engine because its KV memory is taken.

        Whoever is let in then waits there too, where nobody can turn it away. Never while nothing runs: there would be
        no end to wait for.
        """
        if not self._loads or not self.queue.held:
            return False
        return any(load.waiting and load.kv_free_fraction < _LEAST_KV_FREE for load in [read() for read in self._loads])

    def would_wait_s(self, size: int, now_s: float) -> float:
        """Return the expected seconds until all that wait now, and ``size`` places more, have been served."""
        return (self.queue.wanted + size) * self.held_time.expect_s(now_s) / max(self.queue.held, 1)

    def is_backlogged(self, size: int, max_queue_s: float, max_running: int, now_s: float) -> bool:
        """Tell whether with ``size`` places more the queue would be longer than ``max_queue_s``.

        ``max_running`` is the most that run over all bulkheads.
        """
        most = max(_ROUNDS_UNMEASURED * min(self.num_places, max_running), _LEAST_UNMEASURED)
        if not self.held_time.is_measured and self.queue.wanted + size > most:
            return True
        return self.would_wait_s(size, now_s) > self.longest_wait_s(max_queue_s, now_s)

    def is_backlogged_for(self, tenant: str, size: int, max_queue_s: float, now_s: float) -> bool:
        """Tell whether a tenant's own queue would be longer than that, at the share of the places it can count on.

        Others go before it as often as they come; one that asks for too much would be let in to wait in vain.
        """
        wanted = self.queue.wanted_by(tenant)
        if not wanted or not self.held_time.is_measured:
            return False
        wait_s = (wanted + size) * self.held_time.expect_s(now_s) / self.queue.share_of(tenant, self.queue.held)
        return wait_s > self.longest_wait_s(max_queue_s, now_s)

    def longest_wait_s(self, max_queue_s: float, now_s: float) -> float:
        """Return the longest wait that is accepted.

        Long answers may wait for one round of the places: that at most doubles the time they take.
        """
        return max(max_queue_s, self.held_time.expect_s(now_s))


@dataclass(slots=True, eq=False)
class PlaceClaim(Claim):
    """Holds a request's claim to places of one bulkhead.

    Attributes
    ----------
    limits : of its key
    turn : done once it has its places, or will not get them; None where it never waited
    entered_s : when it got them
    """

    bulkhead: Bulkhead | None = None
    limits: KeyLimits = NO_LIMITS
    turn: asyncio.Future[None] | None = None
    entered_s: float = 0.0


def make_bulkheads(backends: Mapping[str, Backend]) -> dict[str, Bulkhead]:
    """Return every served model's name -> its bulkhead; models that share what computes share one.

    Models on one CPU take turns on it: as many places as one of them has keep it busy, and more would only make every
    answer slower.
    """
    shared: dict[str, list[tuple[str, Backend, Load]]] = {}
    for name, backend in backends.items():
        load = backend.load()
        shared.setdefault(load.computed_by or f"model {name}", []).append((name, backend, load))
    found: dict[str, Bulkhead] = {}
    for members in shared.values():
        num_places = min(load.max_running or DEFAULT_PLACES for _, _, load in members)
        loads = [backend.load for _, backend, load in members if load.has_kv_memory]
        found |= dict.fromkeys([name for name, _, _ in members], Bulkhead(num_places, loads))
    return found
