"""Runs one process that loads, listens, and ends in order on a signal: ``suffice serve`` and ``suffice up``.

The application's lifespan is entered here rather than by uvicorn, so that what cannot start is an error with a message
and an exit status, and so that models and log are closed after the last answer and before the process ends.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from gateway.access.authenticator import OpenTo, open_to
from gateway.app import create_app
from gateway.commands.command_hint import hint
from gateway.commands.server_url import local_url
from gateway.commands.start_display import LoadingDisplay, print_welcome
from gateway.config.settings import Settings, isolate_children, load_settings
from gateway.edge.server import GatewayServer, announce_leaving, make_server
from gateway.failure_report import CommandError
from gateway.models.loader import Progress
from gateway.observe.telemetry import configure_logging

Started = Callable[[Starlette, str], None]
"""Told the application and its address once it answers."""


def serve(config: Path | None, *, host: str | None, port: int | None) -> None:
    """Serve until a signal comes; prints nothing but the log."""
    settings = load_settings(config, overrides={"server.host": host, "server.port": port})
    configure_logging(settings.log)
    _serve(settings, None, _log_address)


def up(config: Path | None, *, host: str | None, port: int | None) -> None:
    """Serve, with a display of what loads, and of how to call it."""
    settings = load_settings(config, overrides={"server.host": host, "server.port": port})
    if settings.sources["log.format"] == "default":
        settings = replace(settings, log=replace(settings.log, format="console"))
    configure_logging(settings.log)
    display = LoadingDisplay(settings)

    def started(app: Starlette, address: str) -> None:
        display.close()
        print_welcome(settings, address, opened=app.state.open_to, num_keys=app.state.num_keys)

    with display:
        _serve(settings, display, started)


def _serve(settings: Settings, progress: Progress | None, started: Started) -> None:
    isolate_children()
    # The port is taken before minutes go into loading; nobody is let in until there is something to say.
    listener = _bind(settings.server.host, settings.server.port)
    with listener:
        app = create_app(settings, progress=progress)
        config = make_server(app, settings).config
        config.lifespan = "off"
        address = local_url(settings.server.host, listener.getsockname()[1], settings.server.root_path)
        server = _Server(config, app, settings.server.lame_duck_s, lambda: started(app, address))
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(_run(app, server, listener, settings))


class _Server(GatewayServer):
    """Says when it has begun to answer, and leaves the signals to this module."""

    def __init__(
        self, config: uvicorn.Config, app: Starlette, lame_duck_s: float, on_started: Callable[[], None]
    ) -> None:
        super().__init__(
            config, handle_signals=False, lame_duck_s=lame_duck_s, on_lame_duck=lambda: announce_leaving(app)
        )
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_started()


async def _run(app: Starlette, server: GatewayServer, listener: socket.socket, settings: Settings) -> None:
    this = asyncio.current_task()
    assert this is not None
    loop = asyncio.get_running_loop()
    is_serving, received = False, [signal.SIGTERM]

    def end(number: signal.Signals) -> None:
        received.append(number)
        if not is_serving:
            this.cancel()
        else:
            # SIGTERM lets balancers know first, any other signal drains, a second Ctrl-C does not wait.
            server.handle_exit(number, None)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, number)
    try:
        async with app.router.lifespan_context(app):
            await _note_keys(app, settings)
            is_serving = True
            await server.serve(sockets=[listener])
    except asyncio.CancelledError:
        # 128 + the signal's number, as shells and supervisors read it.
        raise CommandError("stopped while loading", status=128 + received[-1]) from None


_OPENNESS: Mapping[OpenTo, str] = {
    "nobody": "closed: every request needs an API key",
    "local": "open: loopback only, without a proxy and by a name of loopback; all else needs an API key",
    "everybody": "open: to whoever can connect (auth.required = never); the administration from elsewhere needs a key",
}


async def _note_keys(app: Starlette, settings: Settings) -> None:
    opened = open_to(settings.auth, settings.server)
    app.state.open_to = opened
    app.state.num_keys = await app.state.parts.store.count_active_keys()
    log = logging.getLogger("suffice")
    log.log(logging.WARNING if opened == "everybody" else logging.INFO, "%s", _OPENNESS[opened])
    if opened == "nobody" and not app.state.num_keys:
        made_by = hint("keys", "create", settings=settings)
        log.warning("no API key exists, so every request is refused: %s", made_by)


def _bind(host: str, port: int) -> socket.socket:
    """Take the address without listening yet.

    Raises
    ------
    CommandError
        It is taken, not this machine's, or not an address.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(found[0], found[1])
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(found[4])
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise CommandError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; choose others with --host and --port."
        ) from error
    listener.set_inheritable(True)
    return listener


def _log_address(_: Starlette, address: str) -> None:
    logging.getLogger("suffice").info("answering at %s", address)
