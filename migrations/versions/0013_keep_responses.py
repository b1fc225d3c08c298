"""Keep responses for those who go on from them.

Revision 0013. The way down forgets them.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "responses",
        sa.Column("request_id", sa.String(36), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("previous_id", sa.String(36)),
        sa.Column("num_chained", sa.Integer, nullable=False),
        sa.Column("chained_bytes", sa.BigInteger, nullable=False),
        sa.Column("conversation", sa.String(32)),
        sa.Column("regions", sa.JSON().with_variant(JSONB(), "postgresql")),
        sa.Column("input", sa.Text, nullable=False),
        sa.Column("response", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("request_id", name="pk_responses"),
        sa.ForeignKeyConstraint(
            ["request_id"], ["requests.request_id"], ondelete="CASCADE", name="fk_responses_request_id"
        ),
    )
    op.create_index("ix_responses_created_at", "responses", ["created_at"])


def downgrade() -> None:
    op.drop_table("responses")
