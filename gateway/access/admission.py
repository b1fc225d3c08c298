"""Admission control: who gets a place now, who waits for one, who is turned away."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TypeVar

from backends.protocol import Priority
from gateway.access.authenticator import ANONYMOUS, Caller
from gateway.access.bulkhead import DEFAULT_PLACES, Bulkhead, PlaceClaim
from gateway.access.key_limits import NO_LIMITS
from gateway.errors import Draining, QueueFull
from policies.fair_queue import Claim

# A wait that turns out so many times as long as the longest that is accepted ends: its client has most likely given up.
_PATIENCE = 2.0
# How soon an engine short of memory is looked at again while requests wait for it.
_LOOK_AGAIN_S = 0.05
Name = TypeVar("Name")

_RANKS = {priority: rank for rank, priority in enumerate(Priority)}


class Admission:
    """Gives out the places of all bulkheads, fairly between tenants and keys, live requests before background ones.

    A request waits where its bulkhead is full, or where its key or its tenant has as many at once as it may. It is
    turned away where the queue would become longer than allowed, unless somebody greedier can be turned away instead.

    Parameters
    ----------
    max_running : most requests over all bulkheads; None is the sum of their places
    max_waiting : most requests that wait
    max_queue_s : longest queue, in seconds that it takes to serve it; one round of the places is always in order
    bulkheads : served model's name -> where it is computed; all others share one
    clock : monotonic seconds

    Attributes
    ----------
    num_running, num_waiting : requests
    max_running : as above
    is_leaving : no new request should be sent here any more; those that come are taken
    is_draining : no new request is taken
    """

    def __init__(
        self,
        max_running: int | None,
        max_waiting: int,
        max_queue_s: float,
        *,
        bulkheads: Mapping[str, Bulkhead] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_given = max_running
        self._max_waiting = max_waiting
        self._max_queue_s = max_queue_s
        self._clock = clock
        self._num_by_key: dict[tuple[str, str], int] = {}
        self._num_by_tenant: dict[str, int] = {}
        self._look_again: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self.num_running = 0
        self.num_waiting = 0
        self.is_leaving = False
        self.is_draining = False
        self.divide(bulkheads or {})

    def divide(self, bulkheads: Mapping[str, Bulkhead]) -> None:
        """Say what there is to give out; before the first request."""
        assert not self.num_running, "nobody has come yet"
        self._by_model = dict(bulkheads)
        self._other = Bulkhead(self._max_given or DEFAULT_PLACES)
        # In the order in which they are looked at for somebody whose turn it is; one that was served goes to the end.
        self._bulkheads = deque(dict.fromkeys([*self._by_model.values(), self._other]))
        known = dict.fromkeys(self._by_model.values()) or {self._other: None}
        self.max_running = self._max_given or sum(each.num_places for each in known)

    @property
    def is_idle(self) -> bool:
        """Tell whether nobody runs or waits, and nothing of anybody is remembered."""
        books = [each.queue.is_idle for each in self._bulkheads]
        return all(books) and not (self.num_running or self.num_waiting or self._num_by_key or self._num_by_tenant)

    def check(self, caller: Caller = ANONYMOUS) -> None:
        """Turn a request away before its body is read, where it is plain that it will be.

        Raises
        ------
        QueueFull, Draining
        """
        if self.is_draining:
            raise Draining
        if self.num_waiting:
            known = dict.fromkeys(self._by_model.values()) or {self._other: None}
            claims = [self._claim(Priority.LIVE, caller, each, 1) for each in known]
            if all(not self._can_begin(claim) and self._finds_no_room(claim) for claim in claims):
                raise min((self._full(claim) for claim in claims), key=lambda error: error.retry_after_s)

    async def enter(
        self, priority: Priority, caller: Caller = ANONYMOUS, model: str | None = None, size: int = 1
    ) -> PlaceClaim:
        """Take a place, waiting for one if need be; ``leave`` gives it back.

        Parameters
        ----------
        model : the served model that will be asked
        size : answers computed at once

        Raises
        ------
        QueueFull, Draining
        """
        if self.is_draining:
            raise Draining
        bulkhead = self._other if model is None else self._by_model.get(model, self._other)
        claim = self._claim(priority, caller, bulkhead, size)
        bulkhead.note_asked(claim.tenant, self._clock())
        if self._can_begin(claim):
            bulkhead.queue.start(claim)
            self._begin(claim)
            return claim
        if self._finds_no_room(claim, evicts=True):
            raise self._full(claim)
        return await self._wait(claim, bulkhead)

    def leave(self, claim: PlaceClaim) -> None:
        """Give a place back to whoever is next."""
        bulkhead = claim.bulkhead
        assert bulkhead is not None, "made with one"
        now_s = self._clock()
        was_full = self._is_full(bulkhead, claim.size) or bulkhead.queue.num_waiting > 0
        bulkhead.queue.stop(claim)
        bulkhead.held_time.ended(now_s - claim.entered_s, now_s, was_full=was_full)
        self.num_running -= 1
        _count_off(self._num_by_tenant, claim.tenant)
        _count_off(self._num_by_key, (claim.tenant, claim.key))
        if self.num_waiting:
            self._give_out()
        if self.num_running == 0:
            self._idle.set()

    def _claim(self, priority: Priority, caller: Caller, bulkhead: Bulkhead, size: int) -> PlaceClaim:
        size = max(1, min(size, bulkhead.num_places))
        return PlaceClaim(caller.tenant, caller.key_id or "", size, _RANKS[priority], bulkhead, caller.limits)

    # Beginning

    def _is_full(self, bulkhead: Bulkhead, size: int) -> bool:
        return self.num_running >= self.max_running or bulkhead.num_places - bulkhead.queue.held < size

    def _can_begin(self, claim: PlaceClaim) -> bool:
        """Tell whether nothing holds a claim back; who waits beside free places is held back by something else."""
        bulkhead = claim.bulkhead
        assert bulkhead is not None, "made with one"
        if self._is_full(bulkhead, claim.size) or bulkhead.queue.holds_room or not self._may_take(claim):
            return False
        return not bulkhead.is_short_of_memory

    def _may_take(self, claim: Claim) -> bool:
        """Tell whether a claim may have free places: within its limits, and not the one that is kept for others."""
        assert isinstance(claim, PlaceClaim), "no others are made here"
        bulkhead = claim.bulkhead
        assert bulkhead is not None, "made with one"
        if claim.limits is not NO_LIMITS and not self._is_within_limits(claim):
            return False
        num_left = min(bulkhead.num_places - bulkhead.queue.held - claim.size, self.max_running - self.num_running - 1)
        # One that needs more than there is keeps it free for itself, as the queue sees to.
        if num_left != 0:
            return True
        num_places = min(bulkhead.num_places, self.max_running)
        return not bulkhead.num_kept_free(claim.tenant, num_places, self._clock())

    def _is_within_limits(self, claim: Claim) -> bool:
        assert isinstance(claim, PlaceClaim), "no others are made here"
        limits = claim.limits
        by_key, by_tenant = limits.max_concurrency, limits.max_tenant_concurrency
        if by_key is not None and self._num_by_key.get((claim.tenant, claim.key), 0) >= by_key:
            return False
        return by_tenant is None or self._num_by_tenant.get(claim.tenant, 0) < by_tenant

    def _begin(self, claim: PlaceClaim) -> None:
        bulkhead = claim.bulkhead
        assert bulkhead is not None, "made with one"
        claim.entered_s = self._clock()
        who = (claim.tenant, claim.key)
        self._num_by_tenant[claim.tenant] = self._num_by_tenant.get(claim.tenant, 0) + 1
        self._num_by_key[who] = self._num_by_key.get(who, 0) + 1
        self.num_running += 1
        self._idle.clear()
        if self._is_full(bulkhead, 1):
            bulkhead.held_time.filled(claim.entered_s)

    def _give_out(self) -> None:
        """Let begin whoever can, bulkhead by bulkhead."""
        if not self.num_waiting:
            return
        for _ in range(len(self._bulkheads)):
            bulkhead = self._bulkheads[0]
            self._bulkheads.rotate(-1)
            while bulkhead.queue.num_waiting and not self._is_full(bulkhead, 1):
                if bulkhead.is_short_of_memory:
                    self._look_later()
                    break
                claim = bulkhead.queue.take_next(bulkhead.num_places - bulkhead.queue.held, self._may_take)
                if claim is None:
                    break
                assert isinstance(claim, PlaceClaim), "no others are made here"
                assert claim.turn is not None, "it waits"
                self.num_waiting -= 1
                if claim.turn.done():
                    # Given up in this very moment.
                    bulkhead.queue.stop(claim)
                    continue
                self._begin(claim)
                claim.turn.set_result(None)

    def _look_later(self) -> None:
        if self._look_again is None:
            self._look_again = asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, self._on_look_again)

    def _on_look_again(self) -> None:
        self._look_again = None
        self._give_out()

    # Waiting

    async def _wait(self, claim: PlaceClaim, bulkhead: Bulkhead) -> PlaceClaim:
        loop = asyncio.get_running_loop()
        turn = claim.turn = loop.create_future()
        if not bulkhead.queue.num_waiting and not self._is_full(bulkhead, 1):
            bulkhead.held_time.filled(self._clock())
        bulkhead.queue.push(claim)
        self.num_waiting += 1
        # It cannot begin, or would have: this keeps places free for it, or has the engine looked at again.
        self._give_out()
        patience_s = _PATIENCE * bulkhead.longest_wait_s(self._max_queue_s, self._clock())
        timer = loop.call_later(patience_s, self._send_away, claim)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                # The place was given in the same moment as the wait was given up.
                self.leave(claim)
            elif bulkhead.queue.remove(claim):
                self.num_waiting -= 1
                # It may have kept places free for itself.
                self._give_out()
            raise
        finally:
            timer.cancel()
        return claim

    def _finds_no_room(self, claim: PlaceClaim, *, evicts: bool = False) -> bool:
        """Tell whether the queue is too long for a claim that must wait, though all who are greedier may give way."""
        bulkhead, now_s = claim.bulkhead, self._clock()
        assert bulkhead is not None, "made with one"
        if self._waits_for_itself(claim, bulkhead, now_s):
            return True
        if bulkhead.is_backlogged_for(claim.tenant, claim.size, self._max_queue_s, now_s):
            return not self._gives_way(bulkhead.queue.victim_within(claim), evicts)
        if bulkhead.is_backlogged(claim.size, self._max_queue_s, self.max_running, now_s):
            crowded = [bulkhead]
        elif self.num_waiting >= self._max_waiting:
            crowded = [bulkhead, *(each for each in self._bulkheads if each is not bulkhead)]
        else:
            return False
        return not any(self._gives_way(each.queue.victim_for(claim), evicts) for each in crowded)

    def _gives_way(self, victim: Claim | None, evicts: bool) -> bool:
        if victim is not None and evicts:
            assert isinstance(victim, PlaceClaim), "no others are made here"
            self._send_away(victim)
        return victim is not None

    def _waits_for_itself(self, claim: PlaceClaim, bulkhead: Bulkhead, now_s: float) -> bool:
        """Tell whether a key's own limit alone would keep it waiting for too long."""
        limit = claim.limits.max_concurrency
        if limit is None:
            return False
        num_waiting = bulkhead.queue.waiting_of(claim.tenant, claim.key)
        return num_waiting > 0 and (num_waiting + 1) * bulkhead.held_time.expect_s(now_s) / limit > self._max_queue_s

    def _send_away(self, claim: PlaceClaim) -> None:
        bulkhead, turn = claim.bulkhead, claim.turn
        assert bulkhead is not None, "made with one"
        assert turn is not None, "it waits"
        error = self._full(claim)
        if bulkhead.queue.remove(claim):
            self.num_waiting -= 1
            if not turn.done():
                turn.set_exception(error)
            self._give_out()

    def _full(self, claim: PlaceClaim) -> QueueFull:
        assert claim.bulkhead is not None, "made with one"
        wait_s = claim.bulkhead.would_wait_s(claim.size, self._clock())
        return QueueFull(self.num_running, self.num_waiting, max(1.0, wait_s))

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new, send the waiting away, wait for the running. False when time ran out first."""
        self.is_draining = True
        for bulkhead in self._bulkheads:
            for claim in list(bulkhead.queue.waiting()):
                assert isinstance(claim, PlaceClaim), "no others are made here"
                if claim.turn is not None and not claim.turn.done():
                    claim.turn.set_exception(Draining())
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


def _count_off(counts: dict[Name, int], name: Name) -> None:
    left = counts[name] - 1
    if left:
        counts[name] = left
    else:
        del counts[name]
