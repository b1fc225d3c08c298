"""The whole gateway over echoing models, as the overhead bench runs it: a key is needed, every request is logged.

A program that the bench starts; it writes a fresh API key to ``--key-file`` before it listens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from backends.protocol import Event, Finished, FinishReason, GenerateRequest, Timings, TokenDelta, Usage
from backends.testing import EchoBackend
from gateway.access.authenticator import hash_key, make_key, shown_prefix
from gateway.app import create_app
from gateway.bench.echo_server import echo_settings
from gateway.config.settings import Settings
from gateway.edge.server import make_server
from gateway.ids import uuid7
from gateway.observe.telemetry import configure_logging
from gateway.store.records import ApiKey
from gateway.store.store import Store

_ANSWER = TokenDelta(text="Paris", num_tokens=1)
_WORD = TokenDelta(text=" word", num_tokens=1)
_ENDING = Finished(
    FinishReason.STOP, Usage(24, 1), Timings(ttft_s=0.001, total_s=0.001), compute_s=0.001, compute_measured=True
)


class InstantBackend(EchoBackend):
    """Answers at once and without a thought, so that a request's figure is the gateway's and not the fake's.

    The bench's streams of words come back word by word, with one turn of the event loop for each, as an engine's do.
    """

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        content = request.messages[-1].content if request.messages else ""
        if not content.startswith("word"):
            yield _ANSWER
            yield _ENDING
            return
        num_words = content.count("word")
        for _ in range(num_words):
            yield _WORD
            await asyncio.sleep(0)
        yield replace(_ENDING, usage=Usage(num_words, num_words))


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
    parser.add_argument("--meter-file", type=Path, help="where to write the CPU time of each part at the end")
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
    app = create_app(settings, backends={name: InstantBackend(name) for name in settings.models})
    if options.meter_file is None:
        make_server(app, settings).run()
        return 0
    from gateway.bench.cpu_meter import CpuMeter

    meter = CpuMeter()
    meter.install()
    # uvicorn raises the signal that ended it once more, and would end the program before the figures are written.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, lambda *_: meter.clear())
    make_server(app, settings).run()
    options.meter_file.write_text(json.dumps(meter.cpu_us()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
