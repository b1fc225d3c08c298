"""The schema's history: up, down and up with rows in the tables, by several processes at once, never past the code."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import func, insert, inspect, select, text

from gateway.config.store_section import StoreConfig
from gateway.store import migrate, tables
from gateway.store.engines import make_engine
from gateway.store.errors import SchemaMismatch, StoreUnavailable, StoreUrlInvalid
from gateway.store.store import Store
from gateway.store.urls import parse_database_url
from tests.gateway.records import make_record, make_response

MIGRATIONS = Path(migrate.__file__).parents[2] / "migrations"


def all_revisions() -> list[str]:
    """Oldest first."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    return [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()][::-1]


async def run_sql(url: str, *statements: Any) -> list[Any]:
    """Results of each statement, all in one transaction."""
    engine = make_engine(parse_database_url(url), StoreConfig(url=url))
    try:
        async with engine.begin() as connection:
            return [await connection.execute(statement) for statement in statements]
    finally:
        await engine.dispose()


async def table_names(url: str) -> set[str]:
    engine = make_engine(parse_database_url(url), StoreConfig(url=url))
    try:
        async with engine.connect() as connection:
            return set(await connection.run_sync(lambda sync: inspect(sync).get_table_names()))
    finally:
        await engine.dispose()


async def fill(url: str) -> None:
    """At least one row in every table."""
    now = datetime.now(UTC)
    async with Store(StoreConfig(url=url, migrate=False)) as store:
        record = make_record(session_id="s", final_tier=1, prompt_text="p")
        await store.record(record, response=make_response(record))
        await store.put_config("hash", {}, now)
    keys = insert(tables.api_keys).values(
        key_id="k", name="n", key_hash="h", prefix="p", tenant="t", created_at=now, limits={}
    )
    policies = insert(tables.policy_versions).values(name="p", version="1", created_at=now, body={}, author="", note="")
    sums = {column.name: 0 for column in tables.daily_usage.c if not column.nullable}
    names = ("tenant", "policy_name", "policy_version", "router_version", "domain")
    days = [
        insert(tables.usage_days).values(day=now.date(), token="t", is_complete=True),
        insert(tables.daily_usage).values(**sums | dict.fromkeys(names, "") | {"day": now.date()}),
    ]
    await run_sql(url, keys, policies, *days, *verification_rows(record.request_id, now), *control_rows(now))


def verification_rows(request_id: str, now: datetime) -> list[Any]:
    """One row for each of the tables beside the log."""
    names = ("direction", "stratum", "tenant", "domain", "policy_name", "policy_version", "router_version", "status")
    job: dict[str, Any] = dict.fromkeys(names, "")
    job |= {"verification_id": "v", "request_id": request_id, "created_at": now, "tier": 1, "against_tier": 2}
    job |= {"inclusion_probability": 0.1, "num_attempts": 0, "scores": {}, "cost_nano_usd": 0}
    about = {"request_id": request_id, "created_at": now}
    return [
        insert(tables.verifications).values(**job),
        insert(tables.verification_texts).values(verification_id="v", prompt="p", sampling={}, answer="a"),
        insert(tables.feedback).values(
            feedback_id="f", tenant="t", idempotency_key="i", kind="rating", metadata={}, **about
        ),
        insert(tables.gold_labels).values(gold_id="g", tier=1, source="admin", label=1.0, note="", **about),
    ]


def control_rows(now: datetime) -> list[Any]:
    """One row for each of the tables that steer what is served."""
    run = {"status": "", "stage": "", "holder": ""}
    return [
        insert(tables.control).values(name="generation", value={}, version=1, updated_at=now, updated_by=""),
        insert(tables.router_versions).values(
            version="r", created_at=now, artifact=b"npz", card={}, parent="", origin="", status="", note=""
        ),
        insert(tables.rollouts).values(
            rollout_id="o",
            router_version="r",
            baseline_version="",
            status="",
            stage="",
            share=0.1,
            state={},
            started_at=now,
            updated_at=now,
            reason="",
            history=[],
        ),
        insert(tables.shadow_decisions).values(
            request_id="q",
            router_version="r",
            created_at=now,
            policy_name="",
            tier=1,
            shadow_tier=2,
            sufficiency=[],
            novelty=0.0,
        ),
        insert(tables.evaluations).values(evaluation_id="e", created_at=now, kind="", subject="", body={}),
        insert(tables.alerts).values(alert_id="a", created_at=now, kind="", severity="", subject="", body={}),
        insert(tables.leases).values(name="leader", holder="h", expires_at=now, token=1),
        insert(tables.spending_leases).values(
            lease_id="s", process="server", holder="h", opened_at=now, expires_at=now, amount_nano_usd=1
        ),
        insert(tables.retrain_runs).values(run_id="t", created_at=now, trigger="cli", progress=0.0, **run),
        insert(tables.admin_audit).values(audit_id="u", created_at=now, action="", subject="", status=200, remote=""),
    ]


def test_the_code_names_the_newest_revision() -> None:
    revisions = all_revisions()
    assert revisions[-1] == tables.SCHEMA_REVISION == migrate.head()
    assert len(revisions) == len(set(revisions)) == len(list((MIGRATIONS / "versions").glob("[0-9]*.py")))


async def test_tables_of_code_and_database_agree(database_url: str) -> None:
    await migrate.check(database_url)


async def test_check_notices_a_difference(database_url: str) -> None:
    await run_sql(database_url, text("ALTER TABLE sessions ADD COLUMN stray INTEGER"))
    with pytest.raises(Exception, match="stray"):
        await migrate.check(database_url)


@pytest.mark.slow
async def test_every_step_goes_up_down_and_up_with_rows(empty_database_url: str) -> None:
    url = empty_database_url
    assert await migrate.current(url) is None
    revisions = all_revisions()
    for place, revision in enumerate(revisions):
        assert await migrate.upgrade(url, revision) == revision
        if revision == tables.SCHEMA_REVISION:
            await fill(url)
        below = revisions[place - 1] if place else None
        assert await migrate.downgrade(url, below or "base") == below
        assert await migrate.upgrade(url, revision) == revision
    await migrate.check(url)
    assert await migrate.current(url) == tables.SCHEMA_REVISION


async def test_down_to_nothing_leaves_nothing(database_url: str) -> None:
    await fill(database_url)
    assert await migrate.downgrade(database_url, "base") is None
    assert await table_names(database_url) <= {"alembic_version"}


async def test_upgrading_a_current_database_changes_nothing(database_url: str) -> None:
    await fill(database_url)
    assert await migrate.upgrade(database_url) == tables.SCHEMA_REVISION
    for table in tables.metadata.sorted_tables:
        (result,) = await run_sql(database_url, select(func.count()).select_from(table))
        assert result.scalar() >= 1, table.name


@pytest.mark.slow
async def test_servers_starting_at_once_migrate_once(empty_database_url: str) -> None:
    """Processes, as in a rolling start; each opens a store and writes one row."""
    program = (
        "import asyncio, sys\n"
        "from gateway.config.store_section import StoreConfig\n"
        "from gateway.store.store import Store\n"
        "from tests.gateway.records import make_record\n"
        "async def main():\n"
        "    async with Store(StoreConfig(url=sys.argv[1])) as store:\n"
        "        await store.record(make_record())\n"
        "        print(store.digest('same'))\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", program, empty_database_url]
    root = MIGRATIONS.parent
    env = os.environ | {"PYTHONPATH": str(root)}
    processes = [
        await asyncio.create_subprocess_exec(
            *command, cwd=root, env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        for _ in range(4)
    ]
    outputs = await asyncio.gather(*(process.communicate() for process in processes))
    assert [process.returncode for process in processes] == [0] * 4, [err for _, err in outputs]
    # One of them made the digest key; the others found it.
    assert len({out for out, _ in outputs}) == 1
    async with Store(StoreConfig(url=empty_database_url, migrate=False)) as store:
        assert len(await store.recent()) == 4


async def test_concurrent_upgrades_in_one_process(empty_database_url: str) -> None:
    reached = await asyncio.gather(*(migrate.upgrade(empty_database_url) for _ in range(4)))
    assert reached == [tables.SCHEMA_REVISION] * 4


async def test_a_database_that_cannot_be_migrated_is_named(tmp_path: Path) -> None:
    text_file = tmp_path / "text.db"
    text_file.write_text("no database at all, but a text that is longer than its header" * 20)
    with socket.socket() as nobody_listens:
        nobody_listens.bind(("127.0.0.1", 0))
        absent = f"postgresql://postgres@127.0.0.1:{nobody_listens.getsockname()[1]}/postgres"
        for url in (f"sqlite:///{text_file}", absent):
            for work in (migrate.upgrade, migrate.check):
                with pytest.raises(StoreUnavailable) as refused:
                    await work(url)
                assert refused.value.database == parse_database_url(url).shown


async def test_a_newer_database_is_refused(database_url: str) -> None:
    await run_sql(database_url, text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(SchemaMismatch, match="9999") as refused:
        async with Store(StoreConfig(url=database_url)):
            pass
    assert "newer version has been here" in str(refused.value)
    assert await migrate.current(database_url) == "9999"


async def test_asking_a_missing_file_does_not_make_it(tmp_path: Path) -> None:
    assert await migrate.current(f"sqlite:///{tmp_path / 'absent.db'}") is None
    assert os.listdir(tmp_path) == []


async def test_migrating_to_nonsense_is_refused() -> None:
    with pytest.raises(StoreUrlInvalid):
        await migrate.upgrade("mysql://localhost/x")


async def test_a_key_of_the_version_before_opens_all_and_a_bound_one_goes_down_revoked(database_url: str) -> None:
    """What the version before cannot read or keep is taken away; nothing it would open wider stays open."""
    url, now = database_url, datetime.now(UTC)
    plain = {"name": "n", "prefix": "p", "tenant": "t", "created_at": now, "limits": {"max_concurrency": 4}}
    bound = {"permissions": {"allowed_tiers": ["simple"]}}
    add = insert(tables.api_keys)
    free = add.values(key_id="a", key_hash="a", **plain)
    ends = add.values(key_id="c", key_hash="c", **plain, expires_at=now)
    await run_sql(url, free, add.values(key_id="b", key_hash="b", **plain, **bound), ends)
    assert await migrate.downgrade(url, "0006") == "0006"
    (rows,) = await run_sql(url, text("SELECT key_id, limits, revoked_at FROM api_keys ORDER BY key_id"))
    (name, limits, free_end), (_, _, bound_end), (_, _, expired_end) = rows.all()
    assert (name, "max_concurrency" in str(limits), free_end) == ("a", False, None)
    assert None not in (bound_end, expired_end)
    await migrate.upgrade(url)
    async with Store(StoreConfig(url=url)) as store:
        assert [(key.limits, key.permissions) for key in await store.list_keys()] == [({}, {})] * 3
