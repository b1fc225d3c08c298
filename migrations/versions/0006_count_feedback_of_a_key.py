"""Count feedback against its key's requests a minute: find it by key and time.

Revision 0006.
"""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_feedback_key_id_created_at", "feedback", ["key_id", "created_at"])


def downgrade() -> None:
    op.drop_index("ix_feedback_key_id_created_at", "feedback")
