"""The audit log says what was done, in the transaction that did it; of two who rest on one version, one is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gateway.ids import uuid7
from gateway.store.admin_writes import AdminWrites, Edit
from gateway.store.control_records import Alert, AuditEntry
from gateway.store.records import ApiKey
from gateway.store.store import Store
from gateway.store.translate import RowFault
from tests.gateway.admin.kit import Admin, administered
from tests.gateway.admin.test_reports import raise_alert

NOW = datetime.now(UTC)


def entry(audit_id: str) -> AuditEntry:
    return AuditEntry(audit_id=audit_id, created_at=NOW, action="a", subject="s")


async def race(admin: Admin, method: str, paths: Sequence[str], tag: str, bodies: Sequence[Any]) -> list[int]:
    """Statuses of changes made at once that rest on the same version, in the order of the bodies."""
    answers = await asyncio.gather(
        *(admin(method, path, json=body, headers={"if-match": tag}) for path, body in zip(paths, bodies, strict=True))
    )
    return [each.status_code for each in answers]


async def test_of_two_edits_of_a_policy_one_wins_and_both_are_written_down(tmp_path: Path, database_url: str) -> None:
    async with administered(tmp_path, database__url=database_url) as admin:
        for floor in (0.91, 0.81, 0.71):
            body, tag = await admin.body()
            bodies = [body | {"quality_floor": floor}, body | {"quality_floor": floor + 0.01}]
            statuses = await race(admin, "PUT", ["/policies/default"] * 2, tag, bodies)
            assert sorted(statuses) == [200, 412]
            won = bodies[statuses.index(200)]
            assert (await admin.body())[0]["quality_floor"] == won["quality_floor"]
            found = {each["status"]: each for each in (await admin.get("/audit?limit=2"))["data"]}
            assert found[200]["before"] == body
            assert found[200]["after"]["quality_floor"] == won["quality_floor"]
            assert (found[412]["before"], found[412]["after"]) == (None, None)
            assert found[412]["subject"].startswith("policy default@")


async def test_of_two_edits_of_a_key_one_wins_and_both_are_written_down(tmp_path: Path, database_url: str) -> None:
    async with administered(tmp_path, database__url=database_url) as admin:
        made = await admin("POST", "/keys", json={"limits": {"requests_per_minute": 5}})
        path, tag = f"/keys/{made.json()['id']}", made.headers["etag"]
        assert (await admin("GET", path)).headers["etag"] == tag
        bodies = [{"limits": {"requests_per_minute": each}} for each in (6, 7)]
        statuses = await race(admin, "PUT", [f"{path}/limits"] * 2, tag, bodies)
        assert sorted(statuses) == [200, 412]
        assert (await admin.get(path))["limits"] == bodies[statuses.index(200)]["limits"]
        found = {each["status"]: each for each in (await admin.get("/audit?action=limit_key"))["data"]}
        assert found[200]["before"] == {"limits": {"requests_per_minute": 5}}
        assert found[200]["after"] == bodies[statuses.index(200)]
        assert (found[412]["before"], found[412]["after"]) == (None, None)
        await admin.error("DELETE", path, 412, "precondition_failed", "If-Match", headers={"if-match": tag})
        changed = (await admin("GET", path)).headers["etag"]
        rotated = await admin("POST", f"{path}/rotate", headers={"if-match": changed})
        assert rotated.headers["etag"] not in (tag, changed)
        assert (await admin("DELETE", path, headers={"if-match": rotated.headers["etag"]})).status_code == 200


async def test_an_unconditional_change_is_written_down_from_what_it_found(tmp_path: Path, database_url: str) -> None:
    """Each entry's ``before`` is the ``after`` of the change that came before it, however many come at once."""
    async with administered(tmp_path, database__url=database_url) as admin:
        made = (await admin("POST", "/keys", json={})).json()
        await asyncio.gather(
            *(admin("PUT", "/kill-switch", json={"on": True, "reason": str(n)}) for n in range(6)),
            *(
                admin("PUT", f"/keys/{made['id']}/limits", json={"limits": {"tokens_per_minute": n}})
                for n in range(1, 7)
            ),
        )
        for action in ("set_kill_switch", "limit_key"):
            found = (await admin.get(f"/audit?action={action}"))["data"]
            befores, afters = [str(each["before"]) for each in found], [str(each["after"]) for each in found]
            assert len(set(befores)) == len(set(afters)) == 6
            assert len(set(afters) - set(befores)) == 1, "all but the last were found by another"


async def test_the_entry_has_the_status_of_the_answer(tmp_path: Path) -> None:
    async with administered(tmp_path) as admin:
        await admin("POST", "/keys", json={})
        await admin("POST", "/router/retrain", json={"reason": "now"})
        alert = await raise_alert(admin)
        await asyncio.gather(*(admin("POST", f"/alerts/{alert}/resolve") for _ in range(2)))
        found = (await admin.get("/audit"))["data"]
        assert sorted((each["action"], each["status"]) for each in found) == [
            ("create_key", 201),
            ("resolve_alert", 200),
            ("resolve_alert", 409),
            ("retrain_router", 202),
        ]


async def test_no_change_without_its_entry(store: Store) -> None:
    """An entry that cannot be written takes its change back."""
    writes = AdminWrites(store)
    taken = uuid7()
    await writes.audit(entry(taken))
    key = ApiKey(key_id="k", name="n", key_hash="a" * 64, prefix="sk", created_at=NOW)
    with pytest.raises(RowFault):
        await writes.insert_key(key, entry(taken))
    assert await store.list_keys() == []
    await writes.insert_key(key, entry(uuid7()))

    def revoke(found: ApiKey) -> Edit:
        assert found == key
        return {"revoked_at": NOW}, entry(taken)

    with pytest.raises(RowFault):
        await writes.change_key("k", revoke)
    assert (await store.list_keys())[0].revoked_at is None
    assert await writes.change_key("none", revoke) is None


async def test_no_entry_without_its_change(store: Store) -> None:
    writes = AdminWrites(store)

    def refuse(found: Alert) -> Edit:
        raise AssertionError("there is no such alert")

    assert await writes.change_alert("none", refuse) is None
    async with store.transaction() as connection:
        count = await connection.exec_driver_sql("SELECT count(*) FROM admin_audit")
        assert count.scalar() == 0
