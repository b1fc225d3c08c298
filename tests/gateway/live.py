"""The gateway's own server, run inside the test's event loop on a free port."""

from __future__ import annotations

import asyncio
import socket
from types import TracebackType

from starlette.applications import Starlette

from gateway.config.settings import Settings
from gateway.edge.server import make_server


class LiveServer:
    """Use as ``async with``; gives the base URL. Leaving it drains and closes as SIGTERM does.

    ``send_buffer_bytes`` bounds what the kernel takes of an answer that nobody reads; without it that is the machine's
    own limit, which may be more than any answer of a test.
    """

    def __init__(self, app: Starlette, settings: Settings, *, send_buffer_bytes: int | None = None) -> None:
        # asyncio sets TCP_NODELAY only where a socket says it is TCP; without it a body comes 40 ms after its head.
        self._listener = socket.socket(proto=socket.IPPROTO_TCP)
        if send_buffer_bytes is not None:
            # Connections inherit it from the socket they were accepted on.
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        self._listener.bind(("127.0.0.1", 0))
        self.server = make_server(app, settings, handle_signals=False, freeze_heap=False)
        app.state.server = self.server
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> str:
        self._task = asyncio.create_task(self.server.serve(sockets=[self._listener]))
        while not self.server.started:
            if self._task.done():
                self._listener.close()
                raise AssertionError(f"the server did not start: {self._task.exception()!r}")
            await asyncio.sleep(0.005)
        host, port = self._listener.getsockname()
        return f"http://{host}:{port}"

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        assert self._task is not None
        self.server.should_exit = True
        await self._task
        self._listener.close()
