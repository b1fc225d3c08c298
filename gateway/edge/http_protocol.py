"""HTTP/1.1 as uvicorn speaks it, with bounds on the head of a request.

uvicorn reads request lines and headers of any size for any time, before a key could be checked; a few connections could
then hold all memory, and idle ones all descriptors. The body's bounds are in the module ``gate``. What this does not
protect against: somebody who opens connections faster than they can be closed, which is for a proxy or the firewall.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.edge.error_format import request_format
from gateway.edge.error_table import answer_to, row_of
from gateway.edge.response_cycle import OneWriteCycle, UnchunkedCycle
from gateway.edge.watchdog import DisconnectSignal
from gateway.errors import GatewayError, HeadTooLarge, HeadTooSlow, NotHttp, TooManyConnections
from gateway.ids import uuid7
from gateway.observe.refusal_log import NOT_HTTP, Refusal

# Connections beyond the bound that may still ask how the server is.
NUM_SPARE = 32
_HEALTH_PATHS = frozenset({b"/healthz", b"/readyz", b"/metrics"})


class OpenConnections:
    """Bounds the connections of one server.

    At the bound a new one takes the place of the longest idle: of those that never sent a whole head first, then of
    those kept alive. Where every other is busy, a few more are let in to ask for the server's health and nothing else.

    Parameters
    ----------
    max_connections : the bound
    """

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self.num_open = 0
        self.num_evicted = 0
        # In the order in which they fell idle.
        self._unused: dict[BoundedHttpProtocol, None] = {}
        self._kept_alive: dict[BoundedHttpProtocol, None] = {}

    def add(self, connection: BoundedHttpProtocol) -> bool:
        """Count a new connection; False if it is one too many and only to ask for the server's health."""
        self.num_open += 1
        is_spare = self.num_open > self.max_connections and not self._evict()
        self._unused[connection] = None
        return not is_spare

    def remove(self, connection: BoundedHttpProtocol) -> None:
        """Count a connection no longer."""
        self.num_open -= 1
        self.busy(connection)

    def busy(self, connection: BoundedHttpProtocol) -> None:
        """Note that a whole head came."""
        self._unused.pop(connection, None)
        self._kept_alive.pop(connection, None)

    def idle(self, connection: BoundedHttpProtocol) -> None:
        """Note that its request was answered."""
        self._kept_alive[connection] = None

    def _evict(self) -> bool:
        for each in (self._unused, self._kept_alive):
            if each:
                connection = next(iter(each))
                del each[connection]
                self.num_evicted += 1
                connection.transport.abort()
                return True
        return False


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. A head must be whole within ``max_head_bytes`` and ``head_timeout_s``.

    Bytes that the client does not take for ``stall_timeout_s`` end the connection, in the kernel (Linux only): a closed
    one would otherwise keep them for as long as its peer keeps silent. One that takes them by drops is cut off
    ``request_timeout_s`` after the head of its request, or after a stall if that is later. Whoever still sends a body
    that was answered already has ``head_timeout_s`` to come to its end.
    """

    max_head_bytes = 65_536
    head_timeout_s = 15.0
    stall_timeout_s = 30.0
    on_refusal: Callable[[Refusal], None] | None = None
    request_timeout_s = 600.0
    open_connections = OpenConnections(4096)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._disconnect = DisconnectSignal()
        self._is_head_whole = False
        self._num_head_bytes = 0
        self._num_read_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._end_timer: asyncio.TimerHandle | None = None
        self._begun_s = 0.0
        self._is_spare = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn narrows it
        super().connection_made(transport)
        self._is_spare = not self.open_connections.add(self)
        if self.open_connections.num_open > self.open_connections.max_connections + NUM_SPARE and self._is_spare:
            transport.abort()
            return
        self._limit_stall(transport.get_extra_info("socket"))
        self._start_timer()

    def _limit_stall(self, connection: socket.socket | None) -> None:
        option = getattr(socket, "TCP_USER_TIMEOUT", None)
        if option is not None and connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, option, round(self.stall_timeout_s * 1000))

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._end_timer is not None:
            self._end_timer.cancel()
        self.open_connections.remove(self)
        super().connection_lost(exc)
        self._disconnect.tell()

    def data_received(self, data: bytes) -> None:
        self._num_read_bytes = len(data)
        if not self._is_head_whole:
            self._num_head_bytes += len(data)
        super().data_received(data)
        if self._is_head_whole:
            return
        # What came did not finish a head: it is the first part of one, or there will be no more of it.
        if self._num_head_bytes > self.max_head_bytes:
            self._refuse(HeadTooLarge(self.max_head_bytes))
        elif self._num_head_bytes and self._head_timer is None and not self.transport.is_closing():
            self._start_timer()

    def on_headers_complete(self) -> None:
        # What was read bounds the head, which seldom has to be measured: a long one may come whole in one read.
        if self._num_head_bytes + self._num_read_bytes > self.max_head_bytes and self._size() > self.max_head_bytes:
            self._refuse(HeadTooLarge(self.max_head_bytes))
            raise ValueError("the head is too large")
        self._is_head_whole = True
        self._num_head_bytes = 0
        self._stop_timer()
        scope: Any = self.scope
        self._disconnect.offer(scope)
        self._begun_s = self.loop.time()
        self.open_connections.busy(self)
        if self._is_spare and self.url.partition(b"?")[0] not in _HEALTH_PATHS:
            self.app = self._refuse_request
        super().on_headers_complete()
        # uvicorn names the class of its cycles itself; this one has not begun to send.
        self.cycle.__class__ = UnchunkedCycle if scope["http_version"] == "1.0" else OneWriteCycle

    def _size(self) -> int:
        """Return the bytes of a head: request line, headers, and the blank line behind them."""
        line = len(self.parser.get_method()) + len(self.url) + len("  HTTP/1.1\r\n")
        return line + sum(len(name) + len(value) + len(": \r\n") for name, value in self.headers) + len("\r\n")

    def on_message_complete(self) -> None:
        # The next byte belongs to the head of another request.
        self._is_head_whole = False
        super().on_message_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            # The answer was there before the end of the body: the connection is idle only now.
            self._stop_timer()
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        is_last = not self.pipeline
        super().on_response_complete()
        if self.transport.get_write_buffer_size() and self._end_timer is None:
            left_s = self._begun_s + self.request_timeout_s - self.loop.time()
            self._end_timer = self.loop.call_later(max(left_s, self.stall_timeout_s), self._on_end_timeout)
        if self.transport.is_closing():
            return
        if self._is_head_whole:
            self._start_timer()
        elif is_last:
            self.open_connections.idle(self)

    def send_400_response(self, msg: str) -> None:
        """uvicorn's own refusal of what is not HTTP, in the shape of all others."""
        self._refuse(NotHttp())

    def _start_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._on_head_timeout)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_end_timeout(self) -> None:
        """Cut off a client that takes its answer by drops."""
        self._end_timer = None
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def _on_head_timeout(self) -> None:
        if self._num_head_bytes:
            self._refuse(HeadTooSlow(self.head_timeout_s))
        else:
            # Opened and never used: there is no request to answer.
            self.transport.close()

    def _refuse(self, error: GatewayError) -> None:
        self._stop_timer()
        if self.transport.is_closing():
            return
        self._note(error)
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if not is_answering:
            answer = answer_to(error, uuid7())
            body = answer.json()
            headers = [*answer.headers(), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
            lines = b"".join(b"%s: %s\r\n" % header for header in headers)
            status = HTTPStatus(answer.status)
            line = b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode())
            self.transport.write(line + lines + b"\r\n" + body)
        self.transport.close()

    async def _refuse_request(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request for which there is no connection left, in the application's place."""
        error = TooManyConnections()
        self._note(error)
        answer = answer_to(error, uuid7(), request_format(scope))
        body = answer.json()
        headers = [*answer.headers(), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _note(self, error: GatewayError) -> None:
        if self.on_refusal is not None:
            row = row_of(error)
            self.on_refusal(Refusal("", "", NOT_HTTP, row.status, row.code))
