"""Makes API keys, shown once and stored as hashes, lists and revokes them: ``suffice keys``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from gateway.access.authenticator import SCOPES, hash_key, make_key, shown_prefix
from gateway.access.key_limits import read_limits
from gateway.commands.result_printer import print_json, print_table
from gateway.config.settings import load_settings
from gateway.errors import InvalidRequest
from gateway.failure_report import USAGE_STATUS, CommandError
from gateway.ids import uuid7
from gateway.store.records import ApiKey
from gateway.store.store import Store

T = TypeVar("T")


def create(
    config: Path | None, *, name: str, tenant: str, scope: str, limits: Mapping[str, Any], as_json: bool
) -> None:
    """Store a new key's hash and print the key.

    Raises
    ------
    CommandError
        The scope or a limit is not one.
    """
    if scope not in SCOPES:
        raise CommandError(f"--scope is {scope!r}; expected one of {', '.join(SCOPES)}.", status=USAGE_STATUS)
    try:
        checked = read_limits(dict(limits), "limits")
    except InvalidRequest as error:
        raise CommandError(str(error), status=USAGE_STATUS) from error
    secret = make_key()
    key = ApiKey(
        key_id=uuid7(),
        name=name,
        key_hash=hash_key(secret),
        prefix=shown_prefix(secret),
        created_at=datetime.now(UTC),
        tenant=tenant,
        scope=scope,
        limits=checked.stored(),
    )
    _with_store(config, lambda store: store.insert_key(key))
    if as_json:
        shown = {"id": key.key_id, "name": name, "tenant": tenant, "scope": scope, "limits": dict(key.limits)}
        print_json({"key": secret} | shown)
    else:
        print(secret)


def list_all(config: Path | None, *, as_json: bool) -> None:
    """Print what is known of every key; never the key."""
    keys = _with_store(config, lambda store: store.list_keys())
    if as_json:
        print_json([_public(key) for key in keys])
        return
    rows = [(each.key_id, f"{each.prefix}…", each.name, each.tenant, each.scope, *_history(each)) for each in keys]
    print_table(("id", "key", "name", "tenant", "scope", "created", "last used", "state"), rows)


def revoke(config: Path | None, written: str) -> None:
    """Revoke the one key that an id, a prefix or the key itself names.

    Raises
    ------
    CommandError
        No key, or more than one, is named so.
    """

    async def work(store: Store) -> ApiKey:
        named = [key for key in await store.list_keys() if _is_named(key, written)]
        if len(named) != 1:
            raise CommandError(f"{written!r} names {len(named)} keys; `suffice keys list` shows them.")
        await store.revoke_key(named[0].key_id, datetime.now(UTC))
        return named[0]

    key = _with_store(config, work)
    print(f"{key.prefix}… ({key.name}) is revoked")


def _is_named(key: ApiKey, written: str) -> bool:
    is_prefix = len(written) >= len(key.prefix) and key.prefix == written.rstrip("…")
    return key.key_id == written or is_prefix or key.key_hash == hash_key(written)


def _with_store(config: Path | None, work: Callable[[Store], Awaitable[T]]) -> T:
    settings = load_settings(config, need_secrets=False)

    async def run() -> T:
        async with Store(settings.database) as store:
            return await work(store)

    return asyncio.run(run())


def _public(key: ApiKey) -> dict[str, object]:
    return {
        "id": key.key_id,
        "prefix": key.prefix,
        "name": key.name,
        "tenant": key.tenant,
        "scope": key.scope,
        "limits": dict(key.limits),
        "created_at": key.created_at,
        "last_used_at": key.last_used_at,
        "revoked_at": key.revoked_at,
    }


def _history(key: ApiKey) -> tuple[str, str, str]:
    state = f"revoked {_moment(key.revoked_at)}" if key.revoked_at else "active"
    return _moment(key.created_at), _moment(key.last_used_at), state


def _moment(moment: datetime | None) -> str:
    return f"{moment:%Y-%m-%d %H:%M}" if moment else ""
