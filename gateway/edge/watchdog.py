"""Ends a request's own task when its client is gone, sends or takes nothing, or its time is up.

One timer per request, and no task: the connection itself tells when it is closed (:class:`DisconnectSignal`). Under a
server that cannot, a task listens for it, from :data:`FIRST_LOOK_S` on. The mechanism is ``asyncio.timeout``'s: the
task is cancelled, and on the way out of the phase it was in the cancellation becomes a typed error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from types import TracebackType
from typing import Any, Self

from gateway.edge.body_budget import BodyShare
from gateway.errors import BodyTooSlow, ClientGone, ClientStalled, DeadlineExceeded, GatewayError

FIRST_LOOK_S = 0.005
_EXTENSION = "suffice.disconnect"

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class DisconnectSignal:
    """Tells the request that is being answered on a connection of that connection's end."""

    __slots__ = ("is_over", "listener")

    def __init__(self) -> None:
        self.is_over = False
        self.listener: Callable[[], None] | None = None

    def tell(self) -> None:
        """The connection is closed."""
        self.is_over = True
        if self.listener is not None:
            self.listener()

    def offer(self, scope: dict[str, Any]) -> None:
        """Put it into a request's scope."""
        scope.setdefault("extensions", {})[_EXTENSION] = self

    @staticmethod
    def of(scope: Mapping[str, Any]) -> DisconnectSignal | None:
        """Return that of a request's connection, where the server offers it."""
        found: DisconnectSignal | None = (scope.get("extensions") or {}).get(_EXTENSION)
        return found


class Watchdog:
    """Watches one request through its phases; each is a ``with`` block, nothing is watched between them.

    ``with watchdog.reading()`` bounds the wait for each piece of the body and for the whole of it
    (:class:`BodyTooSlow`); ``answering()`` the request's life (:class:`DeadlineExceeded`), the client's presence
    (:class:`ClientGone`) and its taking what is sent (:class:`ClientStalled`); ``closing()`` the sending of the last
    bytes (:class:`ClientStalled`). ``close`` ends it, and gives back what the request's body counted for.

    Parameters
    ----------
    receive : the server's
    timeout_s : the request's longest life, from the making of this object
    body_timeout_s : likewise until its body must be whole; None leaves it to ``timeout_s``
    stall_timeout_s : longest wait for bytes of the client, or for it to take some
    disconnect : of the connection; None where only ``receive`` tells of its end

    Attributes
    ----------
    body : what its body counts for, see :class:`gateway.edge.body_budget.BodyBudget`
    loop : the event loop it runs in; asking for the running one is a system call (``getpid``)
    """

    __slots__ = (
        "_begun_s",
        "_body_timeout_s",
        "_cancelling",
        "_disconnect",
        "_error",
        "_is_listening",
        "_receive",
        "_stall_error",
        "_stall_timeout_s",
        "_started_s",
        "_task",
        "_timeout_s",
        "_timer",
        "_waiting_since_s",
        "_watcher",
        "body",
        "loop",
    )

    def __init__(
        self,
        receive: Receive,
        *,
        timeout_s: float,
        stall_timeout_s: float,
        body_timeout_s: float | None = None,
        disconnect: DisconnectSignal | None = None,
    ) -> None:
        self._receive = receive
        self._disconnect = disconnect
        self._timeout_s = timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._body_timeout_s = timeout_s if body_timeout_s is None else min(body_timeout_s, timeout_s)
        self.loop = asyncio.get_running_loop()
        self._begun_s = self.loop.time()
        self.body: BodyShare | None = None
        self._task: asyncio.Task[object] | None = None
        self._started_s: float | None = None
        self._waiting_since_s: float | None = None
        self._stall_error: type[BodyTooSlow | ClientStalled] = BodyTooSlow
        self._error: GatewayError | None = None
        self._cancelling = 0
        self._is_listening = False
        self._watcher: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def reading(self) -> Self:
        """Begin to wait for the body."""
        self._waiting_since_s = self.loop.time()
        return self

    def answering(self) -> Self:
        """Begin to answer; the whole body must have been received."""
        self._started_s = self.loop.time()
        self._stall_error = ClientStalled
        return self

    def closing(self) -> Self:
        """Begin to send the last bytes."""
        self._stall_error = ClientStalled
        self._waiting_since_s = self.loop.time()
        return self

    def __enter__(self) -> Self:
        task = self._task = self._task or asyncio.current_task(self.loop)
        assert task is not None, "a request is answered in a task"
        self._cancelling = task.cancelling()
        if self._timer is None:
            longest_s = min(self._timeout_s, self._body_timeout_s, self._stall_timeout_s / 4)
            self._timer = self.loop.call_later(longest_s, self._look)
        if self._started_s is not None and self._waiting_since_s is None:
            self._listen(self._started_s)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.let_go()
        if self._error is None or self._task is None:
            return
        problem, self._error = self._error, None
        if self._task.uncancel() <= self._cancelling and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise problem from None

    def let_go(self) -> None:
        """Watch nothing until the next phase: what happens now, as the commit of a row, must not be interrupted."""
        self._started_s = self._waiting_since_s = None
        if self._is_listening:
            assert self._disconnect is not None, "it is listened to"
            self._is_listening = False
            if self._disconnect.listener == self._on_gone:
                self._disconnect.listener = None
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None

    def close(self) -> None:
        """End the timer; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.body is not None:
            self.body.close()

    def waiting(self) -> None:
        """Mark the beginning of a wait for the client: for its next bytes, or for it to take ours."""
        self._waiting_since_s = self.loop.time()

    def served(self) -> None:
        """Mark the end of such a wait."""
        self._waiting_since_s = None

    def _listen(self, now_s: float) -> None:
        """Listen for the end of the connection."""
        if self._disconnect is None:
            self.loop.call_later(FIRST_LOOK_S, self._start_watcher, now_s)
        elif self._disconnect.is_over:
            self.let_go()
            raise _gone()
        else:
            self._disconnect.listener = self._on_gone
            self._is_listening = True

    def _start_watcher(self, started_s: float) -> None:
        if self._started_s == started_s and self._watcher is None:
            self._watcher = self.loop.create_task(self._watch())

    def _look(self) -> None:
        now_s = self.loop.time()
        wait_s = self._stall_timeout_s / 4
        if self._started_s is not None:
            left_s = self._begun_s + self._timeout_s - now_s
            if left_s <= 0:
                self._interrupt(DeadlineExceeded(self._timeout_s))
            wait_s = max(0.001, min(left_s, wait_s))
        elif self._waiting_since_s is not None and self._stall_error is BodyTooSlow:
            left_s = self._begun_s + self._body_timeout_s - now_s
            if left_s <= 0:
                self._interrupt(BodyTooSlow(self._body_timeout_s, is_whole=True))
            wait_s = max(0.001, min(left_s, wait_s))
        if self._waiting_since_s is not None and now_s - self._waiting_since_s >= self._stall_timeout_s:
            self._interrupt(self._stall_error(self._stall_timeout_s))
        self._timer = self.loop.call_later(wait_s, self._look)

    async def _watch(self) -> None:
        # What a client sends after its request is not looked at; only the end of the connection is.
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._watcher = None
        self._on_gone()

    def _on_gone(self) -> None:
        self._interrupt(_gone())

    def _interrupt(self, error: GatewayError) -> None:
        if self._error is None and self._task is not None:
            self._error = error
            self._task.cancel()


def _gone() -> ClientGone:
    return ClientGone("The client closed the connection before the answer was complete.")
