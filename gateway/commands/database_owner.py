"""Makes sure that a command changes the database of the server it is meant for.

A command opens the database of its own configuration. In another folder, or without the server's ``--config``, that is
another one: its keys open nothing, and a SQLite file would even be made for them.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import httpx

from gateway.access.authenticator import USE, hash_key, make_key, shown_prefix
from gateway.commands.command_hint import hint
from gateway.commands.server_url import local_url
from gateway.config.settings import Settings
from gateway.failure_report import CommandError
from gateway.ids import uuid7
from gateway.store import migrate
from gateway.store.records import ApiKey
from gateway.store.store import Store
from gateway.store.urls import parse_database_url

_TIMEOUT_S = 5.0
_PROBE_LIVES_S = 60.0
_HELP = "Name the server's own configuration with --config, or its folder with SUFFICE_DATA_DIR"


async def require_database(settings: Settings) -> None:
    """Refuse to go on where no server has made the database yet.

    Raises
    ------
    CommandError
    """
    if await migrate.current(settings.database.url) is None:
        shown = parse_database_url(settings.database.url).shown
        raise CommandError(
            f"There is no database of Suffice at {shown}, so no server uses it. {_HELP}; "
            f"`{hint('keys', 'create', '--create', settings=settings)}` makes a new one."
        )


async def check_server(settings: Settings, store: Store) -> None:
    """Refuse to go on where the server at the configured address uses another database.

    It is shown a key that lives for this question alone: whatever else listens there learns nothing that opens a door.

    Raises
    ------
    CommandError
    """
    secret, now = make_key(), datetime.now(UTC)
    probe = ApiKey(
        key_id=uuid7(),
        name="probe",
        key_hash=hash_key(secret),
        prefix=shown_prefix(secret),
        created_at=now,
        scope=USE,
        expires_at=now + timedelta(seconds=_PROBE_LIVES_S),
    )
    server = settings.server
    url = local_url(server.host, server.port, server.root_path)
    await store.insert_key(probe)
    try:
        is_unknown = await _is_unknown(url, secret)
    finally:
        await store.delete_key(probe.key_id)
    if is_unknown:
        raise CommandError(
            f"The server at {url} uses another database than {store.shown_url}, so it would refuse the key; none was "
            f"made. {_HELP}, or make the key through the server (`{hint('admin', 'create-key')}`); --offline makes it "
            "here."
        )


async def _is_unknown(url: str, secret: str) -> bool:
    """Return whether a server of ours answers, and does not know the key."""
    try:
        async with httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False) as client:
            headers = {"authorization": f"Bearer {secret}"}
            response = await client.get(f"{url}/v1/models", headers=headers)
    except httpx.HTTPError:
        return False
    return response.status_code == 401 and "x-suffice-request-id" in response.headers
