"""``POST /v1/feedback``: what a caller knows of an answer, reported once, kept for good, and made into gold labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, get_args

import orjson
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from gateway.access.authenticator import Caller
from gateway.api.declaration import checked, schema_of
from gateway.edge.gate import OpenedRequest, RequestGate
from gateway.edge.json_body import parse_object
from gateway.endpoints.pages import RowReader, json_response
from gateway.errors import InvalidRequest, RequestNotFound
from gateway.ids import bare_id, is_uuid, uuid7
from gateway.outcomes.answer_grading import matches_reference
from gateway.store.feedback import FeedbackBook, FeedbackKind, FeedbackRecord, GoldLabel, GoldSource, KeptAnswer
from gateway.store.records import RequestRecord
from gateway.store.rows import clean_text
from gateway.verify.errors import IdempotencyKeyReused

_MAX_TEXT_CHARS = 65_536
_MAX_METADATA_BYTES = 16_384


FeedbackText = Annotated[str, Meta(min_length=1, max_length=_MAX_TEXT_CHARS)]
IdempotencyKey = Annotated[str, Meta(min_length=1, max_length=255)]
Rating = Annotated[float, Meta(ge=0, le=1)]
# What a value may be rests on the kind of the report, and for a tier on the ladder.
_VALUE_SCHEMA = schema_of(Rating | bool | Annotated[int, Meta(ge=1, le=2**15 - 1)] | None)


class FeedbackBody(Struct, kw_only=True):
    """What a caller knows of an answer."""

    request_id: Annotated[str, Meta(min_length=1, max_length=64)]
    kind: FeedbackKind
    idempotency_key: IdempotencyKey | None = None
    value: Annotated[Any, Meta(extra_json_schema=_VALUE_SCHEMA)] = None
    reference: FeedbackText | None = None
    comment: FeedbackText | None = None
    metadata: dict[str, Any] | None = None


# What is told of a body without them, before anything that may be wrong with the rest.
_MISSING = {
    "request_id": "'request_id' says which answer this is about; it is missing.",
    "kind": f"'kind' is missing; it is one of {', '.join(get_args(FeedbackKind))}.",
}


def read_feedback(raw: Mapping[str, Any]) -> FeedbackBody:
    """Check everything the body says that does not rest on its kind.

    Raises
    ------
    InvalidRequest
    """
    for name, message in _MISSING.items():
        if raw.get(name) is None:
            raise InvalidRequest(message, param=name)
    return checked(raw, FeedbackBody, "")


class FeedbackEndpoint:
    """One path, as a page.

    Parameters
    ----------
    gate : who calls, and the bounds of a body
    rows : the log
    book : where reports are kept
    num_tiers : of the ladder in force
    now : the wall clock
    """

    def __init__(
        self,
        gate: RequestGate,
        rows: RowReader,
        book: FeedbackBook,
        num_tiers: int,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._gate = gate
        self._rows = rows
        self._book = book
        tier = Annotated[int, Meta(ge=1, le=num_tiers)]
        self._value_types: Mapping[FeedbackKind, Any] = {"rating": Rating, "correct": bool, "preferred_tier": tier}
        self._now = now

    async def __call__(self, request: Request) -> Response:
        """Keep a report.

        Raises
        ------
        InvalidRequest, Unauthenticated, RateLimited, RequestNotFound, IdempotencyKeyReused, FeedbackFull
        """
        watchdog = self._gate.watchdog(request.scope, request.receive)
        try:
            opened = await self._gate.open(request.scope, request.receive, watchdog, takes_place=False)
        finally:
            watchdog.close()
        caller, limiter = opened.caller, self._gate.rate_limiter
        if not caller.is_limited:
            return await self._keep(request, opened)
        # A request like any other, also where it is refused: looking it up has cost what a kept one costs.
        reservation = await limiter.admit(uuid7(), caller, 0)
        try:
            return await self._keep(request, opened)
        finally:
            limiter.settle(reservation, num_requests=1, num_tokens=0, cost_nano_usd=0)

    async def _keep(self, request: Request, opened: OpenedRequest) -> Response:
        body, caller = read_feedback(parse_object(opened.body, self._gate.limits.max_json_depth)), opened.caller
        record = self._record(body, request.headers.get("idempotency-key"), caller)
        answered = await self._rows.get_request(record.request_id) if is_uuid(record.request_id) else None
        if answered is None or answered.tenant != caller.tenant:
            raise RequestNotFound(record.request_id)
        kept_answers = []
        if record.reference is not None:
            kept_answers = await self._book.kept_answers(record.request_id, answered.final_tier)
        kept, is_new = await self._book.add(record, gold_from(record, answered, kept_answers))
        if not is_new and kept.content != record.content:
            raise IdempotencyKeyReused(record.idempotency_key)
        return json_response(_shown(kept))

    def _record(self, body: FeedbackBody, header_key: str | None, caller: Caller) -> FeedbackRecord:
        """Return the report to be kept. The key may come in a header or in the body, not as two different ones."""
        key = header_key if body.idempotency_key is None else body.idempotency_key
        if header_key is not None and key != header_key:
            raise InvalidRequest("'idempotency_key' and the header Idempotency-Key differ.", param="idempotency_key")
        feedback_id = uuid7()
        return FeedbackRecord(
            feedback_id=feedback_id,
            request_id=bare_id(body.request_id),
            created_at=self._now(),
            tenant=caller.tenant,
            key_id=caller.key_id,
            idempotency_key=feedback_id if key is None else clean_text(checked(key, IdempotencyKey, "idempotency_key")),
            kind=body.kind,
            value=self._value(body),
            reference=_reference(body),
            comment=None if body.comment is None else clean_text(body.comment),
            metadata=_metadata(body.metadata),
        )

    def _value(self, body: FeedbackBody) -> float | None:
        if body.kind == "reference":
            if body.value is not None:
                raise InvalidRequest("A 'reference' has no 'value'; it is given as 'reference'.", param="value")
            return None
        if body.value is None:
            raise InvalidRequest(f"'value' is missing for a {body.kind}.", param="value")
        return float(checked(body.value, self._value_types[body.kind], "value"))


def _reference(body: FeedbackBody) -> str | None:
    if body.kind == "reference" and body.reference is None:
        raise InvalidRequest("'reference' is missing: the right answer, as text.", param="reference")
    return None if body.reference is None else clean_text(body.reference)


def _metadata(metadata: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if metadata is None:
        return {}
    written = orjson.dumps(metadata)
    if len(written) > _MAX_METADATA_BYTES:
        raise InvalidRequest(f"'metadata' has more than {_MAX_METADATA_BYTES} bytes.", param="metadata")
    if b"\\u0000" in written:
        raise InvalidRequest("'metadata' may not hold NUL characters.", param="metadata")
    return metadata


def gold_from(record: FeedbackRecord, answered: RequestRecord, kept_answers: list[KeptAnswer]) -> list[GoldLabel]:
    """Return what a report says of the quality of answers.

    ``rating`` and ``correct`` speak of the answer that was given; a preferred tier says that its answer would do, and
    where it is a dearer one, that the given answer does not; a reference is compared with every answer still there.
    """
    tier = answered.final_tier
    if tier is None:
        return []
    labels: dict[tuple[int, GoldSource], float] = {}
    if record.kind in ("rating", "correct") and record.value is not None:
        labels[tier, "feedback"] = record.value
    if record.kind == "preferred_tier" and record.value is not None:
        labels[tier, "feedback"] = float(record.value <= tier)
        labels[int(record.value), "feedback"] = 1.0
    if record.reference is not None:
        labels |= {(each.tier, "reference"): matches_reference(record.reference, each.text) for each in kept_answers}
    return [
        GoldLabel(
            request_id=record.request_id,
            tier=tier,
            source=source,
            label=label,
            created_at=record.created_at,
            note=record.kind,
        )
        for (tier, source), label in labels.items()
    ]


def _shown(record: FeedbackRecord) -> dict[str, Any]:
    return {
        "id": record.feedback_id,
        "object": "feedback",
        "created": int(record.created_at.timestamp()),
        "request_id": record.request_id,
        "kind": record.kind,
        "value": record.value,
        "reference": record.reference,
        "comment": record.comment,
        "metadata": dict(record.metadata),
        "idempotency_key": record.idempotency_key,
    }
