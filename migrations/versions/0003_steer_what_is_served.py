"""Steer what is served: control state, routers, rollouts, alerts, leases, retrains, the admin's audit.

Revision 0003.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")


def upgrade() -> None:
    op.create_table(
        "control",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", _JSON, nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_by", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_control"),
    )
    op.create_table(
        "router_versions",
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("artifact", sa.LargeBinary(), nullable=False),
        sa.Column("card", _JSON, nullable=False),
        sa.Column("parent", sa.Text(), nullable=False),
        sa.Column("origin", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("version", name="pk_router_versions"),
    )
    op.create_index("ix_router_versions_created_at", "router_versions", ["created_at"])
    op.create_table(
        "rollouts",
        sa.Column("rollout_id", sa.String(length=36), nullable=False),
        sa.Column("router_version", sa.Text(), nullable=False),
        sa.Column("baseline_version", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("stage", sa.Text(), nullable=False),
        sa.Column("share", sa.Double(), nullable=False),
        sa.Column("state", _JSON, nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True)),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("history", _JSON, nullable=False),
        sa.PrimaryKeyConstraint("rollout_id", name="pk_rollouts"),
    )
    op.create_index("ix_rollouts_started_at", "rollouts", ["started_at"])
    op.create_table(
        "shadow_decisions",
        sa.Column("request_id", sa.String(length=36), nullable=False),
        sa.Column("router_version", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("policy_name", sa.Text(), nullable=False),
        sa.Column("tier", sa.SmallInteger(), nullable=False),
        sa.Column("shadow_tier", sa.SmallInteger(), nullable=False),
        sa.Column("sufficiency", _JSON, nullable=False),
        sa.Column("novelty", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("request_id", "router_version", name="pk_shadow_decisions"),
    )
    op.create_index(
        "ix_shadow_decisions_router_version_created_at", "shadow_decisions", ["router_version", "created_at"]
    )
    op.create_table(
        "evaluations",
        sa.Column("evaluation_id", sa.String(length=36), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("body", _JSON, nullable=False),
        sa.PrimaryKeyConstraint("evaluation_id", name="pk_evaluations"),
    )
    op.create_index("ix_evaluations_created_at", "evaluations", ["created_at"])
    op.create_table(
        "alerts",
        sa.Column("alert_id", sa.String(length=36), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("severity", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("body", _JSON, nullable=False),
        sa.Column("resolved_at", sa.DateTime(timezone=True)),
        sa.PrimaryKeyConstraint("alert_id", name="pk_alerts"),
    )
    op.create_index("ix_alerts_created_at", "alerts", ["created_at"])
    op.create_table(
        "leases",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_leases"),
    )
    op.create_table(
        "retrain_runs",
        sa.Column("run_id", sa.String(length=36), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("trigger", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False, server_default=""),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("stage", sa.Text(), nullable=False),
        sa.Column("progress", sa.Double(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("router_version", sa.Text()),
        sa.Column("evaluation_id", sa.Text()),
        sa.Column("error", sa.Text()),
        sa.Column("finished_at", sa.DateTime(timezone=True)),
        sa.PrimaryKeyConstraint("run_id", name="pk_retrain_runs"),
    )
    op.create_index("ix_retrain_runs_created_at", "retrain_runs", ["created_at"])
    op.create_table(
        "admin_audit",
        sa.Column("audit_id", sa.String(length=36), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("key_id", sa.Text()),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("before", _JSON),
        sa.Column("after", _JSON),
        sa.Column("status", sa.SmallInteger(), nullable=False),
        sa.Column("remote", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("audit_id", name="pk_admin_audit"),
    )
    op.create_index("ix_admin_audit_created_at", "admin_audit", ["created_at"])
    op.add_column("api_keys", sa.Column("scope", sa.Text(), nullable=False, server_default="use"))


def downgrade() -> None:
    op.drop_column("api_keys", "scope")
    op.drop_index("ix_admin_audit_created_at", "admin_audit")
    op.drop_table("admin_audit")
    op.drop_index("ix_retrain_runs_created_at", "retrain_runs")
    op.drop_table("retrain_runs")
    op.drop_table("leases")
    op.drop_index("ix_alerts_created_at", "alerts")
    op.drop_table("alerts")
    op.drop_index("ix_evaluations_created_at", "evaluations")
    op.drop_table("evaluations")
    op.drop_index("ix_shadow_decisions_router_version_created_at", "shadow_decisions")
    op.drop_table("shadow_decisions")
    op.drop_index("ix_rollouts_started_at", "rollouts")
    op.drop_table("rollouts")
    op.drop_index("ix_router_versions_created_at", "router_versions")
    op.drop_table("router_versions")
    op.drop_table("control")
