"""The whole gateway with echoing models: everything is real but the tokens. A program that benches start and kill.

``python -m gateway.bench.echo_server --port 8000 --database-url sqlite:////tmp/log.db``; with ``--models builtin`` the
tokens are real as well.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from starlette.applications import Starlette

from backends.testing import EchoBackend, Script
from gateway.app import create_app
from gateway.config.settings import Settings, load_settings
from gateway.edge.server import make_server
from gateway.observe.telemetry import configure_logging


def echo_settings(database_url: str, *, port: int = 8000, **overrides: object) -> Settings:
    """The built-in ladder's settings without its router. ``overrides`` are section__key, as in the environment."""
    chosen: dict[str, object] = {
        "database.url": database_url,
        "server.port": port,
        "server.max_concurrency": 1024,
        "server.lame_duck_s": 0,
        "router.artifact": "none",
        "log.level": "error",
    }
    chosen |= {name.replace("__", "."): value for name, value in overrides.items()}
    return load_settings(environ={}, overrides=chosen)


def echo_app(settings: Settings, *, token_delay_s: float = 0.0) -> Starlette:
    """Return the gateway over one echoing backend for each served model."""
    script = Script(token_delay_s=token_delay_s)
    return create_app(settings, backends={name: EchoBackend(name, script) for name in settings.models})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--database-url", required=True)
    parser.add_argument("--token-delay-s", type=float, default=0.0)
    parser.add_argument("--models", choices=("echo", "builtin"), default="echo")
    options = parser.parse_args(argv)
    settings = echo_settings(options.database_url, port=options.port)
    configure_logging(settings.log)
    is_echo = options.models == "echo"
    app = echo_app(settings, token_delay_s=options.token_delay_s) if is_echo else create_app(settings)
    make_server(app, settings).run()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
