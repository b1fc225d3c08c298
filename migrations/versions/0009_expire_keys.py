"""Keep when a key expires.

Revision 0009. Keys from before do not. The way down revokes what would expire, or would only read: the version before
knows neither, and would let them in for ever, or not at all.
"""

from __future__ import annotations

from datetime import UTC, datetime

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_keys = sa.table(
    "api_keys",
    sa.column("scope", sa.Text),
    sa.column("revoked_at", sa.DateTime(timezone=True)),
    sa.column("expires_at", sa.DateTime(timezone=True)),
)


def upgrade() -> None:
    op.add_column("api_keys", sa.Column("expires_at", sa.DateTime(timezone=True)))


def downgrade() -> None:
    is_unknown = _keys.c.expires_at.is_not(None) | (_keys.c.scope == "admin-read")
    revoked = sa.update(_keys).where(_keys.c.revoked_at.is_(None), is_unknown)
    op.execute(revoked.values(revoked_at=datetime.now(UTC)))
    op.drop_column("api_keys", "expires_at")
