"""The endpoints that only read: models, a request explained, health, readiness, metrics."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.access.admission import Admission
from gateway.access.authenticator import Caller
from gateway.answering.explanation import explain
from gateway.edge.error_format import OPENAI, ErrorFormat, request_format
from gateway.edge.error_table import answer_to
from gateway.edge.gate import RequestGate
from gateway.endpoints import api_page
from gateway.errors import OriginRefused, RequestNotFound, Unauthenticated, WrongScope
from gateway.ids import bare_id, is_uuid, uuid7
from gateway.models.catalog import Catalog
from gateway.models.readiness import Readiness
from gateway.observe.metrics import CONTENT_TYPE, Metrics
from gateway.store.errors import StoreError
from gateway.store.records import RequestRecord

Page = Callable[[Request], Awaitable[Response]]


class RowReader(Protocol):
    """The part of the store that is needed here."""

    async def get_request(self, request_id: str) -> RequestRecord | None: ...


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response of compact JSON."""
    return Response(orjson.dumps(value), status, headers, "application/json")


def error_response(error: Exception, request_id: str, shape: ErrorFormat = OPENAI) -> Response:
    """An exception as an error object."""
    answer = answer_to(error, request_id, shape)
    headers = [*answer.headers(), *shape.id_headers(request_id)]
    return Response(answer.json(), answer.status, {name.decode(): value.decode() for name, value in headers})


def guarded(page: Page) -> Page:
    """Answer whatever a page raises with the one error table."""

    async def answer(request: Request) -> Response:
        try:
            return await page(request)
        except Exception as error:
            return error_response(error, uuid7(), request_format(request.scope))

    return answer


class Pages:
    """Handlers over what the gateway holds.

    ``is_public``: what the server tells of itself needs no key.
    """

    def __init__(
        self,
        catalog: Catalog,
        gate: RequestGate,
        rows: RowReader,
        readiness: Readiness,
        admission: Admission,
        metrics: Metrics,
        control: Callable[[], dict[str, Any]],
        *,
        is_public: bool = False,
    ) -> None:
        self._catalog = catalog
        self._gate = gate
        self._rows = rows
        self._readiness = readiness
        self._admission = admission
        self._metrics = metrics
        self._control = control
        self._is_public = is_public
        self._started_s = int(time.time())

    async def models(self, request: Request) -> Response:
        caller = await self._gate.identify(request.scope)
        return json_response({"object": "list", "data": self._catalog.listing(self._started_s, caller.permissions)})

    async def model(self, request: Request) -> Response:
        caller = await self._gate.identify(request.scope)
        name = request.path_params["model"]
        return json_response(self._catalog.entry(name, self._started_s, caller.permissions))

    async def request(self, request: Request) -> Response:
        """One's own requests only: another's looks like none at all."""
        caller = await self._gate.identify(request.scope)
        request_id = request.path_params["request_id"]
        bare = bare_id(request_id)
        record = await self._rows.get_request(bare) if is_uuid(bare) else None
        if record is None or not _may_see(caller, record):
            raise RequestNotFound(request_id)
        return json_response(explain(record, self._catalog.ladder))

    async def healthz(self, request: Request) -> Response:
        return json_response({"status": "ok"})

    async def readyz(self, request: Request) -> Response:
        if self._admission.is_leaving or self._admission.is_draining:
            return json_response({"status": "draining"}, 503)
        report = await self._readiness.check()
        is_ready, tiers = report.is_ready, report.tiers
        told: dict[str, Any] = {"status": "ready" if is_ready else "not_ready"}
        if report.reason is not None:
            told["reason"] = report.reason
        if await self._may_observe(request):
            # A server that cannot see what is in force goes on with what was: it is told, not taken out of service.
            told |= {"tiers": tiers, "control": self._control()}
        return json_response(told, 200 if is_ready else 503)

    async def metrics(self, request: Request) -> Response:
        if not self._is_public:
            await self._gate.check_observer(request.scope)
        return Response(self._metrics.render(), headers={"content-type": CONTENT_TYPE})

    def described(self, value: Any) -> Page:
        """Return a page that is always the same JSON, of what this product is."""
        encoded = orjson.dumps(value)

        async def answer(request: Request) -> Response:
            await self._gate.check_reader(request.scope)
            return Response(encoded, media_type="application/json")

        return answer

    def described_for_people(self, document: Mapping[str, Any]) -> Page:
        """Return the same as a page to read."""
        page = api_page.render(document)

        async def answer(request: Request) -> Response:
            await self._gate.check_reader(request.scope)
            return Response(page, headers=dict(api_page.HEADERS))

        return answer

    async def _may_observe(self, request: Request) -> bool:
        """Whether a probe may see more than the status. It is never refused that: balancers hold no key."""
        if self._is_public:
            return True
        try:
            await self._gate.check_observer(request.scope)
        except (OriginRefused, Unauthenticated, WrongScope, StoreError):
            return False
        return True


def _may_see(caller: Caller, record: RequestRecord) -> bool:
    return caller.tenant == record.tenant and caller.key_id == record.key_id
