"""A plausible log row, for tests that need one and care about little of it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from backends.protocol import FinishReason
from gateway.ids import uuid7
from gateway.store.records import RequestRecord, ResponseRecord

NOW = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)


def make_record(**changes: Any) -> RequestRecord:
    fields: dict[str, Any] = {
        "request_id": uuid7(),
        "created_at": NOW,
        "endpoint": "/v1/chat/completions",
        "model_requested": "auto",
        "finish_reason": FinishReason.STOP,
        "status_code": 200,
    }
    return RequestRecord(**(fields | changes))


def make_response(record: RequestRecord, **changes: Any) -> ResponseRecord:
    """A kept response of a row, that goes on from nothing."""
    fields: dict[str, Any] = {
        "request_id": record.request_id,
        "created_at": record.created_at,
        "tenant": record.tenant,
        "previous_id": None,
        "num_chained": 1,
        "chained_bytes": 4,
        "conversation": None,
        "regions": None,
        "input": "[]",
        "response": "{}",
    }
    return ResponseRecord(**(fields | changes))
