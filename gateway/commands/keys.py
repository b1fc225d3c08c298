"""Makes API keys, shown once and stored as hashes, lists and revokes them: ``suffice keys``."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from gateway.access.authenticator import SCOPES, hash_key, make_key, shown_prefix
from gateway.access.key_limits import read_limits
from gateway.access.key_permissions import named_permissions, read_permissions
from gateway.commands.command_hint import hint
from gateway.commands.database_owner import check_server, require_database
from gateway.commands.expiry import moment_of
from gateway.commands.result_printer import print_json, print_table
from gateway.config.settings import Settings, load_settings
from gateway.errors import InvalidRequest
from gateway.failure_report import USAGE_STATUS, CommandError
from gateway.ids import uuid7
from gateway.store.admin_queries import AdminQueries
from gateway.store.records import ApiKey
from gateway.store.store import Store
from gateway.store.urls import parse_database_url

T = TypeVar("T")


def create(
    config: Path | None,
    *,
    name: str,
    tenant: str,
    scope: str,
    limits: Mapping[str, Any],
    permissions: Mapping[str, Any],
    expires: str | None,
    is_new: bool,
    offline: bool,
    as_json: bool,
) -> None:
    """Store a new key's hash and print the key.

    Raises
    ------
    CommandError
        The scope, a limit, a permission or the expiry is not one; or the database is not the running server's.
    """
    if scope not in SCOPES:
        raise CommandError(f"--scope is {scope!r}; expected one of {', '.join(SCOPES)}.", status=USAGE_STATUS)
    now = datetime.now(UTC)
    expires_at = None if expires is None else moment_of(expires, now)
    settings = load_settings(config, need_secrets=False)
    if not is_new:
        asyncio.run(require_database(settings))
    try:
        checked = read_limits(dict(limits), "limits")
        bounds = read_permissions(dict(permissions), "permissions")
        policies = _with_store(settings, _policy_names) if bounds.allowed_policies else []
        bound = named_permissions(bounds, settings.ladder, {*policies, *settings.policies}, scope)
    except InvalidRequest as error:
        raise CommandError(str(error), status=USAGE_STATUS) from error
    if not offline:
        _with_store(settings, lambda store: check_server(settings, store))
    secret = make_key()
    key = ApiKey(
        key_id=uuid7(),
        name=name,
        key_hash=hash_key(secret),
        prefix=shown_prefix(secret),
        created_at=now,
        tenant=tenant,
        scope=scope,
        limits=checked.stored(),
        permissions=bound,
        expires_at=expires_at,
    )
    _with_store(settings, lambda store: store.insert_key(key))
    if as_json:
        shown = {"id": key.key_id, "name": name, "tenant": tenant, "scope": scope, "limits": dict(key.limits)}
        print_json({"key": secret} | shown | {"permissions": bound, "expires_at": expires_at})
    else:
        print(secret)
    _say_where(f"{key.prefix}… was made", settings)


def list_all(config: Path | None, *, as_json: bool) -> None:
    """Print what is known of every key; never the key."""
    keys = _with_store(_existing(config), lambda store: store.list_keys())
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
        key = await _named(store, written)
        await store.revoke_key(key.key_id, datetime.now(UTC))
        return key

    settings = _existing(config)
    key = _with_store(settings, work)
    print(f"{key.prefix}… ({key.name}) is revoked")
    _say_where("It was changed", settings)


def rotate(config: Path | None, written: str) -> None:
    """Give the one key that is named another secret, and print it; all else of the key stays.

    Raises
    ------
    CommandError
        No key, or more than one, is named so; or it is revoked.
    """
    secret = make_key()

    async def work(store: Store) -> ApiKey:
        key = await _named(store, written)
        if not await store.rotate_key(key.key_id, hash_key(secret), shown_prefix(secret)):
            raise CommandError(f"{key.prefix}… is revoked, and a revoked key stays so. Make another one.")
        return key

    settings = _existing(config)
    key = _with_store(settings, work)
    print(secret)
    _say_where(f"{key.prefix}… ({key.name}) ended, {shown_prefix(secret)}… took its place", settings)


async def _named(store: Store, written: str) -> ApiKey:
    named = [key for key in await store.list_keys() if _is_named(key, written)]
    if len(named) != 1:
        raise CommandError(f"{written!r} names {len(named)} keys; `{hint('keys', 'list')}` shows them.")
    return named[0]


def _is_named(key: ApiKey, written: str) -> bool:
    is_prefix = len(written) >= len(key.prefix) and key.prefix == written.rstrip("…")
    return key.key_id == written or is_prefix or key.key_hash == hash_key(written)


def _existing(config: Path | None) -> Settings:
    settings = load_settings(config, need_secrets=False)
    asyncio.run(require_database(settings))
    return settings


def _say_where(what: str, settings: Settings) -> None:
    """Name the database on standard error: standard output is the key alone, for scripts."""
    print(f"{what} in {parse_database_url(settings.database.url).shown}", file=sys.stderr)


async def _policy_names(store: Store) -> list[str]:
    return await AdminQueries(store).policy_names()


def _with_store(settings: Settings, work: Callable[[Store], Awaitable[T]]) -> T:
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
        "permissions": dict(key.permissions),
        "created_at": key.created_at,
        "last_used_at": key.last_used_at,
        "revoked_at": key.revoked_at,
        "expires_at": key.expires_at,
    }


def _history(key: ApiKey) -> tuple[str, str, str]:
    return _moment(key.created_at), _moment(key.last_used_at), _state(key)


def _state(key: ApiKey) -> str:
    if key.revoked_at is not None:
        return f"revoked {_moment(key.revoked_at)}"
    if key.expires_at is None:
        return "active"
    return f"{'expired' if key.expires_at <= datetime.now(UTC) else 'until'} {_moment(key.expires_at)}"


def _moment(moment: datetime | None) -> str:
    return f"{moment:%Y-%m-%d %H:%M}" if moment else ""
