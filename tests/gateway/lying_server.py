"""A server that answers first and records later: what the durability bench must be able to catch."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from gateway.config.store_section import StoreConfig
from gateway.store.records import RequestRecord
from gateway.store.store import Store
from tests.gateway.records import make_record


def make_app(database_url: str) -> Starlette:
    """Serve answers of which each is recorded when the next one is given: the last is always lost."""
    store = Store(StoreConfig(url=database_url))
    unrecorded: list[RequestRecord] = []

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with store:
            yield

    async def answer(request: Request) -> Response:
        record = make_record(prompt_tokens=1, completion_tokens=2)

        async def record_those_before() -> None:
            before, unrecorded[:] = unrecorded[:], [record]
            for each in before:
                await store.record(each)

        usage = '{"usage": {"prompt_tokens": 1, "completion_tokens": 2}}'
        body = f"data: {usage}\n\ndata: [DONE]\n\n" if (await request.json()).get("stream") else usage
        headers = {"x-suffice-request-id": record.request_id}
        return Response(body, headers=headers, background=BackgroundTask(record_those_before))

    async def healthz(request: Request) -> Response:
        return PlainTextResponse("ok")

    routes = [Route("/v1/chat/completions", answer, methods=["POST"]), Route("/healthz", healthz)]
    return Starlette(routes=routes, lifespan=lifespan)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--database-url", required=True)
    options = parser.parse_args()
    uvicorn.run(make_app(options.database_url), host="127.0.0.1", port=options.port, log_level="warning")
