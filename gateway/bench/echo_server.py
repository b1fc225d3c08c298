"""The whole gateway with echoing models: everything is real but the tokens. A program that benches start and kill.

``python -m gateway.bench.echo_server --port 8000 --database-url sqlite:////tmp/log.db``
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import uvicorn
from starlette.applications import Starlette

from backends.testing import EchoBackend, Script
from gateway.app import create_app
from gateway.settings import load_settings


def make_app(database_url: str, *, port: int, token_delay_s: float = 0.0, prompts: str = "digest") -> Starlette:
    """The gateway over four echoing tiers named as the built-in ladder's."""
    overrides = {
        "database.url": database_url,
        "server.port": port,
        "server.max_concurrency": 1024,
        "router.artifact": "none",
        "log.prompts": prompts,
        "log.level": "warning",
    }
    settings = load_settings(environ={}, overrides=overrides)
    script = Script(token_delay_s=token_delay_s)
    return create_app(settings, backends={name: EchoBackend(name, script) for name in settings.models})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--database-url", required=True)
    parser.add_argument("--token-delay-s", type=float, default=0.0)
    options = parser.parse_args(argv)
    app = make_app(options.database_url, port=options.port, token_delay_s=options.token_delay_s)
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning", access_log=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
