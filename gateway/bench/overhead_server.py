"""The whole gateway over echoing models, as the overhead bench runs it: a key is needed, every request is logged.

A program that the bench starts; it writes a fresh API key to ``--key-file`` before it listens.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from backends.protocol import GenerateRequest
from backends.testing import EchoBackend, Script
from gateway.app import create_app
from gateway.auth import hash_key, make_key, shown_prefix
from gateway.bench.echo_server import echo_settings
from gateway.ids import uuid7
from gateway.server import make_server
from gateway.settings import Settings
from gateway.store.records import ApiKey
from gateway.store.store import Store
from gateway.telemetry import configure_logging

# A short answer at once, so that a request's figure is the gateway's and not the fake's.
_ANSWER = Script(text="Paris", token_delay_s=None)
# One turn of the event loop per token, as an engine's tokens come.
_STREAM = Script(token_delay_s=0.0)


def script(request: GenerateRequest) -> Script:
    """Echo the bench's streams of words token by token; answer everything else at once."""
    is_stream = request.messages is not None and request.messages[-1].content.startswith("word")
    return _STREAM if is_stream else _ANSWER


async def create_key(settings: Settings) -> str:
    """Store a key; return it."""
    secret = make_key()
    async with Store(settings.database) as store:
        await store.insert_key(
            ApiKey(
                key_id=uuid7(),
                name="bench",
                key_hash=hash_key(secret),
                prefix=shown_prefix(secret),
                created_at=datetime.now(UTC),
            )
        )
    return secret


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--database-url", required=True)
    parser.add_argument("--router", default="none")
    parser.add_argument("--key-file", type=Path, required=True)
    options = parser.parse_args(argv)
    settings = echo_settings(
        options.database_url,
        port=options.port,
        router__artifact=options.router,
        auth__required="always",
        log__level="info",
    )
    options.key_file.write_text(asyncio.run(create_key(settings)))
    configure_logging(settings.log)
    app = create_app(settings, backends={name: EchoBackend(name, script) for name in settings.models})
    make_server(app, settings).run()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
