"""Keep which tiers a limit barred from a request, and the regions that the prompt of a check may be sent to.

Revision 0005. Rows from before have neither: nothing was barred, and their checks may be asked anywhere.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")


def upgrade() -> None:
    op.add_column("requests", sa.Column("barred", _JSON))
    op.add_column("verifications", sa.Column("regions", _JSON))


def downgrade() -> None:
    op.drop_column("verifications", "regions")
    op.drop_column("requests", "barred")
