"""The HTTP server around the application: uvicorn, set up to drain and to stay out of the way."""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
import socket
import time
from collections.abc import Callable, Generator
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from gateway.edge.file_limit import raise_file_limit
from gateway.edge.http_protocol import BoundedHttpProtocol, OpenConnections
from gateway.observe.refusal_log import Refusal

if TYPE_CHECKING:
    from gateway.config.sections import ServerConfig
    from gateway.config.settings import Settings

_log = logging.getLogger("suffice.server")

# Connections the kernel holds while the loop is busy.
_BACKLOG = 2048
# Young objects looked at together by the garbage collector; a request makes a few hundred, nearly all short-lived.
_GC_YOUNG = 10_000


class GatewayServer(uvicorn.Server):
    """On SIGTERM or SIGINT: no new connections, running requests finish, then the application closes.

    SIGTERM first makes it a lame duck: it serves on while ``/readyz`` sends balancers away, so that none of them finds
    the door shut. SIGINT, which a person at a terminal sends, does not wait; nor does a second signal.

    Parameters
    ----------
    config : uvicorn's own
    handle_signals : False leaves the signals to whoever owns the process
    freeze_heap : take what was loaded out of the garbage collector's sight once the server starts: walking the heap of
        several model libraries stops every stream for a tenth of a second. Not for processes that load and drop
        applications again and again, as tests do
    lame_duck_s : seconds from SIGTERM to the end of new connections
    on_lame_duck : told of their beginning
    """

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        handle_signals: bool = True,
        freeze_heap: bool = True,
        lame_duck_s: float = 0.0,
        on_lame_duck: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(config)
        self._handle_signals = handle_signals
        self._freeze_heap = freeze_heap
        self._lame_duck_s = lame_duck_s
        self._on_lame_duck = on_lame_duck
        self._leaves_at_s: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        protocol = self.config.http
        if isinstance(protocol, type) and issubclass(protocol, BoundedHttpProtocol):
            connections = protocol.open_connections
            connections.max_connections = raise_file_limit(connections.max_connections)
        await super().startup(sockets)
        if self.started and self._freeze_heap:
            gc.collect()
            gc.freeze()
            gc.set_threshold(_GC_YOUNG)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to leave; called at once when a signal comes."""
        if sig != signal.SIGTERM or not self._lame_duck_s or self._leaves_at_s is not None or self.should_exit:
            super().handle_exit(sig, frame)
            return
        self._captured_signals.append(sig)
        self._leaves_at_s = time.monotonic() + self._lame_duck_s
        self._on_lame_duck()
        _log.info("leaving: /readyz says so for %g s before connections are refused", self._lame_duck_s)

    async def on_tick(self, counter: int) -> bool:
        if self._leaves_at_s is not None and time.monotonic() >= self._leaves_at_s:
            self.should_exit = True
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        if not self._handle_signals:
            yield
            return
        with super().capture_signals():
            yield


def _protocol(app: Any, server: ServerConfig) -> type[BoundedHttpProtocol]:
    """uvicorn makes connections from a class, so what they need to know is a class of its own."""

    def note(refusal: Refusal) -> None:
        # There from the application's start on; others than the gateway's own have none.
        refusals = getattr(app, "refusals", None)
        if refusals is not None:
            refusals.note(refusal)

    members = {
        "stall_timeout_s": server.slow_client_timeout_s,
        "request_timeout_s": server.request_timeout_s,
        "open_connections": OpenConnections(server.max_connections),
        "on_refusal": staticmethod(note),
    }
    return type("GatewayProtocol", (BoundedHttpProtocol,), members)


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
        http=_protocol(app, server),
        ws="none",
        # uvicorn would believe any peer on loopback, and what FORWARDED_ALLOW_IPS names.
        proxy_headers=bool(server.trusted_proxies),
        forwarded_allow_ips=list(server.trusted_proxies),
        timeout_keep_alive=round(server.keep_alive_timeout_s),
        timeout_graceful_shutdown=round(server.drain_timeout_s),
    )
    return GatewayServer(
        config,
        handle_signals=handle_signals,
        freeze_heap=freeze_heap,
        lame_duck_s=server.lame_duck_s,
        on_lame_duck=lambda: announce_leaving(app),
    )


def announce_leaving(app: Any) -> None:
    """Let ``/readyz`` say that the server is leaving, where the application has one."""
    parts = getattr(app.state, "parts", None)
    if parts is not None:
        parts.admission.is_leaving = True
