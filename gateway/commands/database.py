"""``suffice db``: the schema's revision."""

from __future__ import annotations

import asyncio
from pathlib import Path

from gateway.commands.output import print_json
from gateway.config_show import shown_value
from gateway.settings import load_settings
from gateway.store import migrate


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
        state = "current" if found == needed else f"this version needs {needed}: run `suffice db upgrade`"
        print(f"{shown_value(url)} is at revision {found or 'none'}: {state}")
