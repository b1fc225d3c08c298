"""Views as they are encoded: order of members, amounts, times; and the scalars that queries are made of."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from decimal import Decimal

import msgspec
import orjson
import pytest

from backends.protocol import FinishReason
from gateway.admin.common_shapes import filter_of
from gateway.admin.key_operations import KeyWithSecret
from gateway.admin.listing import Listing, Page, page_bounds, page_response
from gateway.admin.operation import answer_schema
from gateway.admin.record_views import AlertView, KeyView, RequestView, row_view
from gateway.admin.request_operations import RequestQuery
from gateway.admin.retrain_operations import RunQuery
from gateway.admin.usage_operations import UsageQuery
from gateway.api.declaration import checked
from gateway.errors import InvalidRequest
from gateway.ids import uuid7
from gateway.store.admin_queries import RequestFilter
from gateway.store.control_records import Alert
from gateway.store.records import ApiKey, RequestRecord

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
KEY = ApiKey(
    key_id="k", name="n", key_hash="secret hash", prefix="sk-1", created_at=NOON, limits={"tokens_per_minute": 7}
)


def encoded(value: object) -> bytes:
    return orjson.dumps(value, default=msgspec.structs.asdict)


def test_a_key_is_shown_without_its_hash() -> None:
    shown = encoded(KeyView.of(KEY))
    assert shown == (
        b'{"id":"k","object":"suffice.key","name":"n","prefix":"sk-1","tenant":"default","scope":"use",'
        b'"limits":{"tokens_per_minute":7},"permissions":{},"created_at":"2026-01-31T12:00:00+00:00","last_used_at":null,"revoked_at":null,"expires_at":null}'
    )
    assert encoded(KeyWithSecret.of(KEY, key="sk-123")) == shown[:-1] + b',"key":"sk-123"}'


def test_a_request_is_shown_by_names_of_its_own() -> None:
    record = RequestRecord(
        request_id="r",
        created_at=NOON,
        endpoint="/v1/completions",
        model_requested="auto",
        finish_reason=FinishReason.STOP,
        status_code=200,
        policy_name="careful",
        cost_usd=Decimal("0.000000010"),
    )
    shown = orjson.loads(encoded(RequestView.of(record, verdict="good")))
    assert (shown["id"], shown["policy"], shown["status"], shown["error"]) == ("r", "careful", 200, None)
    assert shown["cost_usd"] == "0.000000010", "as text, without an exponent"
    assert shown["finish_reason"] == "stop"
    assert list(shown) == list(RequestView.__struct_fields__)


def test_rows_of_tables_show_amounts_in_dollars() -> None:
    row = {"id": 1, "cost_nano_usd": 1_500_000_000, "measured_cost_nano_usd": None, "at": NOON, "scores": {"a": 1}}
    assert row_view(row) == {
        "id": 1,
        "cost_usd": "1.5",
        "measured_cost_usd": None,
        "at": "2026-01-31T12:00:00+00:00",
        "scores": {"a": 1},
    }


def alert(alert_id: str) -> AlertView:
    return AlertView.of(Alert(alert_id=alert_id, created_at=NOON, kind="k", severity="s", subject="x", body={}))


def test_a_page_says_where_the_next_begins() -> None:
    query = RunQuery(limit=2)
    assert page_bounds(query) == {"limit": 3, "before_id": None}
    entries = [alert("c"), alert("b"), alert("a")]
    assert page_response(entries, query).value == Page(data=entries[:2], next="b")
    assert page_response(entries[:2], query).value == Page(data=entries[:2], next=None)
    assert page_response([], query).value == Page(data=[], next=None)
    rows = [{"run_id": "b"}, {"run_id": "a"}]
    assert page_response(rows, RunQuery(limit=1), "run_id").value.next == "b"


def test_an_answer_has_all_its_members() -> None:
    schema = answer_schema(Listing[KeyView])
    assert schema["required"] == ["object", "data"]
    key = schema["properties"]["data"]["items"]
    assert key["required"] == list(KeyView.__struct_fields__)
    assert key["properties"]["created_at"]["format"] == "date-time"
    assert "additionalProperties" not in key, "a later version may have more"


def test_a_cursor_is_the_id_of_an_entry() -> None:
    cursor = uuid7()
    assert checked({"cursor": cursor}, RunQuery, "").cursor == cursor
    for wrong in ("next", cursor.upper(), 7):
        with pytest.raises(InvalidRequest, match="expected the 'next' of another page"):
            checked({"cursor": wrong}, RunQuery, "")


@pytest.mark.parametrize("given", ["day", "day,tenant", "model,policy,tier,key"])
def test_groups_of_usage(given: str) -> None:
    assert checked({"group_by": given}, UsageQuery, "").group_by == given


@pytest.mark.parametrize("given", ["", "colour", "day,day", "day,", "day tenant"])
def test_other_groups_are_refused(given: str) -> None:
    with pytest.raises(
        InvalidRequest, match="'group_by' takes some of day, tenant, key, tier, policy, model"
    ) as refused:
        checked({"group_by": given}, UsageQuery, "")
    assert refused.value.param == "group_by"


def test_every_filter_of_the_log_can_be_asked_for() -> None:
    names = {each.name for each in dataclasses.fields(RequestFilter)}
    assert names <= set(RequestQuery.__struct_fields__)
    query = checked({"tier": 2, "since": "2026-01-31T12:00:00Z"}, UsageQuery, "")
    assert filter_of(query) == RequestFilter(tier=2, since=NOON)
