"""``/v1/embeddings`` as an ASGI application: read, admit, embed, answer."""

from __future__ import annotations

import array
import base64
import sys
import time
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import orjson

from backends.protocol import EmbedResult, FinishReason, Priority
from gateway.access.authenticator import Caller
from gateway.access.rate_limiter import Grant
from gateway.answering.recording import Recorder
from gateway.answering.service import Service
from gateway.api.embedding_decoder import EmbeddingRequest, read_embedding_request
from gateway.edge.body import Receive, parse_object, read_body
from gateway.edge.error_table import answer_to
from gateway.edge.head import read_head
from gateway.edge.responder import Responder, Send
from gateway.edge.watchdog import Lifeline
from gateway.endpoints.generation import Door, refuse
from gateway.errors import ClientGone, ClientStalled, UnsupportedOption
from gateway.ids import uuid7

_PATH = "/v1/embeddings"
_CHARS_PER_TOKEN = 4


class EmbeddingEndpoint:
    """Vectors need no routing decision; their row says who asked, for what, and how many tokens it took."""

    def __init__(self, service: Service, door: Door, recorder: Recorder) -> None:
        self._service = service
        self._door = door
        self._recorder = recorder

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        request_id, created_at = uuid7(), datetime.now(UTC)
        responder = Responder(send, scope, self._door.limits.slow_client_timeout_s)
        accepted_s = time.perf_counter()
        grant: Grant | None = None
        num_tokens, num_requests = 0, 0
        try:
            caller, request = await self._read(scope, receive)
            if caller.limits:
                grant = await self._door.rates.admit(request_id, caller, _wanted_tokens(request))
            model, result = await self._embed(request, receive)
            vectors = _shown(_fit(request, result), request.as_base64)
            num_tokens = result.usage.prompt_tokens
            record = self._recorder.embedding_row(
                request_id,
                request,
                caller,
                created_at,
                model_served=model,
                prompt_tokens=num_tokens,
                total_s=time.perf_counter() - accepted_s,
                finish_reason=FinishReason.STOP,
                status_code=200,
            )
            await self._service.settle_embedding(record)
            num_requests = 1
        except (ClientGone, ClientStalled):
            return
        except Exception as error:
            await refuse(error, request_id, _PATH, responder, receive, self._service.metrics.reject)
            self._service.metrics.http[_PATH, str(answer_to(error, request_id).status)] += 1
            return
        finally:
            if grant is not None:
                used = num_tokens if num_requests else 0
                self._door.rates.settle(grant, num_requests=num_requests, num_tokens=used, cost_nano_usd=0)
        body = {
            "object": "list",
            "data": [{"object": "embedding", "index": place, "embedding": each} for place, each in enumerate(vectors)],
            "model": model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
        headers = [(b"content-type", b"application/json"), (b"x-suffice-request-id", request_id.encode())]
        if grant is not None:
            headers += grant.headers
        with suppress(ClientStalled):
            await responder.whole(200, headers, orjson.dumps(body))
        self._service.metrics.http[_PATH, "200"] += 1

    async def _read(self, scope: MutableMapping[str, Any], receive: Receive) -> tuple[Caller, EmbeddingRequest]:
        head = read_head(scope["headers"])
        limits = self._door.limits
        self._door.authenticator.check_origin(head.origin)
        caller = await self._door.authenticator.check(head.authorization)
        self._door.admission.check()
        body = await read_body(receive, head.content_length, limits.max_body_bytes, limits.slow_client_timeout_s)
        return caller, read_embedding_request(parse_object(body, limits.max_json_depth), head.suffice)

    async def _embed(self, request: EmbeddingRequest, receive: Receive) -> tuple[str, EmbedResult]:
        model, backend = self._service.catalog.embedder(request.model, request.regions)
        limits, admission = self._door.limits, self._door.admission
        async with Lifeline(receive, timeout_s=limits.request_timeout_s, stall_timeout_s=limits.slow_client_timeout_s):
            await admission.enter(Priority.LIVE)
            entered_s = time.perf_counter()
            try:
                return model, await backend.embed(request.texts)
            finally:
                admission.leave(time.perf_counter() - entered_s)


def _wanted_tokens(request: EmbeddingRequest) -> int:
    return sum(len(text) // _CHARS_PER_TOKEN + 1 for text in request.texts)


def _fit(request: EmbeddingRequest, result: EmbedResult) -> Sequence[Sequence[float]]:
    """The vectors, refusing a width the model does not have: cutting an ordinary vector short breaks its geometry."""
    width = len(result.vectors[0])
    if request.dimensions not in (None, width):
        raise UnsupportedOption(
            f"'dimensions' is {request.dimensions}; the vectors of this model have {width}.", param="dimensions"
        )
    return result.vectors


def _shown(vectors: Sequence[Sequence[float]], as_base64: bool) -> list[Any]:
    if not as_base64:
        return [list(vector) for vector in vectors]
    return [base64.b64encode(_little_endian(vector)).decode() for vector in vectors]


def _little_endian(vector: Sequence[float]) -> bytes:
    numbers = array.array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
