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

from backends.errors import BackendError
from backends.protocol import EmbedResult, FinishReason, Priority
from gateway.access.authenticator import Caller
from gateway.access.rate_limiter import Reservation
from gateway.answering.recorder import AnswerRecorder
from gateway.api.embedding_decoder import EmbeddingRequest, decode_embedding_request
from gateway.edge.error_table import answer_to, is_callers_fault
from gateway.edge.gate import OpenedRequest, RequestGate
from gateway.edge.json_body import parse_object
from gateway.edge.responder import Responder, Send
from gateway.edge.watchdog import Receive, Watchdog
from gateway.endpoints.generation import refuse
from gateway.errors import ClientGone, ClientStalled, UnsupportedOption
from gateway.ids import uuid7
from gateway.models.catalog import Catalog
from gateway.observe.metrics import Metrics
from gateway.store.committer import GroupCommitter

_PATH = "/v1/embeddings"
_CHARS_PER_TOKEN = 4


class EmbeddingEndpoint:
    """Answers with vectors. They need no routing; their row says who asked, for what, and how many tokens it took."""

    def __init__(
        self, gate: RequestGate, catalog: Catalog, recorder: AnswerRecorder, metrics: Metrics, log: GroupCommitter
    ) -> None:
        self._log = log
        self._gate = gate
        self._catalog = catalog
        self._recorder = recorder
        self._metrics = metrics

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        watchdog = self._gate.watchdog(scope, receive)
        try:
            await self._respond(scope, receive, Responder(send, watchdog), watchdog)
        finally:
            watchdog.close()

    async def _respond(
        self, scope: MutableMapping[str, Any], receive: Receive, responder: Responder, watchdog: Watchdog
    ) -> None:
        request_id, created_at = uuid7(), datetime.now(UTC)
        reservation: Reservation | None = None
        opened: OpenedRequest | None = None
        num_tokens, num_requests, has_row = 0, 0, False
        try:
            opened = await self._gate.open(scope, receive, watchdog)
            body = parse_object(opened.body, self._gate.limits.max_json_depth)
            request, caller = decode_embedding_request(body, opened.head.suffice), opened.caller
            if caller.is_limited:
                reservation = await self._gate.rate_limiter.admit(request_id, caller, _wanted_tokens(request))
            model, result = await self._embed(request, caller, watchdog)
            vectors = _shown(_fit(request, result), request.as_base64)
            num_tokens = result.usage.prompt_tokens
            await self._recorder.settle_embedding(
                request_id,
                request,
                caller,
                created_at,
                model_served=model,
                prompt_tokens=num_tokens,
                total_s=time.perf_counter() - opened.accepted_s,
                finish_reason=FinishReason.STOP,
                status_code=200,
            )
            num_requests, has_row = 1, True
        except (ClientGone, ClientStalled):
            num_requests = 1
            return
        except Exception as problem:
            error = problem
            if reservation is not None:
                num_requests = int(is_callers_fault(error))
            else:
                error = await self._gate.charge(error, request_id, opened)
            await refuse(error, request_id, responder, receive)
            self._metrics.http[_PATH, str(answer_to(error, request_id).status)] += 1
            return
        finally:
            if reservation is not None:
                used = num_tokens if has_row else 0
                self._gate.rate_limiter.settle(
                    reservation, num_requests=num_requests, num_tokens=used, cost_nano_usd=0, has_row=has_row
                )
        answer = {
            "object": "list",
            "data": [{"object": "embedding", "index": place, "embedding": each} for place, each in enumerate(vectors)],
            "model": model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
        headers = [(b"content-type", b"application/json"), (b"x-suffice-request-id", request_id.encode())]
        if reservation is not None:
            headers += reservation.headers
        with suppress(ClientStalled):
            await responder.whole(200, headers, orjson.dumps(answer))
        self._metrics.http[_PATH, "200"] += 1

    async def _embed(self, request: EmbeddingRequest, caller: Caller, watchdog: Watchdog) -> tuple[str, EmbedResult]:
        model, backend = self._catalog.embedder(request.model, request.regions, caller.permissions)
        admission = self._gate.admission
        with watchdog.answering():
            claim = await admission.enter(Priority.LIVE, caller, model)
            try:
                if not self._log.is_well:
                    await self._log.check()
                return model, await backend.embed(request.texts)
            except BackendError as error:
                error.model = model
                raise
            finally:
                admission.leave(claim)


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
