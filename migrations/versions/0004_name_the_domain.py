"""Name the domain of every request, so that quality can be judged domain by domain.

Revision 0004. Rows from before have none.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("requests", sa.Column("domain", sa.Text(), nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("requests", "domain")
