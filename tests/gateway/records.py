"""A plausible log row, for tests that need one and care about little of it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from backends.protocol import FinishReason
from gateway.ids import uuid7
from gateway.store.records import RequestRecord

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
