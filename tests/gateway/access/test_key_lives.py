"""Keys that expire, and keys that only read."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gateway.access import authenticator as module
from gateway.access.authenticator import Authenticator, hash_key, make_key
from gateway.admin.api import admin_operations
from gateway.commands.expiry import moment_of
from gateway.config.sections import AdminConfig, AuthConfig, ServerConfig
from gateway.errors import Unauthenticated
from gateway.failure_report import CommandError
from gateway.store.records import ApiKey
from tests.gateway.admin.kit import PREFIX, add_key, administered
from tests.gateway.harness import assert_error

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


async def test_an_expired_key_is_refused_with_a_sentence(tmp_path: Path, database_url: str) -> None:
    async with administered(tmp_path, database__url=database_url) as admin:
        store, client = admin.gateway.parts.store, admin.gateway.client
        header, key = await add_key(admin.gateway)
        secret = make_key()
        past = datetime.now(UTC) - timedelta(seconds=1)
        await store.insert_key(dataclasses.replace(key, key_id="old", key_hash=hash_key(secret), expires_at=past))
        assert (await client.get("/v1/models", headers=header)).status_code == 200
        refused = await client.get("/v1/models", headers={"authorization": f"Bearer {secret}"})
        assert f"expired at {past:%Y-%m-%d %H:%M} UTC" in assert_error(refused, 401, "invalid_api_key")["message"]
        assert await store.count_active_keys() == 1
        later = (datetime.now(UTC) + timedelta(days=1)).isoformat()
        made = await admin("POST", "/keys", json={"expires_at": later})
        assert (await client.get("/v1/models", headers={"authorization": f"Bearer {made.json()['key']}"})).is_success
        listed = {each["id"]: each["expires_at"] for each in (await admin.get("/keys"))["data"]}
        assert datetime.fromisoformat(listed[made.json()["id"]]) == datetime.fromisoformat(later)
        assert listed[key.key_id] is None
        for wrong in (past.isoformat(), "tomorrow", "2030-01-31", 7):
            bad = await admin("POST", "/keys", json={"expires_at": wrong})
            assert (bad.status_code, bad.json()["error"]["param"]) == (400, "expires_at")


async def test_a_remembered_key_expires_on_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long keys are remembered: the cache ends with the key."""
    secret, passed_s = make_key(), [0.0]

    class Moments(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:
            return NOON + timedelta(seconds=passed_s[0])

    class Keys:
        async def find_key(self, key_hash: str) -> ApiKey | None:
            ends = NOON + timedelta(seconds=100)
            return ApiKey(key_id="k", name="n", key_hash=key_hash, prefix="p", created_at=NOON, expires_at=ends)

        async def list_key_hashes(self, limit: int) -> frozenset[str] | None:
            raise AssertionError("nobody floods")

    monkeypatch.setattr(module, "datetime", Moments)
    config = AuthConfig(required="always", key_cache_s=3600)
    authenticator = Authenticator(config, ServerConfig(host="::"), Keys(), clock=lambda: passed_s[0])
    for passed_s[0] in (0.0, 50.0, 99.9):
        assert (await authenticator.check(f"Bearer {secret}")).key_id == "k"
    passed_s[0] = 100.0
    with pytest.raises(Unauthenticated, match="expired at 2026-01-31 12:01 UTC"):
        await authenticator.check(f"Bearer {secret}")


async def test_a_reading_key_may_every_get_and_nothing_else(tmp_path: Path) -> None:
    """Every operation of the table, so that a new one is of one kind or the other."""
    async with administered(tmp_path, auth__required="always") as admin:
        admin.headers, _ = await add_key(admin.gateway, scope="admin-read")
        client = admin.gateway.client
        operations = admin_operations(AdminConfig())
        writes = {each.name for each in operations if each.is_write}
        assert 0 < len(writes) < len(operations)
        for operation in operations:
            path = PREFIX + operation.path.replace("{", "").replace("}", "")
            answer = await client.request(operation.method, path, headers=admin.headers, content=b"{}")
            if operation.is_write:
                assert_error(answer, 403, "wrong_key_scope")
            else:
                assert answer.status_code not in (401, 403), operation.name
        entries = (await admin.get("/audit", headers=admin.headers))["data"]
        assert not [each for each in entries if each["status"] != 403 and each["action"] in writes]
        assert_error(await client.get("/v1/models", headers=admin.headers), 403, "wrong_key_scope")
        assert (await client.get("/metrics", headers=admin.headers)).status_code == 200


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("30d", NOON + timedelta(days=30)),
        ("12h", NOON + timedelta(hours=12)),
        ("2w", NOON + timedelta(weeks=2)),
        ("2026-02-01", datetime(2026, 2, 1, tzinfo=UTC)),
        ("2026-01-31T13:00:00+00:30", datetime(2026, 1, 31, 12, 30, tzinfo=UTC)),
    ],
)
def test_expiry_is_written_as_a_span_or_a_moment(written: str, expected: datetime) -> None:
    assert moment_of(written, NOON) == expected


@pytest.mark.parametrize(
    "written", ["", "0d", "30", "d", "-1d", "soon", "2026-01-31", "999999w", "0001-01-01T00:00+14:00"]
)
def test_an_expiry_that_is_none_is_refused(written: str) -> None:
    with pytest.raises(CommandError, match="expected a time to come"):
        moment_of(written, NOON)
