"""The floor under the gateway: Starlette alone, answering the same bytes in process. A program that benches start."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Sequence

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

_ANSWER = {
    "id": "chatcmpl-01a1fd64-5c0e-7a4d-be35-96a719b85564",
    "object": "chat.completion",
    "created": 1795252575,
    "model": "large",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
_CHUNK = {
    "id": "chatcmpl-01a1fd64-5c0e-7a4d-be35-96a719b85564",
    "object": "chat.completion.chunk",
    "created": 1795252575,
    "model": "large",
    "choices": [{"index": 0, "delta": {"content": " word"}, "logprobs": None, "finish_reason": None}],
}


async def chat(request: Request) -> Response:
    """Parse the body, answer whole or one chunk per word of the last message."""
    body = orjson.loads(await request.body())
    if not body.get("stream"):
        return Response(orjson.dumps(_ANSWER), media_type="application/json")
    return StreamingResponse(_chunks(len(body["messages"][-1]["content"].split())), media_type="text/event-stream")


async def _chunks(num_chunks: int) -> AsyncIterator[bytes]:
    for _ in range(num_chunks):
        yield b"data: " + orjson.dumps(_CHUNK) + b"\n\n"
        # One turn of the loop per token, as the gateway's echoing model takes.
        await asyncio.sleep(0)
    yield b"data: [DONE]\n\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args(argv)
    app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])
    uvicorn.run(app, port=options.port, log_config=None, access_log=False, server_header=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
