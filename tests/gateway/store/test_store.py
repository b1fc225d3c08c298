"""The log returns what it was given, on both databases, whatever the text."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import sqlite3
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import insert, select

from backends.protocol import FinishReason
from classifier.types import TierSufficiency
from gateway.answering.request_router import DOMAINS
from gateway.commands.database import prune
from gateway.config.store_section import StoreConfig
from gateway.failure_report import CommandError
from gateway.ids import uuid7
from gateway.store.errors import RecordRejected, StoreClosed
from gateway.store.pruning import LogPruner
from gateway.store.records import Attempt, PolicyVersion, RequestRecord
from gateway.store.rows import clean_text, from_nano_usd, to_json, to_nano_usd
from gateway.store.store import Store
from gateway.store.tables import configs, policy_versions
from gateway.store.translate import RowFault
from tests.gateway.records import NOW, make_record

any_text = st.text(st.characters(exclude_categories=()), max_size=20)
plain_text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
unit = st.floats(0, 1)
count = st.integers(0, 2**31 - 1)
tiers = st.integers(1, 4)
maybe_tier = st.none() | tiers
seconds = st.floats(0, 1e6)
dollars = st.integers(0, 10**15).map(from_nano_usd)

records = st.builds(
    make_record,
    created_at=st.datetimes(datetime(1971, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC)),
    finish_reason=st.sampled_from(FinishReason),
    status_code=st.integers(100, 599),
    error_code=st.none() | plain_text,
    tenant=plain_text,
    key_id=st.none() | plain_text,
    session_id=st.none() | plain_text,
    stream=st.booleans(),
    num_choices=st.integers(1, 128),
    features=st.dictionaries(plain_text, st.floats(allow_nan=False, allow_infinity=False), max_size=5),
    sufficiency=st.lists(st.builds(TierSufficiency, tiers, unit, unit), max_size=4).map(tuple),
    novelty=st.none() | unit,
    decided_tier=maybe_tier,
    final_tier=maybe_tier,
    model_served=st.none() | plain_text,
    ladder=st.lists(tiers, max_size=4).map(tuple),
    propensity=st.none() | unit,
    propensities=st.dictionaries(tiers, unit, max_size=4),
    reason=plain_text,
    explored=st.booleans(),
    confidence=st.none() | unit,
    overrides=st.dictionaries(plain_text, st.none() | st.booleans() | st.integers(0, 9) | plain_text, max_size=3),
    attempts=st.lists(
        st.builds(
            Attempt,
            tiers,
            plain_text,
            seconds,
            st.none() | plain_text,
            st.none() | st.floats(0, 1),
            st.none() | st.integers(0, 2**50),
        ),
        max_size=3,
    ).map(tuple),
    prompt_tokens=count,
    completion_tokens=count,
    compute_s=st.none() | seconds,
    cost_usd=dollars,
    measured_cost_usd=st.none() | dollars,
    ttft_s=st.none() | seconds,
    total_s=seconds,
    prompt_digest=st.none() | st.just("ab" * 32),
    prompt_text=st.none() | plain_text,
    answer_text=st.none() | plain_text,
    verify_probability=st.none() | unit,
    traceparent=st.none() | plain_text,
    domain=st.sampled_from(("", *DOMAINS)),
)


@given(record=records)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_a_record_comes_back_as_it_was(store: Store, record: RequestRecord) -> None:
    record = dataclasses.replace(record, request_id=uuid7())
    await store.record(record)
    assert await store.get_request(record.request_id) == record


@given(text=any_text)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_no_text_from_outside_keeps_a_request_out_of_the_log(store: Store, text: str) -> None:
    record = make_record(
        session_id=text,
        model_requested=text,
        tenant=text,
        final_tier=1,
        overrides={text: [text, {"nested": text}]},
        attempts=(Attempt(1, text, 0.1, text),),
        prompt_text=text,
        answer_text=text,
        traceparent=text,
    )
    await store.record(record)
    found = await store.get_request(record.request_id)
    assert found is not None
    clean = clean_text(text)
    assert found.session_id == found.model_requested == found.tenant == found.prompt_text == found.answer_text == clean
    assert found.attempts == (Attempt(1, clean, 0.1, clean),)
    assert found.overrides == {clean: [clean, {"nested": clean}]}
    assert len(store.digest(text)) == 64
    assert await store.get_session(text, text) is not None


@given(text=any_text)
def test_clean_text_changes_only_what_must_change(text: str) -> None:
    clean = clean_text(text)
    clean.encode()
    assert "\0" not in clean
    assert clean_text(clean) == clean
    if "\0" not in text and not any("\ud800" <= char <= "\udfff" for char in text):
        assert clean == text


@given(nano=st.integers(-(10**18), 10**18))
def test_nano_dollars_are_exact(nano: int) -> None:
    assert to_nano_usd(from_nano_usd(nano)) == nano


def test_dollars_round_half_to_even() -> None:
    assert to_nano_usd(Decimal("0.0000000005")) == 0
    assert to_nano_usd(Decimal("0.0000000015")) == 2
    assert to_nano_usd(Decimal("0.0001")) == 100_000


def test_a_cost_beyond_the_column_is_the_most_it_holds() -> None:
    """An answer that was given is logged, whatever a price table says of it."""
    assert to_nano_usd(Decimal(2**63 - 2) / 10**9) == 2**63 - 2
    assert to_nano_usd(Decimal(2**63 - 1) / 10**9) == 2**63 - 1
    assert to_nano_usd(Decimal(2**63) / 10**9) == 2**63 - 1


async def test_counts_beyond_their_columns_are_logged_as_the_most_they_hold(store: Store) -> None:
    record = make_record(prompt_tokens=2**31, completion_tokens=2**31 - 1, cost_usd=Decimal(10**12))
    await store.record(record)
    found = await store.get_request(record.request_id)
    assert found is not None
    assert (found.prompt_tokens, found.completion_tokens) == (2**31 - 1, 2**31 - 1)
    assert found.cost_usd == from_nano_usd(2**63 - 1)


def test_a_row_counts_one_answer_and_nothing_else_that_it_was_not_told() -> None:
    record = make_record()
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if field.default is not dataclasses.MISSING and isinstance(value, int | float | Decimal):
            assert value == (field.name == "num_choices"), field.name


def test_json_has_no_nan() -> None:
    assert to_json({"a": math.nan, "b": math.inf}) == '{"a":null,"b":null}'
    assert to_json({1: 0.5}) == '{"1":0.5}'


async def test_time_keeps_its_zone_and_microseconds(store: Store) -> None:
    elsewhere = NOW.astimezone(datetime.strptime("+0530", "%z").tzinfo)
    record = make_record(created_at=elsewhere)
    await store.record(record)
    found = await store.get_request(record.request_id)
    assert found is not None
    assert found.created_at == NOW
    assert found.created_at.utcoffset() == timedelta(0)


async def test_unknown_ids_are_absent_not_errors(store: Store) -> None:
    for request_id in ("", "nothing", "x" * 10_000, "\0", "\ud800", "' OR 1=1 --"):
        assert await store.get_request(request_id) is None
    assert await store.get_session("default", "nothing") is None


async def test_recent_pages_newest_first(store: Store) -> None:
    made = [make_record(key_id="a" if place % 2 else "b", tenant="t") for place in range(10)]
    for record in made:
        await store.record(record)
    newest_first = [record.request_id for record in reversed(made)]
    page = await store.recent(limit=4)
    assert [record.request_id for record in page] == newest_first[:4]
    rest = await store.recent(limit=50, before_id=page[-1].request_id)
    assert [record.request_id for record in rest] == newest_first[4:]
    assert {record.key_id for record in await store.recent(key_id="a")} == {"a"}
    assert len(await store.recent(key_id="a")) == 5
    assert await store.recent(tenant="another") == []


async def test_same_id_twice_is_refused_and_changes_nothing(store: Store) -> None:
    record = make_record(reason="first")
    await store.record(record)
    with pytest.raises(RecordRejected) as refused:
        await store.record(dataclasses.replace(record, reason="second"))
    assert refused.value.request_id == record.request_id
    found = await store.get_request(record.request_id)
    assert found is not None
    assert found.reason == "first"


async def test_a_session_remembers_its_newest_answer(store: Store) -> None:
    later = NOW + timedelta(seconds=60)
    used = {"session_id": "s", "final_tier": 2, "model_served": "m", "prompt_tokens": 10, "completion_tokens": 5}
    await store.record(make_record(created_at=later, **used))
    await store.record(make_record(created_at=NOW, **(used | {"final_tier": 1})))
    failed = {"final_tier": 4, "finish_reason": FinishReason.ERROR, "status_code": 503}
    await store.record(make_record(created_at=later + timedelta(seconds=1), **(used | failed)))
    session = await store.get_session("default", "s")
    assert session is not None
    assert (session.tier, session.model, session.cached_tokens, session.updated_at) == (2, "m", 15, later)
    assert await store.get_session("another tenant", "s") is None
    assert await LogPruner(store).sessions(later + timedelta(seconds=1)) == 1
    assert await store.get_session("default", "s") is None


async def test_a_conversation_is_remembered_from_a_moment_on(store: Store) -> None:
    await store.record(make_record(session_id="s", final_tier=2, total_s=60.0))
    ended_at = NOW + timedelta(seconds=60)
    assert await store.get_session("default", "s", ended_at) is not None
    assert await store.get_session("default", "s", ended_at + timedelta(microseconds=1)) is None


async def insert_version(store: Store, version: PolicyVersion) -> None:
    values = {name: getattr(version, name) for name in version.__slots__}
    async with store.transaction() as connection:
        await connection.execute(insert(policy_versions), values)


async def stored_configs(store: Store) -> list[tuple[str, Any]]:
    async with store.transaction() as connection:
        return [tuple(row) for row in await connection.execute(select(configs.c.config_hash, configs.c.body))]


async def test_policy_versions_are_immutable(store: Store) -> None:
    first = PolicyVersion(name="default", version="1", created_at=NOW, body={"floor": 0.95}, author="ops")
    second = dataclasses.replace(first, version="2", created_at=NOW + timedelta(seconds=1), body={"floor": "0.9"})
    for each in (first, second):
        await insert_version(store, each)
    with pytest.raises(RowFault):
        await insert_version(store, dataclasses.replace(first, body={}))
    assert await store.get_policy_version("default", "1") == first
    assert await store.get_policy_version("default", "3") is None
    assert await store.list_policy_versions("default") == [second, first]


async def test_a_configuration_is_kept_once(store: Store) -> None:
    await store.put_config("abc", {"server.port": 8000}, NOW)
    await store.put_config("abc", {"server.port": 8000}, NOW)
    assert await stored_configs(store) == [("abc", {"server.port": 8000})]


async def test_retention_forgets_texts_first_and_rows_later(store: Store) -> None:
    old = make_record(prompt_text="secret", answer_text="answer")
    new = make_record(created_at=NOW + timedelta(days=1), prompt_text="fresh")
    await store.record(old)
    await store.record(new)
    assert await LogPruner(store).texts(NOW + timedelta(hours=1)) == 1
    found = await store.get_request(old.request_id)
    assert found is not None
    assert found.prompt_text is None
    assert found.answer_text is None
    assert await LogPruner(store).rows(NOW + timedelta(days=2)) == 2
    assert await store.get_request(new.request_id) is None
    assert await store.recent() == []


async def test_forgetting_many_does_not_hold_the_database(store: Store, database_url: str) -> None:
    """More rows than are deleted at once, while another server writes with little patience."""
    old = [make_record(prompt_text="x") for _ in range(2500)]
    await asyncio.gather(*(store.record(record) for record in old))
    async with Store(StoreConfig(url=database_url, busy_timeout_s=1)) as other:
        forgetting = asyncio.create_task(LogPruner(store).rows(NOW + timedelta(hours=1)))
        num_written = 0
        while not forgetting.done():
            await other.record(make_record(created_at=NOW + timedelta(days=1)))
            num_written += 1
        assert await forgetting == 2500
        assert num_written > 1
        assert len(await other.recent(limit=10_000)) == num_written


async def test_digests_match_across_restarts_and_differ_between_installations(database_url: str, tmp_path: Any) -> None:
    async with Store(StoreConfig(url=database_url)) as first:
        digest = first.digest("hello")
    async with Store(StoreConfig(url=database_url)) as again:
        assert again.digest("hello") == digest
        assert again.digest("hellp") != digest
    async with Store(StoreConfig(url=f"sqlite:///{tmp_path / 'other.db'}")) as other:
        assert other.digest("hello") != digest


async def test_a_closed_store_refuses(database_url: str) -> None:
    store = Store(StoreConfig(url=database_url))
    with pytest.raises(StoreClosed):
        await store.record(make_record())
    await store.open()
    await store.close()
    await store.close()
    with pytest.raises(StoreClosed):
        await store.record(make_record())


async def test_the_file_is_its_owners_alone(tmp_path: Any) -> None:
    path = tmp_path / "new" / "deep" / "suffice.db"
    async with Store(StoreConfig(url=f"sqlite:///{path}")) as store:
        await store.record(make_record())
    assert path.stat().st_mode & 0o077 == 0
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()


def test_pruning_from_the_command_line(
    database_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fill() -> None:
        async with Store(StoreConfig(url=database_url)) as store:
            for age_days in (1, 40, 400):
                created_at = datetime.now(UTC) - timedelta(days=age_days)
                await store.record(
                    make_record(created_at=created_at, prompt_text="p", session_id=str(age_days), final_tier=1)
                )

    asyncio.run(fill())
    monkeypatch.setenv("SUFFICE_DATABASE__URL", database_url)
    prune(None, texts_days=30, rows_days=365, sessions_days=90, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"texts": 2, "rows": 1, "sessions": 1}
    prune(None, texts_days=0, rows_days=None, sessions_days=None, as_json=False)
    assert capsys.readouterr().out == "1 texts forgotten\n"
    with pytest.raises(CommandError, match="--texts-days"):
        prune(None, texts_days=None, rows_days=None, sessions_days=None, as_json=False)
