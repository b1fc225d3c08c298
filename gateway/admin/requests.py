"""The log, request by request: listed, and one explained to the bottom."""

from __future__ import annotations

from typing import Any

from gateway.admin import schemas
from gateway.admin.operation import Asked, Field, Fields, Operation, Reply
from gateway.admin.paging import PAGING, page_reply
from gateway.admin.replay import NOT_LOGGED, replay_view
from gateway.admin.rooms import Rooms
from gateway.admin.views import plain, request_line
from gateway.answering.explanation import explain
from gateway.api import fields
from gateway.errors import NotFound
from gateway.ids import is_uuid
from gateway.store.admin_queries import RequestFilter
from gateway.store.records import RequestRecord

_NAME = fields.string(256, min_chars=1)
FILTERS: Fields = {
    "tenant": Field(_NAME, "Of this tenant."),
    "key_id": Field(_NAME, "Made with this key."),
    "policy": Field(_NAME, "Decided by this policy."),
    "tier": Field(fields.integer(1, 1000), "Answered by this tier."),
    "reason": Field(_NAME, "Decided for this reason."),
    "status": Field(fields.integer(100, 599), "Ended with this status."),
    "session_id": Field(_NAME, "Of this conversation."),
    "router_version": Field(_NAME, "Estimated by this router."),
    "since": Field(fields.moment, "Accepted at or after this moment."),
    "until": Field(fields.moment, "Accepted before this moment."),
}
_REQUEST = schemas.shape(id=schemas.TEXT, created_at=schemas.MOMENT, status=schemas.COUNT, cost_usd=schemas.USD)


def filter_of(asked: Asked) -> RequestFilter:
    """The filter a query states."""
    return RequestFilter(**{name: asked.query[name] for name in FILTERS})


class RequestPages:
    """The decision log over HTTP."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms

    def operations(self) -> list[Operation]:
        return [
            Operation(
                method="GET",
                path="/requests",
                name="list_requests",
                summary="Rows of the decision log, newest first.",
                handler=self.list,
                returns=schemas.page(_REQUEST),
                query={**FILTERS, **PAGING},
            ),
            Operation(
                method="GET",
                path="/requests/{request_id}",
                name="get_request",
                summary="Why a request went where it went, what other tiers would have cost, what its checks said, "
                "and whether it would be decided otherwise today.",
                handler=self.get,
                returns=schemas.shape(
                    id=schemas.TEXT,
                    decision=schemas.ANY_OBJECT,
                    tiers=schemas.array(schemas.ANY_OBJECT),
                    attempts=schemas.array(schemas.ANY_OBJECT),
                    verifications=schemas.array(schemas.ANY_OBJECT),
                    feedback=schemas.array(schemas.ANY_OBJECT),
                    replay=schemas.ANY_OBJECT,
                ),
                errors=(NotFound,),
            ),
        ]

    async def list(self, asked: Asked) -> Reply:
        records = await self._rooms.queries.requests(
            filter_of(asked), limit=asked.query["limit"] + 1, before_id=asked.query["cursor"]
        )
        return page_reply([request_line(record) for record in records], asked)

    async def get(self, asked: Asked) -> Reply:
        request_id = asked.path["request_id"].removeprefix("chatcmpl-").removeprefix("cmpl-")
        record = await self._rooms.store.get_request(request_id) if is_uuid(request_id) else None
        if record is None:
            raise NotFound("request", asked.path["request_id"])
        checks, feedback, gold = await self._rooms.queries.of_request(record.request_id)
        shown = explain(record, self._rooms.catalog.ladder) | {
            "tenant": record.tenant,
            "key_id": record.key_id,
            "traceparent": record.traceparent,
            "verify_probability": record.verify_probability,
            "prompt": record.prompt_text,
            "answer": record.answer_text,
            "verifications": [plain(row) for row in checks],
            "feedback": [plain(row) for row in feedback],
            "gold_labels": [plain(row) for row in gold],
            "replay": self._replay(record),
        }
        return Reply(shown)

    def _replay(self, record: RequestRecord) -> dict[str, Any]:
        if record.decided_tier is None:
            return {"today": None, "note": "No decision was made for it."}
        policy = self._rooms.catalog.policies.get(record.policy_name)
        if policy is None:
            return {"today": None, "note": f"Policy {record.policy_name!r} is not in force any more."}
        today = replay_view(record, self._rooms.catalog, policy)
        is_same = (policy.version, self._rooms.plane.routers.version) == (record.policy_version, record.router_version)
        return {
            "today": today,
            "same_policy_and_router": is_same,
            "note": f"From the stored estimates. The log does not hold {NOT_LOGGED}.",
        }
