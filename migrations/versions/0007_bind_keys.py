"""Keep the policies, tiers and regions that a key may use.

Revision 0007. Keys from before may use all, as they could. The way down drops the bindings and the limits on
concurrency, which the version before would refuse to read; a key that is bound is revoked, since it would open more.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
_NEW_LIMITS = ("max_concurrency", "max_tenant_concurrency")
_keys = sa.table(
    "api_keys",
    sa.column("key_id", sa.Text),
    sa.column("limits", _JSON),
    sa.column("permissions", _JSON),
    sa.column("revoked_at", sa.DateTime(timezone=True)),
)


def upgrade() -> None:
    op.add_column("api_keys", sa.Column("permissions", _JSON, nullable=False, server_default="{}"))


def downgrade() -> None:
    connection = op.get_bind()
    for row in connection.execute(sa.select(_keys)).mappings().all():
        values: dict[str, Any] = {"limits": {k: v for k, v in row["limits"].items() if k not in _NEW_LIMITS}}
        if row["permissions"] and row["revoked_at"] is None:
            values["revoked_at"] = datetime.now(UTC)
        connection.execute(sa.update(_keys).where(_keys.c.key_id == row["key_id"]).values(values))
    op.drop_column("api_keys", "permissions")
