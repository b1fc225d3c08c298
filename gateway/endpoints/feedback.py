"""``POST /v1/feedback``: what a caller knows of an answer, reported once, kept for good, and made into gold labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Protocol

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.access.authenticator import Caller
from gateway.api import fields
from gateway.edge.body import parse_object
from gateway.edge.gate import RequestGate
from gateway.endpoints.pages import json_response
from gateway.errors import InvalidRequest, RequestNotFound
from gateway.ids import is_uuid, uuid7
from gateway.outcomes.grading import matches_reference
from gateway.store.feedback import FeedbackBook, FeedbackKind, FeedbackRecord, GoldLabel, GoldSource, KeptAnswer
from gateway.store.records import RequestRecord
from gateway.store.rows import clean_text
from gateway.verify.errors import IdempotencyKeyReused

_KINDS: tuple[FeedbackKind, ...] = ("rating", "correct", "reference", "preferred_tier")
_MAX_TEXT_CHARS = 65_536
_MAX_METADATA_BYTES = 16_384

_TEXT = fields.string(_MAX_TEXT_CHARS, min_chars=1)
_KEY = fields.string(255, min_chars=1)
_KIND = fields.one_of(*_KINDS)
_ID = fields.string(64, min_chars=1)


def feedback_schema() -> dict[str, Any]:
    """The body as JSON Schema, made of the checks that read it."""
    values = [fields.schema_of(check) for check in (fields.number(0, 1), fields.boolean, fields.integer(1, 2**15 - 1))]
    properties: dict[str, fields.Schema] = {
        "request_id": fields.schema_of(_ID),
        "kind": fields.schema_of(_KIND),
        "value": {"anyOf": values},
        "reference": fields.schema_of(_TEXT),
        "comment": fields.schema_of(_TEXT),
        "metadata": fields.schema_of(fields.mapping),
        "idempotency_key": fields.schema_of(_KEY),
    }
    return fields.open_object(properties, required=("request_id", "kind"))


class RowReader(Protocol):
    """The part of the store that is needed here."""

    async def get_request(self, request_id: str) -> RequestRecord | None: ...


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
        self._tier = fields.integer(1, num_tiers)
        self._now = now

    async def __call__(self, request: Request) -> Response:
        """Keep a report.

        Raises
        ------
        InvalidRequest, Unauthenticated, RequestNotFound, IdempotencyKeyReused
        """
        opened = await self._gate.open(request.scope, request.receive, takes_place=False)
        caller, body = opened.caller, parse_object(opened.body, self._gate.limits.max_json_depth)
        record = self._read(body, request.headers.get("idempotency-key"), caller)
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

    def _read(self, body: Mapping[str, Any], header_key: str | None, caller: Caller) -> FeedbackRecord:
        """The body, checked. The key may come in a header or in the body, not as two different ones."""
        given = {name: value for name, value in body.items() if value is not None}
        if "request_id" not in given:
            raise InvalidRequest("'request_id' says which answer this is about; it is missing.", param="request_id")
        if "kind" not in given:
            raise InvalidRequest(f"'kind' is missing; it is one of {', '.join(_KINDS)}.", param="kind")
        kind: FeedbackKind = _KIND(given["kind"], "kind")
        key = given.get("idempotency_key", header_key)
        if header_key is not None and key != header_key:
            raise InvalidRequest("'idempotency_key' and the header Idempotency-Key differ.", param="idempotency_key")
        feedback_id = uuid7()
        return FeedbackRecord(
            feedback_id=feedback_id,
            # The body's `id` of an answer is its request's id behind a prefix.
            request_id=_ID(given["request_id"], "request_id").removeprefix("chatcmpl-").removeprefix("cmpl-"),
            created_at=self._now(),
            tenant=caller.tenant,
            key_id=caller.key_id,
            idempotency_key=feedback_id if key is None else clean_text(_KEY(key, "idempotency_key")),
            kind=kind,
            value=self._value(kind, given),
            reference=_reference(kind, given),
            comment=clean_text(_TEXT(given["comment"], "comment")) if "comment" in given else None,
            metadata=_metadata(given.get("metadata", {})),
        )

    def _value(self, kind: FeedbackKind, given: Mapping[str, Any]) -> float | None:
        if kind == "reference":
            if "value" in given:
                raise InvalidRequest("A 'reference' has no 'value'; it is given as 'reference'.", param="value")
            return None
        if "value" not in given:
            raise InvalidRequest(f"'value' is missing for a {kind}.", param="value")
        checks: Mapping[str, fields.Check] = {
            "rating": fields.number(0, 1),
            "correct": fields.boolean,
            "preferred_tier": self._tier,
        }
        return float(checks[kind](given["value"], "value"))


def _reference(kind: FeedbackKind, given: Mapping[str, Any]) -> str | None:
    if kind == "reference" and "reference" not in given:
        raise InvalidRequest("'reference' is missing: the right answer, as text.", param="reference")
    return clean_text(_TEXT(given["reference"], "reference")) if "reference" in given else None


def _metadata(value: Any) -> Mapping[str, Any]:
    metadata: Mapping[str, Any] = fields.mapping(value, "metadata")
    written = orjson.dumps(metadata)
    if len(written) > _MAX_METADATA_BYTES:
        raise InvalidRequest(f"'metadata' has more than {_MAX_METADATA_BYTES} bytes.", param="metadata")
    if b"\\u0000" in written:
        raise InvalidRequest("'metadata' may not hold NUL characters.", param="metadata")
    return metadata


def gold_from(record: FeedbackRecord, answered: RequestRecord, kept_answers: list[KeptAnswer]) -> list[GoldLabel]:
    """What a report says of the quality of answers.

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
