"""Keys in both databases: made, changed one at a time, expired, last used."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta

import pytest

from gateway.store.errors import RecordRejected
from gateway.store.records import ApiKey
from gateway.store.store import Store
from tests.gateway.records import NOW, make_record


async def test_keys_live_and_die(store: Store) -> None:
    key = ApiKey(
        key_id="k1", name="laptop", key_hash="c" * 64, prefix="sk-ab", created_at=NOW, limits={"requests_per_minute": 5}
    )
    assert await store.count_active_keys() == 0
    await store.insert_key(key)
    assert await store.find_key("c" * 64) == key
    assert await store.find_key("d" * 64) is None
    assert await store.list_key_hashes(1) == {"c" * 64}
    assert await store.list_key_hashes(0) is None
    assert await store.count_active_keys() == 1
    with pytest.raises(RecordRejected):
        await store.insert_key(dataclasses.replace(key, key_id="k2"))
    assert await store.revoke_key("k1", NOW) is True
    assert await store.revoke_key("k1", NOW) is False
    assert await store.revoke_key("unknown", NOW) is False
    assert await store.list_keys() == [dataclasses.replace(key, revoked_at=NOW)]
    assert await store.count_active_keys() == 0


async def test_a_change_of_one_key_leaves_the_others(store: Store) -> None:
    keys = [
        ApiKey(key_id=each, name=each, key_hash=each * 64, prefix=each, created_at=NOW + timedelta(seconds=place))
        for place, each in enumerate("abc")
    ]
    for key in keys[::-1]:
        await store.insert_key(key)
    assert await store.list_keys() == keys
    await store.delete_key("b")
    assert await store.rotate_key("c", "d" * 64, "d")
    keys[1:] = [dataclasses.replace(keys[2], key_hash="d" * 64, prefix="d")]
    assert await store.list_keys() == keys
    assert await store.revoke_key("c", NOW)
    for key_id in ("b", "c", "unknown"):
        assert not await store.rotate_key(key_id, "e" * 64, "e"), "what is gone or revoked gets no other secret"
    assert await store.list_keys() == [keys[0], dataclasses.replace(keys[1], revoked_at=NOW)]


async def test_a_key_that_has_expired_is_not_active(store: Store) -> None:
    soon = datetime.now(UTC) + timedelta(hours=1)
    for key_id, expires_at in (("past", NOW), ("soon", soon), ("never", None)):
        await store.insert_key(
            ApiKey(key_id=key_id, name="n", key_hash=key_id, prefix="p", created_at=NOW, expires_at=expires_at)
        )
    assert await store.count_active_keys() == 2


async def test_a_key_knows_its_last_use_to_the_minute(store: Store) -> None:
    await store.insert_key(ApiKey(key_id="k1", name="n", key_hash="c" * 64, prefix="sk", created_at=NOW))
    for second in (0, 30, 59):
        await store.record(make_record(key_id="k1", created_at=NOW + timedelta(seconds=second)))
    (key,) = await store.list_keys()
    assert key.last_used_at == NOW
    await store.record(make_record(key_id="k1", created_at=NOW + timedelta(seconds=60)))
    (key,) = await store.list_keys()
    assert key.last_used_at == NOW + timedelta(seconds=60)
