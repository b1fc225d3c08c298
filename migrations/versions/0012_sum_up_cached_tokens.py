"""Sum up cached tokens by day, which have a price of their own.

Revision 0012. Days that were summed up without them are summed up again.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("DELETE FROM usage_days")
    op.execute("DELETE FROM daily_usage")
    op.add_column("daily_usage", sa.Column("cached_tokens", sa.BigInteger(), nullable=False, server_default="0"))
    with op.batch_alter_table("daily_usage") as table:
        table.alter_column("cached_tokens", server_default=None)


def downgrade() -> None:
    op.drop_column("daily_usage", "cached_tokens")
