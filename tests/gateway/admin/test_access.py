"""Who may administer, and what is written down of it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from gateway.access.authenticator import make_key
from tests.gateway.admin.kit import PREFIX, Admin, add_key, administered
from tests.gateway.harness import assert_error, make_settings, running


async def test_loopback_is_open_until_there_is_an_admin_key(tmp_path: Path, database_url: str) -> None:
    async with administered(tmp_path, database__url=database_url) as admin:
        assert (await admin("GET", "/tiers")).status_code == 200
        user, _ = await add_key(admin.gateway)
        assert (await admin("GET", "/tiers")).status_code == 200, "a key for use closes nothing"
        await admin.error("GET", "/tiers", 403, "wrong_key_scope", headers=user)
        holder, key = await add_key(admin.gateway, scope="admin")
        await admin.error("GET", "/tiers", 401, "invalid_api_key")
        await admin.error("PUT", "/kill-switch", 401, "invalid_api_key", json={"on": True})
        assert (await admin("GET", "/tiers", headers=holder)).status_code == 200
        assert not (await admin.get("/kill-switch", headers=holder))["on"]
        await admin("DELETE", f"/keys/{key.key_id}", headers=holder)
        await admin.error("GET", "/tiers", 401, "invalid_api_key", headers=holder)


@pytest.mark.slow
async def test_a_revoked_admin_key_leaves_the_administration_closed(tmp_path: Path, database_url: str) -> None:
    """Whoever can revoke the last one would else open the doors for all (security review M7)."""
    async with administered(tmp_path, database__url=database_url) as admin:
        holder, key = await add_key(admin.gateway, scope="admin")
        assert (await admin("DELETE", f"/keys/{key.key_id}", headers=holder)).status_code == 200
        for _ in range(2):
            for method, path in _operations(admin):
                await admin.error(method, path, 401, "invalid_api_key")
            await admin.gateway.parts.store.revoke_key(key.key_id, datetime.now(UTC))
        another, _ = await add_key(admin.gateway, scope="admin")
        assert (await admin("GET", "/tiers", headers=another)).status_code == 200


@pytest.mark.parametrize(
    ("proxies", "forwarded", "remote"),
    [
        ((), "203.0.113.9", "127.0.0.1"),
        (("10.0.0.1",), "203.0.113.9", "127.0.0.1"),
        (("127.0.0.1",), "203.0.113.9", "203.0.113.9"),
        (("127.0.0.0/8", "10.0.0.0/8"), "198.51.100.7, 203.0.113.9, 10.1.2.3", "203.0.113.9"),
    ],
)
async def test_only_a_trusted_proxy_says_who_called(
    tmp_path: Path, proxies: tuple[str, ...], forwarded: str, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any program on loopback could put another's address into the audit log (security review L5)."""
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    async with administered(tmp_path, auth__required="always", server__trusted_proxies=proxies) as admin:
        admin.headers, _ = await add_key(admin.gateway, scope="admin")
        await admin("PUT", "/kill-switch", json={"on": True}, headers={"x-forwarded-for": forwarded})
        (entry,) = (await admin.get("/audit"))["data"]
        assert entry["remote"] == remote


@pytest.mark.parametrize(
    "options", [{"auth__required": "always"}, {"auth__required": "never", "server__host": "0.0.0.0"}]
)
async def test_elsewhere_a_key_is_wanted_from_the_start(tmp_path: Path, options: dict[str, str]) -> None:
    async with administered(tmp_path, **options) as admin:
        for headers in ({}, {"authorization": f"Bearer {make_key()}"}, {"authorization": "Bearer word"}):
            await admin.error("GET", "/keys", 401, "invalid_api_key", headers=headers)
        holder, _ = await add_key(admin.gateway, scope="admin")
        assert (await admin("GET", "/keys", headers=holder)).status_code == 200


async def test_an_admin_key_is_not_for_use(tmp_path: Path) -> None:
    async with administered(tmp_path) as admin:
        holder, _ = await add_key(admin.gateway, scope="admin")
        body = {"model": "auto", "messages": [{"role": "user", "content": "hi"}]}
        for path, sent in (
            ("/v1/chat/completions", body),
            ("/v1/completions", {"model": "auto", "prompt": "x"}),
            ("/v1/embeddings", {"model": "auto", "input": "x"}),
        ):
            await admin.error("POST", path, 403, "wrong_key_scope", json=sent, headers=holder)
        await admin.error("GET", "/v1/models", 403, "wrong_key_scope", headers=holder)


async def test_web_pages_may_not_administer_an_open_server(tmp_path: Path) -> None:
    async with administered(tmp_path, server__cors_origins=("https://app.example",)) as admin:
        for origin in ("https://evil.example", "https://app.example", "null"):
            await admin.error(
                "PUT", "/kill-switch", 403, "origin_refused", json={"on": True}, headers={"origin": origin}
            )
        assert (await admin("GET", "/tiers", headers={"origin": "http://localhost:9"})).status_code == 200


async def test_a_listed_page_may_administer_with_a_key(tmp_path: Path) -> None:
    page = {"origin": "https://app.example"}
    options = {"server__cors_origins": ("https://app.example",), "auth__required": "always"}
    async with administered(tmp_path, **options) as admin:
        for method in ("PUT", "DELETE"):
            asking = page | {"access-control-request-method": method, "access-control-request-headers": "if-match"}
            asked = await admin.gateway.client.options(f"{PREFIX}/policies/careful", headers=asking)
            assert asked.status_code == 200
            assert method in asked.headers["access-control-allow-methods"]
            elsewhere = await admin.gateway.client.options(
                f"{PREFIX}/policies/careful", headers=asking | {"origin": "https://evil.example"}
            )
            assert "access-control-allow-origin" not in elsewhere.headers
        admin.headers = (await add_key(admin.gateway, scope="admin"))[0] | page
        _, tag = await admin.body("careful")
        gone = await admin("DELETE", "/policies/careful", headers={"if-match": tag})
        assert (gone.status_code, gone.headers["access-control-allow-origin"]) == (200, page["origin"])


async def test_what_was_done_and_tried_is_written_down(tmp_path: Path, database_url: str) -> None:
    async with administered(tmp_path, database__url=database_url) as admin:
        admin.headers, key = await add_key(admin.gateway, scope="admin")
        await admin("PUT", "/kill-switch", json={"on": True, "reason": "a test"})
        await admin.error("PUT", "/kill-switch", 400, "invalid_type", "on", json={"on": "yes"})
        await admin.error(
            "PUT",
            "/kill-switch",
            412,
            "precondition_failed",
            "If-Match",
            json={"on": False},
            headers={"if-match": '"77"'},
        )
        await admin("POST", "/keys", json={"name": "k"})
        entries = (await admin.get("/audit"))["data"]
        assert [each["status"] for each in entries] == [201, 412, 400, 200]
        assert {each["key_id"] for each in entries} == {key.key_id}
        assert {each["remote"] for each in entries} == {"127.0.0.1"}
        first = entries[-1]
        assert first["action"] == "set_kill_switch"
        assert (first["before"]["on"], first["after"]) == (False, {"on": True, "reason": "a test"})
        assert "key_hash" not in str(entries)
        only = (await admin.get("/audit?action=create_key"))["data"]
        assert [each["action"] for each in only] == ["create_key"]


async def test_every_operation_wants_an_admin_key(tmp_path: Path) -> None:
    async with administered(tmp_path, auth__required="always") as admin:
        user, _ = await add_key(admin.gateway)
        for method, path in _operations(admin):
            await admin.error(method, path, 401, "invalid_api_key")
            await admin.error(method, path, 403, "wrong_key_scope", headers=user)
        assert (await admin.gateway.client.get("/openapi.json")).status_code == 200
        rows = await admin.gateway.parts.store.list_keys()
        assert len(rows) == 1


async def test_it_can_be_switched_off(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path, admin__enabled=False)) as gateway:
        assert_error(await gateway.client.get(f"{PREFIX}/tiers"), 404, "unknown_url")
        document = (await gateway.client.get("/openapi.json")).json()
        assert not any(path.startswith("/admin") for path in document["paths"])


def _operations(admin: Admin) -> list[tuple[str, str]]:
    return [
        (method.upper(), path.removeprefix(PREFIX).replace("{", "").replace("}", ""))
        for path, methods in admin.document["paths"].items()
        if path.startswith(PREFIX)
        for method in methods
    ]
