"""The HTTP server around the application: uvicorn, set up to drain and to stay out of the way."""

from __future__ import annotations

import contextlib
import gc
import socket
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import uvicorn

from gateway.edge.http_protocol import BoundedHttpProtocol

if TYPE_CHECKING:
    from gateway.config.settings import Settings

# Connections the kernel holds while the loop is busy.
_BACKLOG = 2048
# Young objects looked at together by the garbage collector; a request makes a few hundred, nearly all short-lived.
_GC_YOUNG = 10_000


class GatewayServer(uvicorn.Server):
    """On SIGTERM or SIGINT: no new connections, running requests finish, then the application closes.

    Parameters
    ----------
    config : uvicorn's own
    handle_signals : False leaves the signals to whoever owns the process
    freeze_heap : take what was loaded out of the garbage collector's sight once the server starts: walking the heap of
        several model libraries stops every stream for a tenth of a second. Not for processes that load and drop
        applications again and again, as tests do
    """

    def __init__(self, config: uvicorn.Config, *, handle_signals: bool = True, freeze_heap: bool = True) -> None:
        super().__init__(config)
        self._handle_signals = handle_signals
        self._freeze_heap = freeze_heap

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._freeze_heap:
            gc.collect()
            gc.freeze()
            gc.set_threshold(_GC_YOUNG)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        if not self._handle_signals:
            yield
            return
        with super().capture_signals():
            yield


def _protocol(stall_timeout_s: float) -> type[BoundedHttpProtocol]:
    """uvicorn makes connections from a class, so what they need to know is a class of its own."""
    return type("GatewayProtocol", (BoundedHttpProtocol,), {"stall_timeout_s": stall_timeout_s})


def make_server(
    app: Any, settings: Settings, *, handle_signals: bool = True, freeze_heap: bool = True
) -> GatewayServer:
    """A server for ``app``, not started."""
    server = settings.server
    config = uvicorn.Config(
        app,
        host=server.host,
        port=server.port,
        root_path=server.root_path,
        backlog=_BACKLOG,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        http=_protocol(server.slow_client_timeout_s),
        ws="none",
        timeout_keep_alive=round(server.keep_alive_timeout_s),
        timeout_graceful_shutdown=round(server.drain_timeout_s),
    )
    return GatewayServer(config, handle_signals=handle_signals, freeze_heap=freeze_heap)
