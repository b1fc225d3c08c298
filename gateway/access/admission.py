"""Admission control: a bounded number of places before a bounded queue."""

from __future__ import annotations

import asyncio
from collections import deque

from backends.protocol import Priority
from gateway.errors import Draining, QueueFull

# Weight of the newest request in the running mean of how long a place is held.
_NEWEST = 0.1


class Admission:
    """Places in the order of priority, then arrival. A full queue turns background work away before live requests.

    Attributes
    ----------
    num_running, num_waiting : places taken, requests waiting
    is_draining : no new request is taken
    """

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._waiting: dict[Priority, deque[asyncio.Future[None]]] = {each: deque() for each in Priority}
        self._mean_held_s = 1.0
        self._idle = asyncio.Event()
        self._idle.set()
        self.num_running = 0
        self.is_draining = False

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def check(self) -> None:
        """Turn a request away before its body is read, where it is plain that it will be.

        Raises
        ------
        QueueFull, Draining
        """
        if self.is_draining:
            raise Draining
        if self.num_running >= self._max_running and len(self._waiting[Priority.LIVE]) >= self._max_waiting:
            raise self._full()

    async def enter(self, priority: Priority) -> None:
        """Take a place, waiting for one if need be; ``leave`` gives it back.

        Raises
        ------
        QueueFull, Draining
        """
        if self.is_draining:
            raise Draining
        if self.num_running < self._max_running:
            self.num_running += 1
            self._idle.clear()
            return
        if self.num_waiting >= self._max_waiting and not self._make_room(priority):
            raise self._full()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[priority].append(turn)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                # The place was given in the same moment as the wait was given up.
                self.leave()
            else:
                self._forget(priority, turn)
            raise

    def _make_room(self, priority: Priority) -> bool:
        """Send the newest background request away for a live one."""
        background = self._waiting[Priority.BACKGROUND]
        if priority is not Priority.LIVE or not background:
            return False
        background.pop().set_exception(self._full())
        return True

    def _forget(self, priority: Priority, turn: asyncio.Future[None]) -> None:
        if turn in self._waiting[priority]:
            self._waiting[priority].remove(turn)

    def leave(self, held_s: float | None = None) -> None:
        """Give a place back to whoever is next; ``held_s`` is how long it was held."""
        if held_s is not None:
            self._mean_held_s += _NEWEST * (held_s - self._mean_held_s)
        self.num_running -= 1
        for queue in self._waiting.values():
            while queue:
                turn = queue.popleft()
                if not turn.done():
                    self.num_running += 1
                    turn.set_result(None)
                    return
        if self.num_running == 0:
            self._idle.set()

    def _full(self) -> QueueFull:
        rounds = (self.num_waiting + 1) / self._max_running
        return QueueFull(self.num_running, self.num_waiting, max(1.0, rounds * self._mean_held_s))

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new, send the waiting away, wait for the running. False when time ran out first."""
        self.is_draining = True
        for queue in self._waiting.values():
            while queue:
                turn = queue.popleft()
                if not turn.done():
                    turn.set_exception(Draining())
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
