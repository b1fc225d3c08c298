"""Shows stored records as the administration answers them; each view is declared once, for encoding and for OpenAPI."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct

from gateway.store.control_records import Alert, RolloutRow, RouterVersion
from gateway.store.records import ApiKey, PolicyVersion, RequestRecord
from policies.pricing import from_nano_usd

V = TypeVar("V", bound=Struct)

Usd = Annotated[str, Meta(description="Dollars, as a decimal number.")]
Timestamp = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
Json = dict[str, Any]


class KeyView(Struct, kw_only=True):
    """A key without its secret."""

    id: str
    object: Literal["suffice.key"] = "suffice.key"
    name: str
    prefix: str
    tenant: str
    scope: str
    limits: Json
    created_at: Timestamp
    last_used_at: Timestamp | None
    revoked_at: Timestamp | None


class PolicyVersionView(Struct, kw_only=True):
    """A stored version of a policy."""

    object: Literal["suffice.policy_version"] = "suffice.policy_version"
    name: str
    version: str
    created_at: Timestamp
    author: str
    note: str
    body: Json


class RouterView(Struct, kw_only=True):
    """A router's entry and its card."""

    version: str
    object: Literal["suffice.router"] = "suffice.router"
    created_at: Timestamp
    status: str
    origin: str
    parent: str
    note: str
    card: Json


class RolloutView(Struct, kw_only=True):
    """A rollout and what happened in it."""

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


class AlertView(Struct, kw_only=True):
    """Something a person should look at; open until it is resolved."""

    id: str
    object: Literal["suffice.alert"] = "suffice.alert"
    created_at: Timestamp
    kind: str
    severity: str
    subject: str
    body: Json
    resolved_at: Timestamp | None


class RequestView(Struct, kw_only=True):
    """A row of the decision log in brief."""

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


def key_view(key: ApiKey) -> KeyView:
    """Show a key without anything that could open a door."""
    return view_of(KeyView, key, id=key.key_id)


def policy_version_view(version: PolicyVersion) -> PolicyVersionView:
    """Show a stored version."""
    return view_of(PolicyVersionView, version)


def router_view(router: RouterVersion) -> RouterView:
    """Show a router."""
    return view_of(RouterView, router)


def rollout_view(rollout: RolloutRow) -> RolloutView:
    """Show a rollout."""
    return view_of(RolloutView, rollout, id=rollout.rollout_id)


def alert_view(alert: Alert) -> AlertView:
    """Show an alert."""
    return view_of(AlertView, alert, id=alert.alert_id)


def request_view(record: RequestRecord) -> RequestView:
    """Show a row of the log in brief."""
    renamed = {
        "id": record.request_id,
        "policy": record.policy_name,
        "status": record.status_code,
        "error": record.error_code,
    }
    return view_of(RequestView, record, **renamed)


def view_of(shape: type[V], record: object, **given: Any) -> V:
    """Return a record as a view: fields by their names, but for what is given; amounts and times become text."""
    names = [name for name in shape.__struct_fields__ if name != "object"]
    return shape(**{name: _shown(given[name] if name in given else getattr(record, name)) for name in names})


def row_view(row: Mapping[str, Any]) -> Json:
    """Return a row of a table with its amounts in dollars and its times as text."""
    return {
        name.replace("_nano_usd", "_usd"): usd_of_nano(value) if name.endswith("_nano_usd") else _shown(value)
        for name, value in row.items()
    }


def usd(amount: Decimal) -> str:
    """Return dollars as text, which keeps them exact."""
    return format(amount, "f")


def usd_of_nano(amount: int | None) -> str | None:
    """Return billionths of a dollar as dollars."""
    return None if amount is None else usd(from_nano_usd(int(amount)))


def _shown(value: Any) -> Any:
    if isinstance(value, Decimal):
        return usd(value)
    if isinstance(value, datetime):
        return value.isoformat()
    return dict(value) if isinstance(value, Mapping) else value
