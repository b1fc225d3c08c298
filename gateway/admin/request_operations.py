"""Shows the decision log: rows in brief, and one explained to the bottom."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from gateway.admin.common_shapes import (
    ByPolicy,
    ByRouter,
    ByTier,
    Name,
    OfTenant,
    Since,
    Until,
    WithKey,
    filter_of,
)
from gateway.admin.decision_replay import NOT_LOGGED, has_its_estimates, replay_view
from gateway.admin.listing import Page, PageCursor, PageLimit, page_bounds, page_response
from gateway.admin.operation import AdminRequest, AdminResponse, AdminShape, OperationGroup, operation
from gateway.admin.record_views import Json, RequestView, row_view
from gateway.answering.explanation import explain
from gateway.errors import NotFound
from gateway.ids import bare_id, is_uuid
from gateway.store.records import RequestRecord

# Columns of feedback that hold what people wrote.
_TEXTS = ("reference", "comment")


class RequestQuery(AdminShape, frozen=True):
    """Which rows of the log."""

    tenant: OfTenant | None = None
    key_id: WithKey | None = None
    policy: ByPolicy | None = None
    tier: ByTier | None = None
    reason: Annotated[Name, Meta(description="Decided for this reason.")] | None = None
    status: Annotated[int, Meta(ge=100, le=599, description="Ended with this status.")] | None = None
    session_id: Annotated[Name, Meta(description="Of this conversation.")] | None = None
    router_version: ByRouter | None = None
    since: Since | None = None
    until: Until | None = None
    limit: PageLimit = 50
    cursor: PageCursor | None = None


class RequestExplanation(Struct):
    """A request as its caller sees it, with its checks, its feedback and the decision made again."""

    id: str
    decision: Json
    tiers: list[Json]
    attempts: list[Json]
    verifications: list[Json]
    feedback: list[Json]
    replay: Json


class RequestOperations(OperationGroup):
    """Serves the decision log over HTTP."""

    @operation("GET", "/requests", returns=Page[RequestView])
    async def list_requests(self, request: AdminRequest, query: RequestQuery) -> AdminResponse:
        """List rows of the decision log, newest first."""
        records = await self._context.queries.requests(filter_of(query), **page_bounds(query))
        verdicts = await self._context.queries.check_states([record.request_id for record in records])
        views = [RequestView.of(record, verdict=verdicts.get(record.request_id)) for record in records]
        return page_response(views, query)

    @operation("GET", "/requests/{request_id}", returns=RequestExplanation, errors=(NotFound,))
    async def get_request(self, request: AdminRequest, request_id: str) -> AdminResponse:
        """Show why a request went where it went, what other tiers would have cost, what its checks said, and whether it
        would be decided otherwise today.
        """
        bare = bare_id(request_id)
        record = await self._context.store.get_request(bare) if is_uuid(bare) else None
        if record is None:
            raise NotFound("request", request_id)
        checks, feedback, gold = await self._context.queries.of_request(record.request_id)
        texts = (record.prompt_text, record.answer_text, *(row[name] for row in feedback for name in _TEXTS))
        request.trail.shows_texts = any(text is not None for text in texts)
        shown = explain(record, self._context.catalog.ladder) | {
            "tenant": record.tenant,
            "key_id": record.key_id,
            "traceparent": record.traceparent,
            "verify_probability": record.verify_probability,
            "prompt": record.prompt_text,
            "answer": record.answer_text,
            "verifications": [row_view(row) for row in checks],
            "feedback": [row_view(row) for row in feedback],
            "gold_labels": [row_view(row) for row in gold],
            "replay": self._replay(record),
        }
        return AdminResponse(shown)

    def _replay(self, record: RequestRecord) -> Json:
        if record.decided_tier is None:
            return {"today": None, "note": "No decision was made for it."}
        if not has_its_estimates(record):
            return {"today": None, "note": "Its estimates were not kept: log.prompts was 'none'."}
        policy = self._context.catalog.policies.get(record.policy_name)
        if policy is None:
            return {"today": None, "note": f"Policy {record.policy_name!r} is not in force any more."}
        served = self._context.plane.routers.version
        return {
            "today": replay_view(record, self._context.catalog, policy),
            "same_policy_and_router": (policy.version, served) == (record.policy_version, record.router_version),
            "note": f"From the stored estimates. The log does not hold {NOT_LOGGED}.",
        }
