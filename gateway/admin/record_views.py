"""Shows stored records as the administration answers them; each view is declared once, for encoding and for OpenAPI."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any, ClassVar, Literal, Self

from msgspec import Meta, Struct

from policies.pricing import from_nano_usd

Usd = Annotated[str, Meta(description="Dollars, as a decimal number.")]
Timestamp = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
Json = dict[str, Any]


class RecordView(Struct):
    """Base of the views of records: fields by their names, or as ``sources`` says; amounts and times become text."""

    sources: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def of(cls, record: object, **given: Any) -> Self:
        """Show a record; ``given`` are fields that it does not have."""
        names = [name for name in cls.__struct_fields__ if name != "object" and name not in given]
        return cls(**given, **{name: shown(getattr(record, cls.sources.get(name, name))) for name in names})


class KeyView(RecordView, kw_only=True):
    """A key, without anything that could open a door."""

    sources: ClassVar = {"id": "key_id"}

    id: str
    object: Literal["suffice.key"] = "suffice.key"
    name: str
    prefix: str
    tenant: str
    scope: str
    limits: Json
    permissions: Json
    created_at: Timestamp
    last_used_at: Timestamp | None
    revoked_at: Timestamp | None
    expires_at: Timestamp | None


class PolicyVersionView(RecordView, kw_only=True):
    """A stored version of a policy."""

    object: Literal["suffice.policy_version"] = "suffice.policy_version"
    name: str
    version: str
    created_at: Timestamp
    author: str
    note: str
    body: Json


class RouterView(RecordView, kw_only=True):
    """A router's entry and its card."""

    version: str
    object: Literal["suffice.router"] = "suffice.router"
    created_at: Timestamp
    status: str
    origin: str
    parent: str
    note: str
    card: Json


class RolloutView(RecordView, kw_only=True):
    """A rollout and what happened in it."""

    sources: ClassVar = {"id": "rollout_id"}

    id: str
    object: Literal["suffice.rollout"] = "suffice.rollout"
    router_version: str
    baseline_version: str
    status: str
    stage: str
    share: float
    reason: str
    started_at: Timestamp
    updated_at: Timestamp
    ended_at: Timestamp | None
    history: list[Json]


class AlertView(RecordView, kw_only=True):
    """Something a person should look at; open until it is resolved."""

    sources: ClassVar = {"id": "alert_id"}

    id: str
    object: Literal["suffice.alert"] = "suffice.alert"
    created_at: Timestamp
    kind: str
    severity: str
    subject: str
    body: Json
    resolved_at: Timestamp | None


class RequestView(RecordView, kw_only=True):
    """A row of the decision log in brief."""

    sources: ClassVar = {"id": "request_id", "policy": "policy_name", "status": "status_code", "error": "error_code"}

    id: str
    object: Literal["suffice.request"] = "suffice.request"
    created_at: Timestamp
    endpoint: str
    tenant: str
    key_id: str | None
    session_id: str | None
    model_requested: str
    model_served: str | None
    policy: str
    policy_version: str
    router_version: str
    decided_tier: int | None
    final_tier: int | None
    reason: str
    explored: bool
    confidence: float | None
    novelty: float | None
    prompt_tokens: int
    completion_tokens: int
    cost_usd: Usd
    total_s: float | None
    status: int
    error: str | None
    finish_reason: str
    verdict: Annotated[str | None, Meta(description="What its check said, or how far that is; null without one.")]


def row_view(row: Mapping[str, Any]) -> Json:
    """Return a row of a table with its amounts in dollars and its times as text."""
    found = {}
    for name, value in row.items():
        is_amount = name.endswith("_nano_usd") and value is not None
        found[name.replace("_nano_usd", "_usd")] = usd_of_nano(value) if is_amount else shown(value)
    return found


def usd(amount: Decimal) -> str:
    """Return dollars as text, which keeps them exact."""
    return format(amount, "f")


def usd_of_nano(amount: int) -> str:
    """Return billionths of a dollar as dollars."""
    return usd(from_nano_usd(int(amount)))


def shown(value: Any) -> Any:
    """Return a value of a record as JSON has it."""
    if isinstance(value, Decimal):
        return usd(value)
    if isinstance(value, datetime):
        return value.isoformat()
    return dict(value) if isinstance(value, Mapping) else value
