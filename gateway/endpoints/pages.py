"""The endpoints that only read: models, a request explained, health, readiness, metrics."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.access.admission import Admission
from gateway.access.authenticator import Caller
from gateway.answering.explanation import explain
from gateway.edge.error_table import answer_to
from gateway.edge.gate import RequestGate
from gateway.errors import RequestNotFound
from gateway.ids import is_uuid, uuid7
from gateway.models.catalog import Catalog
from gateway.models.readiness import Readiness
from gateway.observe.metrics import CONTENT_TYPE, Metrics
from gateway.store.records import RequestRecord

Page = Callable[[Request], Awaitable[Response]]


class RowReader(Protocol):
    """The part of the store that is needed here."""

    async def get_request(self, request_id: str) -> RequestRecord | None: ...


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response of compact JSON."""
    return Response(orjson.dumps(value), status, headers, "application/json")


def error_response(error: Exception, request_id: str) -> Response:
    """An exception as OpenAI's error object."""
    answer = answer_to(error, request_id)
    headers = {name.decode(): value.decode() for name, value in answer.headers()}
    return Response(answer.json(), answer.status, headers | {"x-suffice-request-id": request_id})


def fixed(value: Any) -> Page:
    """A page that is always the same JSON."""
    encoded = orjson.dumps(value)

    async def answer(request: Request) -> Response:
        return Response(encoded, media_type="application/json")

    return answer


def guarded(page: Page) -> Page:
    """Answer whatever a page raises with the one error table."""

    async def answer(request: Request) -> Response:
        try:
            return await page(request)
        except Exception as error:
            return error_response(error, uuid7())

    return answer


class Pages:
    """Handlers over what the gateway holds."""

    def __init__(
        self,
        catalog: Catalog,
        gate: RequestGate,
        rows: RowReader,
        readiness: Readiness,
        admission: Admission,
        metrics: Metrics,
        control: Callable[[], dict[str, Any]],
    ) -> None:
        self._catalog = catalog
        self._gate = gate
        self._rows = rows
        self._readiness = readiness
        self._admission = admission
        self._metrics = metrics
        self._control = control
        self._started_s = int(time.time())

    async def models(self, request: Request) -> Response:
        await self._gate.identify(request.scope)
        return json_response({"object": "list", "data": self._catalog.listing(self._started_s)})

    async def model(self, request: Request) -> Response:
        await self._gate.identify(request.scope)
        return json_response(self._catalog.entry(request.path_params["model"], self._started_s))

    async def request(self, request: Request) -> Response:
        """One's own requests only: another's looks like none at all."""
        caller = await self._gate.identify(request.scope)
        request_id = request.path_params["request_id"]
        # The body's `id` is this id behind a prefix; both lead here.
        bare_id = request_id.removeprefix("chatcmpl-").removeprefix("cmpl-")
        record = await self._rows.get_request(bare_id) if is_uuid(bare_id) else None
        if record is None or not _may_see(caller, record):
            raise RequestNotFound(request_id)
        return json_response(explain(record, self._catalog.ladder))

    async def healthz(self, request: Request) -> Response:
        return json_response({"status": "ok"})

    async def readyz(self, request: Request) -> Response:
        if self._admission.is_draining:
            return json_response({"status": "draining"}, 503)
        is_ready, tiers = await self._readiness.check()
        # A server that cannot see what is in force goes on with what was: it is told, not taken out of service.
        told = {"status": "ready" if is_ready else "not_ready", "tiers": tiers, "control": self._control()}
        return json_response(told, 200 if is_ready else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.render(), headers={"content-type": CONTENT_TYPE})


def _may_see(caller: Caller, record: RequestRecord) -> bool:
    return caller.tenant == record.tenant and caller.key_id == record.key_id
