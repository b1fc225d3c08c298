"""Ends a request's own task when its client is gone, stops reading, or its time is up.

One timer per request, and no task: the connection itself tells when it is closed (:class:`DisconnectSignal`).
Under a server that cannot, a task listens for it, from :data:`FIRST_LOOK_S` on. The mechanism is
``asyncio.timeout``'s: the task is cancelled, and on the way out the cancellation becomes a typed error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from gateway.edge.body import Receive
from gateway.errors import ClientGone, ClientStalled, DeadlineExceeded, GatewayError

FIRST_LOOK_S = 0.005
_EXTENSION = "suffice.disconnect"


class DisconnectSignal:
    """The end of a connection, told to the one who listens: its requests are answered one by one."""

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
        """That of a request's connection, where the server offers it."""
        found: DisconnectSignal | None = (scope.get("extensions") or {}).get(_EXTENSION)
        return found


class Watchdog:
    """Use as ``with``; raises :class:`ClientGone`, :class:`ClientStalled` or :class:`DeadlineExceeded`.

    Parameters
    ----------
    receive : the server's; it must have given the whole body
    timeout_s : the request's longest life
    stall_timeout_s : longest time between ``sending`` and ``sent``
    disconnect : of the connection; None where only ``receive`` tells of its end
    """

    def __init__(
        self, receive: Receive, *, timeout_s: float, stall_timeout_s: float, disconnect: DisconnectSignal | None = None
    ) -> None:
        self._receive = receive
        self._disconnect = disconnect
        self._timeout_s = timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._loop = asyncio.get_running_loop()
        self._started_s = self._loop.time()
        self._sending_since_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._task: asyncio.Task[object] | None = None
        self._error: GatewayError | None = None
        self._cancelling = 0

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        assert self._task is not None, "a request is answered in a task"
        self._cancelling = self._task.cancelling()
        if self._disconnect is None:
            self._timer = self._loop.call_later(FIRST_LOOK_S, self._look)
            return self
        if self._disconnect.is_over:
            raise _gone()
        self._timer = self._loop.call_later(min(self._timeout_s, self._stall_timeout_s / 4), self._look)
        self._disconnect.listener = self._on_gone
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.let_go()
        if self._error is None or self._task is None:
            return
        if self._task.uncancel() <= self._cancelling and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise self._error from None

    def let_go(self) -> None:
        """From here on the request ends by itself: its row is being committed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._disconnect is not None and self._disconnect.listener == self._on_gone:
            self._disconnect.listener = None
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None

    def sending(self) -> None:
        """The next bytes are being handed to the client."""
        self._sending_since_s = self._loop.time()

    def sent(self) -> None:
        """It took them."""
        self._sending_since_s = None

    def _look(self) -> None:
        now_s = self._loop.time()
        if self._watcher is None and self._disconnect is None:
            self._watcher = self._loop.create_task(self._watch())
        if now_s - self._started_s >= self._timeout_s:
            self._interrupt(DeadlineExceeded(self._timeout_s))
        elif self._sending_since_s is not None and now_s - self._sending_since_s >= self._stall_timeout_s:
            self._interrupt(ClientStalled(self._stall_timeout_s))
        else:
            left_s = self._started_s + self._timeout_s - now_s
            self._timer = self._loop.call_later(max(0.001, min(left_s, self._stall_timeout_s / 4)), self._look)

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
