"""Create the log.

Revision 0001, the first.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")


def upgrade() -> None:
    op.create_table(
        "api_keys",
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("key_hash", sa.String(length=64), nullable=False),
        sa.Column("prefix", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("revoked_at", sa.DateTime(timezone=True)),
        sa.Column("last_used_at", sa.DateTime(timezone=True)),
        sa.Column("limits", _JSON, nullable=False),
        sa.PrimaryKeyConstraint("key_id", name="pk_api_keys"),
        sa.UniqueConstraint("key_hash", name="uq_api_keys_key_hash"),
    )
    op.create_table(
        "configs",
        sa.Column("config_hash", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("body", _JSON, nullable=False),
        sa.PrimaryKeyConstraint("config_hash", name="pk_configs"),
    )
    op.create_table(
        "policy_versions",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("body", _JSON, nullable=False),
        sa.Column("author", sa.Text(), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name", "version", name="pk_policy_versions"),
    )
    op.create_table(
        "requests",
        sa.Column("request_id", sa.String(length=36), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text()),
        sa.Column("session_id", sa.Text()),
        sa.Column("endpoint", sa.Text(), nullable=False),
        sa.Column("model_requested", sa.Text(), nullable=False),
        sa.Column("stream", sa.Boolean(), nullable=False),
        sa.Column("num_choices", sa.Integer(), nullable=False),
        sa.Column("policy_name", sa.Text(), nullable=False),
        sa.Column("policy_version", sa.Text(), nullable=False),
        sa.Column("router_version", sa.Text(), nullable=False),
        sa.Column("config_hash", sa.Text(), nullable=False),
        sa.Column("features", _JSON, nullable=False),
        sa.Column("sufficiency", _JSON, nullable=False),
        sa.Column("novelty", sa.Double()),
        sa.Column("decided_tier", sa.SmallInteger()),
        sa.Column("final_tier", sa.SmallInteger()),
        sa.Column("model_served", sa.Text()),
        sa.Column("ladder", _JSON, nullable=False),
        sa.Column("propensity", sa.Double()),
        sa.Column("propensities", _JSON, nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("explored", sa.Boolean(), nullable=False),
        sa.Column("confidence", sa.Double()),
        sa.Column("overrides", _JSON, nullable=False),
        sa.Column("attempts", _JSON, nullable=False),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("completion_tokens", sa.Integer(), nullable=False),
        sa.Column("cached_tokens", sa.Integer(), nullable=False),
        sa.Column("reasoning_tokens", sa.Integer(), nullable=False),
        sa.Column("draft_tokens", sa.Integer(), nullable=False),
        sa.Column("accepted_draft_tokens", sa.Integer(), nullable=False),
        sa.Column("compute_s", sa.Double()),
        sa.Column("cost_nano_usd", sa.BigInteger(), nullable=False),
        sa.Column("measured_cost_nano_usd", sa.BigInteger()),
        sa.Column("ttft_s", sa.Double()),
        sa.Column("itl_s", sa.Double()),
        sa.Column("queue_s", sa.Double(), nullable=False),
        sa.Column("total_s", sa.Double(), nullable=False),
        sa.Column("overhead_s", sa.Double(), nullable=False),
        sa.Column("finish_reason", sa.Text(), nullable=False),
        sa.Column("status_code", sa.SmallInteger(), nullable=False),
        sa.Column("error_code", sa.Text()),
        sa.Column("prompt_digest", sa.String(length=64)),
        sa.Column("answer_digest", sa.String(length=64)),
        sa.Column("verify_probability", sa.Double()),
        sa.Column("traceparent", sa.Text()),
        sa.PrimaryKeyConstraint("request_id", name="pk_requests"),
    )
    op.create_index("ix_requests_created_at", "requests", ["created_at"])
    op.create_index("ix_requests_key_id_created_at", "requests", ["key_id", "created_at"])

    op.create_table(
        "secrets",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_secrets"),
    )
    op.create_table(
        "sessions",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("tier", sa.SmallInteger(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("cached_tokens", sa.Integer(), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "session_id", name="pk_sessions"),
    )
    op.create_index("ix_sessions_updated_at", "sessions", ["updated_at"])

    op.create_table(
        "request_texts",
        sa.Column("request_id", sa.String(length=36), nullable=False),
        sa.Column("prompt", sa.Text()),
        sa.Column("answer", sa.Text()),
        sa.ForeignKeyConstraint(
            ["request_id"], ["requests.request_id"], name="fk_request_texts_request_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("request_id", name="pk_request_texts"),
    )


def downgrade() -> None:
    op.drop_table("request_texts")
    op.drop_index("ix_sessions_updated_at", "sessions")

    op.drop_table("sessions")
    op.drop_table("secrets")
    op.drop_index("ix_requests_key_id_created_at", "requests")
    op.drop_index("ix_requests_created_at", "requests")

    op.drop_table("requests")
    op.drop_table("policy_versions")
    op.drop_table("configs")
    op.drop_table("api_keys")
