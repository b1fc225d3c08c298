"""Keep verifications, feedback and gold labels.

Revision 0002.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")


def upgrade() -> None:
    op.create_table(
        "verifications",
        sa.Column("verification_id", sa.String(length=36), nullable=False),
        sa.Column("request_id", sa.String(length=36), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("direction", sa.Text(), nullable=False),
        sa.Column("tier", sa.SmallInteger(), nullable=False),
        sa.Column("against_tier", sa.SmallInteger(), nullable=False),
        sa.Column("inclusion_probability", sa.Double(), nullable=False),
        sa.Column("stratum", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("domain", sa.Text(), nullable=False),
        sa.Column("policy_name", sa.Text(), nullable=False),
        sa.Column("policy_version", sa.Text(), nullable=False),
        sa.Column("router_version", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("claimed_by", sa.Text()),
        sa.Column("claimed_until", sa.DateTime(timezone=True)),
        sa.Column("num_attempts", sa.Integer(), nullable=False),
        sa.Column("retry_at", sa.DateTime(timezone=True)),
        sa.Column("finished_at", sa.DateTime(timezone=True)),
        sa.Column("p_good", sa.Double()),
        sa.Column("verdict", sa.SmallInteger()),
        sa.Column("grader", sa.Text()),
        sa.Column("grader_version", sa.Text()),
        sa.Column("scores", _JSON, nullable=False),
        sa.Column("cost_nano_usd", sa.BigInteger(), nullable=False),
        sa.Column("compute_s", sa.Double()),
        sa.Column("error", sa.Text()),
        sa.ForeignKeyConstraint(
            ["request_id"], ["requests.request_id"], name="fk_verifications_request_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("verification_id", name="pk_verifications"),
        sa.UniqueConstraint("request_id", "direction", name="uq_verifications_request_id_direction"),
    )
    op.create_index("ix_verifications_status_created_at", "verifications", ["status", "created_at"])
    op.create_index("ix_verifications_finished_at", "verifications", ["finished_at"])
    op.create_table(
        "verification_texts",
        sa.Column("verification_id", sa.String(length=36), nullable=False),
        sa.Column("prompt", sa.Text(), nullable=False),
        sa.Column("sampling", _JSON, nullable=False),
        sa.Column("answer", sa.Text(), nullable=False),
        sa.Column("other_answer", sa.Text()),
        sa.ForeignKeyConstraint(
            ["verification_id"],
            ["verifications.verification_id"],
            name="fk_verification_texts_verification_id",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("verification_id", name="pk_verification_texts"),
    )
    op.create_table(
        "feedback",
        sa.Column("feedback_id", sa.String(length=36), nullable=False),
        sa.Column("request_id", sa.String(length=36), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text()),
        sa.Column("idempotency_key", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("value", sa.Double()),
        sa.Column("reference", sa.Text()),
        sa.Column("comment", sa.Text()),
        sa.Column("metadata", _JSON, nullable=False),
        sa.ForeignKeyConstraint(
            ["request_id"], ["requests.request_id"], name="fk_feedback_request_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("feedback_id", name="pk_feedback"),
        sa.UniqueConstraint("tenant", "idempotency_key", name="uq_feedback_tenant_idempotency_key"),
    )
    op.create_index("ix_feedback_request_id", "feedback", ["request_id"])
    op.create_index("ix_feedback_created_at", "feedback", ["created_at"])
    op.create_table(
        "gold_labels",
        sa.Column("gold_id", sa.String(length=36), nullable=False),
        sa.Column("request_id", sa.String(length=36), nullable=False),
        sa.Column("tier", sa.SmallInteger(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("label", sa.Double(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["request_id"], ["requests.request_id"], name="fk_gold_labels_request_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("gold_id", name="pk_gold_labels"),
    )
    op.create_index("ix_gold_labels_request_id", "gold_labels", ["request_id"])
    op.create_index("ix_gold_labels_created_at", "gold_labels", ["created_at"])


def downgrade() -> None:
    for table, columns in (
        ("gold_labels", ("created_at", "request_id")),
        ("feedback", ("created_at", "request_id")),
    ):
        for column in columns:
            op.drop_index(f"ix_{table}_{column}", table)
        op.drop_table(table)
    op.drop_table("verification_texts")
    op.drop_index("ix_verifications_finished_at", "verifications")
    op.drop_index("ix_verifications_status_created_at", "verifications")
    op.drop_table("verifications")
