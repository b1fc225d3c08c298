"""How Alembic reaches the database: on the connection it is given, inside that connection's transaction.

``gateway.store.migrate`` gives the connection. A developer who writes a new revision runs
``alembic -c migrations/alembic.ini -x url=sqlite:////tmp/scratch.db revision --autogenerate -m "Add ..."``.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from alembic import context
from alembic.autogenerate.api import AutogenContext
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import create_async_engine

from gateway.store.tables import UtcDateTime, metadata
from gateway.store.urls import parse_database_url


def _render(kind: str, item: Any, _context: AutogenContext) -> str | Literal[False]:
    """Revisions are frozen: they name SQLAlchemy's types, not ours, which may change."""
    return "sa.DateTime(timezone=True)" if kind == "type" and isinstance(item, UtcDateTime) else False


def _migrate(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=metadata,
        compare_type=True,
        render_item=_render,
        # SQLite cannot alter most things in place; batch mode copies the table instead.
        render_as_batch=True,
        transactional_ddl=True,
    )
    with context.begin_transaction():
        context.run_migrations()


async def _migrate_url(url: str) -> None:
    engine = create_async_engine(parse_database_url(url).sqlalchemy_url, hide_parameters=True)
    try:
        async with engine.begin() as connection:
            await connection.run_sync(_migrate)
    finally:
        await engine.dispose()


_connection: Connection | None = context.config.attributes.get("connection")
if _connection is not None:
    _migrate(_connection)
else:
    _url = context.get_x_argument(as_dictionary=True).get("url")
    if not isinstance(_url, str):
        raise SystemExit("Name the database: -x url=sqlite:////tmp/scratch.db")
    asyncio.run(_migrate_url(_url))
