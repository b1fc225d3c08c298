"""HTTP/1.1 as uvicorn speaks it, with bounds on the head of a request.

uvicorn reads request lines and headers of any size for any time, before a key could be checked; a few connections could
then hold all memory, and idle ones all descriptors. The body's bounds are in the module ``body``. What this does not
protect against: a flood of well-formed connections, which is for a proxy or the firewall to slow down.
"""

from __future__ import annotations

import asyncio
import socket
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.edge.error_table import answer_to
from gateway.edge.watchdog import DisconnectSignal
from gateway.errors import GatewayError, HeadTooLarge, HeadTooSlow, NotHttp
from gateway.ids import uuid7


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. A head must be whole within ``max_head_bytes`` and ``head_timeout_s``.

    Bytes that the client does not take for ``stall_timeout_s`` end the connection, in the kernel (Linux only): a closed
    one would otherwise keep them for as long as its peer keeps silent.
    """

    max_head_bytes = 65_536
    head_timeout_s = 15.0
    stall_timeout_s = 30.0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._disconnect = DisconnectSignal()
        self._is_head_whole = False
        self._num_head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn narrows it
        super().connection_made(transport)
        self._limit_stall(transport.get_extra_info("socket"))
        self._start_timer()

    def _limit_stall(self, connection: socket.socket | None) -> None:
        option = getattr(socket, "TCP_USER_TIMEOUT", None)
        if option is not None and connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, option, round(self.stall_timeout_s * 1000))

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        self._disconnect.tell()

    def data_received(self, data: bytes) -> None:
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
        self._is_head_whole = True
        self._num_head_bytes = 0
        self._stop_timer()
        scope: Any = self.scope
        self._disconnect.offer(scope)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        # The next byte belongs to the head of another request.
        self._is_head_whole = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's own refusal of what is not HTTP, in the shape of all others."""
        self._refuse(NotHttp())

    def _start_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._on_head_timeout)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

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
