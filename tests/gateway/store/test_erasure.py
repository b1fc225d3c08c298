"""What was erased, pruned or said to be gone is nowhere in the database any more, its files included.

Security review M5 and fault review S9.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import JSON, LargeBinary, String, func, select, update
from sqlalchemy.types import TypeEngine

from gateway.control.retention_keeper import RetentionKeeper
from gateway.ids import uuid7
from gateway.store.control import ControlStore
from gateway.store.control_records import Lease, ShadowDecision
from gateway.store.erasure import Eraser, ErasureTarget
from gateway.store.pruning import LogPruner
from gateway.store.store import Store
from gateway.store.tables import feedback, metadata, verification_texts, verifications
from tests.gateway.access.test_authenticator import add_key, bearer
from tests.gateway.admin.kit import Admin, administered
from tests.gateway.admin.kit import add_key as add_admin_key
from tests.gateway.harness import make_settings, running
from tests.gateway.records import NOW, make_record
from tests.gateway.verify.test_worker import ALL, until_done

LEASE = Lease(name="leader", holder="test", token=1, expires_at=datetime(2100, 1, 1, tzinfo=UTC))
CANARY = "kanarienvogel-7f3a9"

# What is deleted with a request, whichever way it is named. Everything in these tables goes as whole rows.
ERASED = {
    *("requests", "request_texts", "verifications", "verification_texts", "feedback", "gold_labels"),
    *("shadow_decisions", "sessions", "responses"),
}
# What holds no caller's text; a new text column must be put here, with a reason, or into a table of the above.
FREE = {
    # Named and written by administrators: keys, policies, what is active, and what was done about it.
    "api_keys": {"key_id", "name", "key_hash", "prefix", "tenant", "limits", "scope", "permissions"},
    "policy_versions": {"name", "version", "body", "author", "note"},
    "configs": {"config_hash", "body"},
    "secrets": {"name", "value"},
    "control": {"name", "value", "updated_by"},
    "admin_audit": {"audit_id", "key_id", "action", "subject", "before", "after", "remote"},
    "leases": {"name", "holder"},
    # Sums, estimates and the names of policies, routers, tenants and tiers; of requests at most their ids.
    "rollouts": {
        *("rollout_id", "router_version", "baseline_version", "status", "stage", "state", "reason", "history"),
    },
    "evaluations": {"evaluation_id", "kind", "subject", "body"},
    "alerts": {"alert_id", "kind", "severity", "subject", "body"},
    "retrain_runs": {
        *("run_id", "trigger", "reason", "status", "stage", "holder", "router_version", "evaluation_id", "error"),
    },
    "usage_days": {"token"},
    "spending_leases": {"lease_id", "process", "holder"},
    "daily_usage": {
        *("tenant", "key_id", "policy_name", "policy_version", "router_version", "domain", "model_served"),
    },
    # Learnt from many texts together; holds numbers by hashed or shipped words.
    "router_versions": {"version", "artifact", "card", "parent", "origin", "status", "note"},
}


def holds_text(kind: TypeEngine[Any]) -> bool:
    return isinstance(kind, String | JSON | LargeBinary)


def test_every_text_column_is_erased_or_free_of_callers_texts() -> None:
    """So that a new column fails until somebody decides."""
    assert set(metadata.tables) >= ERASED | set(FREE)
    found = {
        table.name: {column.name for column in table.c if holds_text(column.type)}
        for table in metadata.tables.values()
        if table.name not in ERASED
    }
    assert {name: columns for name, columns in found.items() if columns} == FREE


def read_files(folder: Path) -> list[str]:
    files = [each for each in folder.iterdir() if each.name.startswith("suffice.db")]
    assert any(each.name.endswith("-wal") for each in files), "with the server running"
    return [each.read_bytes().decode("latin-1") for each in files]


async def dump(store: Store, tmp_path: Path) -> str:
    """Everything that is there: files as they lie on the disk, tables as they are read."""
    found = []
    if store.dialect == "sqlite":
        found = await asyncio.to_thread(read_files, tmp_path)
    async with store.transaction() as connection:
        for table in metadata.tables.values():
            found += [repr(tuple(row)) for row in await connection.execute(select(table))]
    return "\n".join(found)


async def tell_everything(admin: Admin, headers: dict[str, str], tag: str, session: str) -> str:
    """Bring a text into every place that a caller can bring one to; returns the request's id."""
    client, store = admin.gateway.client, admin.gateway.parts.store
    body = {
        "model": "auto",
        "messages": [{"role": "system", "content": tag}, {"role": "user", "content": f"{tag} {tag * 500}"}],
        "user": tag,
        "stop": [f"{tag}-never"],
        "suffice": {"session_id": session, "max_tier": 1},
    }
    answer = await client.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    request_id = answer.headers["x-suffice-request-id"]
    asked = {"model": "auto", "input": tag, "store": True}
    kept = await client.post("/v1/responses", json=asked, headers=headers)
    assert kept.json()["store"], kept.text
    vectors = await client.post("/v1/embeddings", json={"model": "simple", "input": tag}, headers=headers)
    assert vectors.status_code == 200, vectors.text
    report = {
        "request_id": request_id,
        "kind": "reference",
        "reference": tag,
        "comment": tag,
        "metadata": {tag: tag},
        "idempotency_key": f"{session}-once",
    }
    kept = await client.post("/v1/feedback", json=report, headers=headers)
    assert kept.status_code == 200, kept.text
    decision = ShadowDecision(
        request_id=request_id,
        router_version="r",
        created_at=datetime.now(UTC),
        policy_name="default",
        tier=1,
        shadow_tier=1,
        sufficiency=(),
        novelty=0.0,
    )
    await ControlStore(store).add_shadow_decisions([decision])
    async with store.transaction() as connection:
        which = verifications.c.request_id == request_id
        changed = await connection.execute(update(verifications).where(which).values(error=f"refused: {tag}"))
        assert changed.rowcount == 1
        assert (await connection.execute(select(func.count()).select_from(verification_texts))).scalar()
    return str(request_id)


@pytest.fixture
async def admin(tmp_path: Path, database_url: str) -> AsyncIterator[Admin]:
    options = ALL | {"verification__worker": False, "log__prompts": "full", "auth__required": "always"}
    async with administered(tmp_path, **(options | {"database__url": database_url})) as opened:
        opened.headers, _ = await add_admin_key(opened.gateway, scope="admin")
        yield opened


@pytest.mark.parametrize("by", ["tenant", "key_id", "session_id", "request_id"])
async def test_what_was_erased_is_nowhere(admin: Admin, tmp_path: Path, by: str) -> None:
    store = admin.gateway.parts.store
    secret, key = await add_key(admin.gateway, "theirs")
    unknown = {"model": CANARY, "messages": [{"role": "user", "content": CANARY}]}
    refused = await admin.gateway.client.post("/v1/chat/completions", json=unknown, headers=bearer(secret))
    assert refused.status_code == 404
    other_secret, _ = await add_key(admin.gateway, "ours")
    request_id = await tell_everything(admin, bearer(secret), CANARY, CANARY)
    kept_id = await tell_everything(admin, bearer(other_secret), "stays", "stays")
    assert CANARY in await dump(store, tmp_path)
    values = {"tenant": "theirs", "key_id": key.key_id, "session_id": CANARY, "request_id": request_id}
    response = await admin("POST", "/erasures", json={by: values[by]})
    assert response.status_code == 200, response.text
    deleted = response.json()["deleted"]
    assert response.json()["is_scrubbed"]
    if by in ("session_id", "request_id"):
        # Requests outside the conversation are another matter: here the one for vectors.
        rest = await admin("POST", "/erasures", json={"key_id": key.key_id})
        assert rest.status_code == 200
    least = {"request_texts", "verifications", "verification_texts", "feedback", "shadow_decisions", "sessions"}
    least |= {"responses"} if by in ("tenant", "key_id") else set()
    assert {name for name, num in deleted.items() if num} >= least
    assert CANARY not in await dump(store, tmp_path)
    # Once more is no error, and the other tenant has lost nothing.
    again = (await admin("POST", "/erasures", json={by: values[by]})).json()["deleted"]
    assert set(again.values()) == {0}
    assert (await store.get_request(kept_id)).answer_text
    assert (await dump(store, tmp_path)).count("stays") > 10
    entries = (await admin.get("/audit"))["data"]
    assert [each["action"] for each in entries[:2]] == ["erase", "erase"]
    assert entries[-1]["after"]["deleted"] == deleted
    if by in ("key_id", "request_id"):
        assert entries[0]["subject"].endswith(values[by])


async def test_a_tenant_may_narrow_a_conversation(admin: Admin) -> None:
    store = admin.gateway.parts.store
    ids = {}
    for tenant in ("one", "two"):
        secret, _ = await add_key(admin.gateway, tenant)
        ids[tenant] = await tell_everything(admin, bearer(secret), tenant, "same")
    assert (await admin("POST", "/erasures", json={"tenant": "one", "session_id": "same"})).status_code == 200
    assert await store.get_request(ids["one"]) is None
    assert await store.get_request(ids["two"]) is not None
    assert await store.get_session("one", "same") is None
    assert await store.get_session("two", "same") is not None


async def test_a_conversation_goes_with_its_agents(admin: Admin) -> None:
    """Those that work for it are named after it, whatever its own name is made of."""
    store = admin.gateway.parts.store
    secret, _ = await add_key(admin.gateway, "theirs")
    for erased, kept in (("a", "ab/1"), ("10%_\\", "10x_\\/1"), ("A/1", "a/1/2")):
        ids = {}
        for name in (erased, f"{erased}/1", f"{erased}/1/2", kept):
            ids[name] = await tell_everything(admin, bearer(secret), name, name)
        assert (await admin("POST", "/erasures", json={"session_id": erased})).status_code == 200
        left = {name for name, request_id in ids.items() if await store.get_request(request_id) is not None}
        assert left == {kept}


async def put_report(store: Store, request_id: str, key_id: str) -> None:
    name = uuid7()
    values = {"feedback_id": name, "idempotency_key": name, "created_at": NOW, "kind": "rating", "metadata": {}}
    async with store.transaction() as connection:
        await connection.execute(
            feedback.insert().values(request_id=request_id, tenant="ours", key_id=key_id, **values)
        )


@pytest.mark.parametrize(
    ("target", "deleted"),
    [
        (ErasureTarget(key_id="reader"), {"feedback": 1}),
        (ErasureTarget(key_id="asker"), {"requests": 1, "feedback": 2}),
        (ErasureTarget(session_id="pruned"), {"sessions": 2}),
        (ErasureTarget(tenant="ours", session_id="pruned"), {"sessions": 1}),
        (ErasureTarget(tenant="ours"), {"requests": 1, "feedback": 2, "sessions": 1}),
        (ErasureTarget(tenant="theirs"), {"sessions": 1}),
        (ErasureTarget(request_id="r"), {"requests": 1, "feedback": 2}),
    ],
    ids=str,
)
async def test_what_hangs_on_no_row_of_theirs_goes_as_well(
    store: Store, target: ErasureTarget, deleted: dict[str, int]
) -> None:
    """A key's reports about another key's request, and conversations whose rows were pruned; nobody else's."""
    for tenant in ("ours", "theirs"):
        await store.record(make_record(tenant=tenant, session_id="pruned", final_tier=1, created_at=NOW))
    await LogPruner(store).rows(NOW + timedelta(seconds=1))
    await store.record(make_record(request_id="r", tenant="ours", key_id="asker", created_at=NOW))
    for key_id in ("asker", "reader"):
        await put_report(store, "r", key_id)
    counts = await Eraser(store).erase(target)
    assert {name: num for name, num in counts.items() if num} == deleted
    assert set((await Eraser(store).erase(target)).values()) == {0}


async def test_the_audit_log_knows_names_again_and_does_not_tell_them(store: Store) -> None:
    assert ErasureTarget(request_id="r").subject(store) == "request r"
    assert ErasureTarget(key_id="k").subject(store) == "key k"
    tenant, session = store.digest("acme")[:16], store.digest("chat")[:16]
    assert ErasureTarget(tenant="acme").subject(store) == f"tenant {tenant}"
    assert ErasureTarget(session_id="chat").subject(store) == f"session {session}"
    assert ErasureTarget(tenant="acme", session_id="chat").subject(store) == f"tenant {tenant} session {session}"


@pytest.mark.parametrize("body", [{}, {"tenant": "a", "key_id": "b"}, {"session_id": "a", "request_id": "b"}])
async def test_one_thing_must_be_named(admin: Admin, body: dict[str, str]) -> None:
    await admin.error("POST", "/erasures", 400, "invalid_value", "tenant", json=body)


async def test_pruned_texts_are_nowhere_and_rows_stay(admin: Admin, tmp_path: Path) -> None:
    store = admin.gateway.parts.store
    secret, _ = await add_key(admin.gateway, "theirs")
    request_id = await tell_everything(admin, bearer(secret), CANARY, "a session")
    later = datetime.now(UTC) + timedelta(seconds=5)
    assert await LogPruner(store).texts(datetime.now(UTC) - timedelta(days=1)) == 0
    assert CANARY in await dump(store, tmp_path)
    assert await LogPruner(store).texts(later) >= 3
    assert await store.scrub()
    left = await dump(store, tmp_path)
    assert CANARY not in left
    assert (await store.get_request(request_id)).prompt_digest
    async with store.transaction() as connection:
        (check,) = (await connection.execute(select(verifications))).mappings()
        assert (check["status"], check["error"]) == ("expired", None), "it has nothing left to read"
        assert (await connection.execute(select(verification_texts))).all() == []


async def test_a_finished_check_leaves_nothing_in_the_write_ahead_log(tmp_path: Path, sqlite_url: str) -> None:
    """Its texts are said to be gone with its end; copies stayed in the file (fault review S9)."""
    settings = make_settings(tmp_path, **(ALL | {"verification__worker": False, "database__url": sqlite_url}))
    async with running(settings) as gateway:
        store, verifier = gateway.parts.store, gateway.parts.verifier
        keeper = RetentionKeeper(store, settings.log, settings.monitor.window_days)
        await gateway.chat(CANARY * 500, suffice={"max_tier": 1})
        assert CANARY in await dump(store, tmp_path)
        await keeper.scrub(LEASE)
        assert CANARY in await dump(store, tmp_path), "the check is still to be made"
        await verifier.look()
        assert await verifier.work_once()
        await until_done(store)
        await keeper.scrub(LEASE)
        assert CANARY not in await dump(store, tmp_path)
