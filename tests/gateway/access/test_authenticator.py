"""Keys: who gets in where, what a revoked key does, what a web page may not do."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gateway.access.authenticator import KEY_PREFIX, Authenticator, Caller, hash_key, make_key, shown_prefix
from gateway.config.sections import AuthConfig, ServerConfig
from gateway.errors import Unauthenticated
from gateway.ids import uuid7
from gateway.store.records import ApiKey
from tests.gateway.harness import Gateway, assert_error, make_settings, running

CHAT = {"model": "auto", "messages": [{"role": "user", "content": "hi"}]}
READ_ONLY = ("/v1/models", "/v1/models/auto", f"/v1/requests/{uuid7()}")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def add_key(gateway: Gateway, tenant: str = "default") -> tuple[str, ApiKey]:
    secret = make_key()
    key = ApiKey(
        key_id=uuid7(),
        name="test",
        key_hash=hash_key(secret),
        prefix=shown_prefix(secret),
        created_at=datetime.now(UTC),
        tenant=tenant,
    )
    await gateway.parts.store.insert_key(key)
    return secret, key


async def post(gateway: Gateway, headers: Mapping[str, str] | None = None) -> Any:
    return await gateway.client.post("/v1/chat/completions", json=CHAT, headers=headers)


def test_a_key_is_long_random_and_stored_only_as_a_hash() -> None:
    keys = {make_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith(KEY_PREFIX) and len(key) >= len(KEY_PREFIX) + 43 for key in keys)
    key = keys.pop()
    assert len(hash_key(key)) == 64
    assert key[len(shown_prefix(key)) :] not in hash_key(key)
    assert len(shown_prefix(key)) < len(key) / 2


async def test_a_loopback_server_is_open_to_any_word_but_not_to_a_wrong_key_of_its_own(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path)) as gateway:
        assert (await post(gateway)).status_code == 200
        assert (await post(gateway, bearer("anything"))).status_code == 200
        assert_error(await post(gateway, bearer(make_key())), 401, "invalid_api_key")
        secret, key = await add_key(gateway, tenant="acme")
        assert (await post(gateway, bearer(secret))).status_code == 200
        newest = (await gateway.rows())[0]
        assert (newest.key_id, newest.tenant) == (key.key_id, "acme")


async def test_elsewhere_a_key_is_needed_on_every_path_that_says_or_costs_anything(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path, auth__required="always")) as gateway:
        refused = await post(gateway)
        assert_error(refused, 401, "invalid_api_key")
        assert refused.headers["www-authenticate"] == "Bearer"
        for headers in (bearer("x"), bearer(make_key()), {"authorization": "Basic x"}, bearer("k" * 5000)):
            assert_error(await post(gateway, headers), 401, "invalid_api_key")
        for path in READ_ONLY:
            assert_error(await gateway.client.get(path), 401, "invalid_api_key")
        for path in ("/v1/completions", "/v1/embeddings"):
            assert_error(await gateway.client.post(path, json={}), 401, "invalid_api_key")
        assert (await gateway.client.get("/healthz")).status_code == 200
        secret, _ = await add_key(gateway)
        assert (await post(gateway, bearer(secret))).status_code == 200
        assert (await post(gateway, {"authorization": f"bearer  {secret}"})).status_code == 200
        assert (await post(gateway, {"x-api-key": secret})).status_code == 200
        assert_error(await post(gateway, {"x-api-key": make_key()}), 401, "invalid_api_key")


async def test_a_revoked_key_ends_with_the_cache(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path, auth__required="always", auth__key_cache_s=0)) as gateway:
        secret, key = await add_key(gateway)
        assert (await post(gateway, bearer(secret))).status_code == 200
        await gateway.parts.store.revoke_key(key.key_id, datetime.now(UTC))
        error = assert_error(await post(gateway, bearer(secret)), 401, "invalid_api_key")
        assert "revoked" in error["message"]
        assert secret not in error["message"]


async def test_a_remembered_key_costs_no_look_up_until_its_time_is_over() -> None:
    secret = make_key()
    asked: list[str] = []
    moments_s = [0.0, 5.0, 9.9, 10.0, 10.0, 10.0]

    class Keys:
        async def find_key(self, key_hash: str) -> ApiKey | None:
            asked.append(key_hash)
            if key_hash != hash_key(secret):
                return None
            moment = datetime.now(UTC)
            return ApiKey(key_id="k", name="n", key_hash=key_hash, prefix="p", created_at=moment)

        async def list_key_hashes(self, limit: int) -> frozenset[str] | None:
            raise AssertionError("nobody floods")

    config = AuthConfig(required="always", key_cache_s=10)
    authenticator = Authenticator(config, ServerConfig(host="::"), Keys(), clock=lambda: moments_s.pop(0))
    for _ in range(3):
        assert (await authenticator.check(f"Bearer {secret}")).key_id == "k"
    assert len(asked) == 1
    await authenticator.check(f"Bearer {secret}")
    assert len(asked) == 2
    for _ in range(2):
        with pytest.raises(Unauthenticated):
            await authenticator.check(f"Bearer {make_key()}")
    assert len(asked) == 4, "wrong keys must not be remembered"


async def test_wrong_keys_cost_few_look_ups_and_little_memory_and_a_new_one_works_at_once() -> None:
    """Each refusal cost a read of the database (security review L13)."""
    secret, made = make_key(), set[str]()
    asked: list[str] = []
    listed: list[int] = []
    now_s, most_listed = 0.0, 100

    class Keys:
        async def find_key(self, key_hash: str) -> ApiKey | None:
            asked.append(key_hash)
            if key_hash not in made:
                return None
            return ApiKey(key_id="k", name="n", key_hash=key_hash, prefix="p", created_at=datetime.now(UTC))

        async def list_key_hashes(self, limit: int) -> frozenset[str] | None:
            listed.append(len(made))
            return frozenset(made) if len(made) <= most_listed else None

    config = AuthConfig(required="always", key_cache_s=10)
    authenticator = Authenticator(config, ServerConfig(host="::"), Keys(), clock=lambda: now_s)

    async def is_good(key: str) -> bool:
        try:
            await authenticator.check(f"Bearer {key}")
        except Unauthenticated:
            return False
        return True

    assert not any([await is_good(secret) for _ in range(100)])
    assert len(asked) == 1
    for odd in (
        "x",
        "k" * 60,
        KEY_PREFIX,
        KEY_PREFIX + "short",
        KEY_PREFIX + "é" * 43,
        f"{secret}\xa0",
        f"{secret}\x85",
    ):
        assert not await is_good(odd), odd
    assert len(asked) == 1, "what cannot be a key is not looked for"
    made.add(hash_key(secret))
    assert not await is_good(secret)
    now_s += 1
    assert await is_good(secret), "known to be wrong for a second, no longer"
    other = make_key()
    assert not await is_good(other)
    made.add(hash_key(other))
    authenticator.forget(hash_key(other))
    assert await is_good(other), "at once where it was changed"
    before = len(asked)
    assert not any([await is_good(make_key()) for _ in range(5000)])
    assert len(authenticator._refused) <= 4096
    assert await is_good(secret)
    assert asked.count(hash_key(secret)) == 2, "wrong keys push no good one out"
    assert len(asked) - before < 20
    assert len(listed) == 1, "keys of which each is another are held against all there are"
    newest = make_key()
    made.add(hash_key(newest))
    authenticator.forget(hash_key(newest))
    assert await is_good(newest), "at once where it was made, in the flood too"
    elsewhere = make_key()
    made.add(hash_key(elsewhere))
    assert not await is_good(elsewhere)
    now_s += 1
    assert await is_good(elsewhere)
    now_s += 1
    before, most_listed = len(asked), 0
    assert not any([await is_good(make_key()) for _ in range(100)])
    assert len(asked) - before > 90, "too many to list: each is looked for"
    wrong = [make_key() for _ in range(4097)]
    assert not any([await is_good(key) for key in wrong])
    before = len(asked)
    assert not any([await is_good(key) for key in wrong[1:]])
    assert len(asked) == before, "so many are remembered"
    assert not await is_good(wrong[0])
    assert len(asked) == before + 1, "and not one more"
    now_s += 2
    before, most_listed, listed[:] = len(asked), 100, []
    assert not await is_good(make_key())
    assert (len(asked) - before, listed) == (1, []), "the flood is over"


async def test_wrong_keys_that_come_at_once_cost_no_more() -> None:
    """Whoever waits for an answer of the database is counted already."""
    asked, listed, answered = list[str](), list[int](), asyncio.Event()
    good = make_key()

    class Keys:
        async def find_key(self, key_hash: str) -> ApiKey | None:
            asked.append(key_hash)
            await answered.wait()
            if key_hash != hash_key(good):
                return None
            return ApiKey(key_id="k", name="n", key_hash=key_hash, prefix="p", created_at=datetime.now(UTC))

        async def list_key_hashes(self, limit: int) -> frozenset[str] | None:
            listed.append(limit)
            await answered.wait()
            return frozenset({hash_key(good)})

    authenticator = Authenticator(AuthConfig(required="always"), ServerConfig(host="::"), Keys(), clock=lambda: 0.0)
    keys = [*(make_key() for _ in range(300)), good]
    checks = [asyncio.ensure_future(authenticator.check(f"Bearer {key}")) for key in keys]
    for _ in range(5):
        await asyncio.sleep(0)
    answered.set()
    *wrong, right = await asyncio.gather(*checks, return_exceptions=True)
    assert all(isinstance(each, Unauthenticated) for each in wrong)
    assert isinstance(right, Caller)
    assert len(asked) == 20 + 1
    assert len(listed) == 1


@pytest.mark.slow
async def test_only_blanks_of_http_are_cut_from_a_key(tmp_path: Path) -> None:
    """A byte that is a blank to Unicode alone is part of what was sent (fault review S9)."""
    async with running(make_settings(tmp_path, auth__required="always")) as gateway:
        secret, _ = await add_key(gateway)
        for byte in range(0x80, 0x100):
            for sent in (b"Bearer " + secret.encode() + bytes([byte]), b"Bearer " + bytes([byte]) + secret.encode()):
                answer = await gateway.client.get("/v1/models", headers={b"authorization": sent})
                assert answer.status_code in (400, 401), (byte, sent)
        assert (await gateway.client.get("/v1/models", headers=bearer(f" {secret}"))).status_code == 200


async def test_one_tenants_request_is_nobody_elses(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path, auth__required="always")) as gateway:
        mine, _ = await add_key(gateway, tenant="a")
        other, _ = await add_key(gateway, tenant="a")
        request_id = (await post(gateway, bearer(mine))).headers["x-suffice-request-id"]
        path = f"/v1/requests/{request_id}"
        assert (await gateway.client.get(path, headers=bearer(mine))).status_code == 200
        assert_error(await gateway.client.get(path, headers=bearer(other)), 404, "request_not_found")


async def test_web_pages_may_not_use_an_open_server(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path)) as gateway:
        for origin in ("https://evil.example", "null", "http://192.168.0.3"):
            assert_error(await post(gateway, {"origin": origin}), 403, "origin_refused")
        assert (await post(gateway, {"origin": "http://localhost:3000"})).status_code == 200
    async with running(make_settings(tmp_path, server__cors_origins=("https://app.example",))) as gateway:
        response = await post(gateway, {"origin": "https://app.example"})
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "https://app.example"
        assert_error(await post(gateway, {"origin": "https://evil.example"}), 403, "origin_refused")
