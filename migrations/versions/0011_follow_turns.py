"""Keep which conversation a request continues, at which turn and step, and whose decision it followed.

Revision 0011. Rows from before know none of it: each of them is a turn of its own.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_INDEXED = ("turn_id", "call_digest")
_COLUMNS = (
    ("conversation", sa.String(32)),
    ("turn", sa.Integer()),
    ("step", sa.Integer()),
    ("turn_id", sa.String(36)),
    ("call_digest", sa.String(32)),
)


def upgrade() -> None:
    for name, kind in _COLUMNS:
        op.add_column("requests", sa.Column(name, kind))
    for name in _INDEXED:
        has_value = sa.text(f"{name} IS NOT NULL")
        op.create_index(f"ix_requests_{name}", "requests", [name], sqlite_where=has_value, postgresql_where=has_value)
    op.add_column("verifications", sa.Column("turn_id", sa.String(36)))


def downgrade() -> None:
    op.drop_column("verifications", "turn_id")
    for name in _INDEXED:
        op.drop_index(f"ix_requests_{name}", "requests")
    for name, _ in reversed(_COLUMNS):
        op.drop_column("requests", name)
