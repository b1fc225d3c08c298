"""Keep what calls under way may cost before they begin.

Revision 0010. A process that ends in order leaves no row. The way down forgets what killed ones left.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "spending_leases",
        sa.Column("lease_id", sa.String(36), nullable=False),
        sa.Column("process", sa.Text, nullable=False),
        sa.Column("holder", sa.Text, nullable=False),
        sa.Column("opened_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("amount_nano_usd", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("lease_id", name="pk_spending_leases"),
    )


def downgrade() -> None:
    op.drop_table("spending_leases")
