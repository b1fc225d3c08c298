"""Moves the schema's revision and deletes what is old: ``suffice db``."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

from gateway.commands.command_hint import hint
from gateway.commands.result_printer import print_json
from gateway.config.display import shown_value
from gateway.config.settings import load_settings
from gateway.config.store_section import StoreConfig
from gateway.failure_report import USAGE_STATUS, CommandError
from gateway.ids import uuid7
from gateway.store import migrate
from gateway.store.admin_writes import AdminWrites
from gateway.store.control_records import AuditEntry
from gateway.store.erasure import Eraser, ErasureTarget
from gateway.store.pruning import LogPruner
from gateway.store.store import Store


def upgrade(config: Path | None) -> None:
    """Migrate up and say where the database is now."""
    url = load_settings(config, need_secrets=False).database.url
    reached = asyncio.run(migrate.upgrade(url))
    print(f"{shown_value(url)} is at revision {reached}")


def current(config: Path | None, *, as_json: bool) -> None:
    """Say where the database is and where this version needs it."""
    url = load_settings(config, need_secrets=False).database.url
    found, needed = asyncio.run(migrate.current(url)), migrate.head()
    if as_json:
        print_json({"database": shown_value(url), "revision": found, "needed": needed, "is_current": found == needed})
    else:
        state = "current" if found == needed else f"this version needs {needed}: run `{hint('db', 'upgrade')}`"
        print(f"{shown_value(url)} is at revision {found or 'none'}: {state}")


def prune(
    config: Path | None, *, texts_days: int | None, rows_days: int | None, sessions_days: int | None, as_json: bool
) -> None:
    """Forget old texts, rows and sessions, and say how many.

    Raises
    ------
    CommandError
        Nothing was named.
    """
    if texts_days is None and rows_days is None and sessions_days is None:
        raise CommandError("name --texts-days, --rows-days or --sessions-days.", status=USAGE_STATUS)
    settings = load_settings(config, need_secrets=False)
    forgotten = asyncio.run(_prune(settings.database, texts_days, rows_days, sessions_days))
    if as_json:
        print_json(forgotten)
    else:
        print(", ".join(f"{num} {name}" for name, num in forgotten.items()) + " forgotten")


async def _prune(
    config: StoreConfig, texts_days: int | None, rows_days: int | None, sessions_days: int | None
) -> dict[str, int]:
    now = datetime.now(UTC)
    forgotten: dict[str, int] = {}
    async with Store(config) as store:
        pruner = LogPruner(store)
        if texts_days is not None:
            forgotten["texts"] = await pruner.texts(now - timedelta(days=texts_days))
        if rows_days is not None:
            forgotten["rows"] = await pruner.rows(now - timedelta(days=rows_days))
        if sessions_days is not None:
            forgotten["sessions"] = await pruner.sessions(now - timedelta(days=sessions_days))
        await store.scrub()
    return forgotten


def erase(config: Path | None, target: ErasureTarget, *, as_json: bool) -> None:
    """Erase what the log holds of a tenant, key, conversation or request, and say from which table how many rows.

    Raises
    ------
    CommandError
        Nothing was named, or two things.
    """
    if not target.is_sound:
        raise CommandError("name one of --tenant, --key, --session (with or without --tenant) and --request.", status=2)
    settings = load_settings(config, need_secrets=False)
    counts, is_scrubbed = asyncio.run(_erase(settings.database, target))
    if as_json:
        print_json({"deleted": counts, "is_scrubbed": is_scrubbed})
        return
    print(", ".join(f"{num} of {name}" for name, num in counts.items()) + " erased")
    if not is_scrubbed:
        print("the write-ahead log was in use and may still hold earlier contents: run this again")


async def _erase(config: StoreConfig, target: ErasureTarget) -> tuple[dict[str, int], bool]:
    async with Store(config) as store:
        counts = await Eraser(store).erase(target)
        entry = AuditEntry(
            audit_id=uuid7(),
            created_at=datetime.now(UTC),
            action="db erase",
            subject=target.subject(store),
            after={"deleted": counts},
        )
        await AdminWrites(store).audit(entry)
        return counts, await store.scrub()
