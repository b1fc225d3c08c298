"""Sum up the log's rows by day, so that reports need not read them all.

Revision 0008. The leader fills the sums day by day, beside the traffic; reports are exact from the first moment, since
days that are not summed up yet are read row by row. Triggers take a day out when one of its rows comes, goes or changes
afterwards.
"""

from __future__ import annotations

import re

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_COUNTS = (
    *("num_requests", "num_failed", "num_choices", "prompt_tokens", "completion_tokens", "cost_nano_usd"),
    *("measured_cost_nano_usd", "serving_cost_nano_usd"),
)

# Two transactions must not miss each other: one that adds a row to a day, and one that calls the day summed up.
_POSTGRES = """
CREATE FUNCTION suffice_reopen_day() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared(6222542);
    DELETE FROM usage_days WHERE day = (NEW.created_at AT TIME ZONE 'UTC')::date;
    RETURN NULL;
END $$;
CREATE FUNCTION suffice_reopen_days() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared(6222542);
    DELETE FROM usage_days WHERE day IN (SELECT (created_at AT TIME ZONE 'UTC')::date FROM old_rows);
    RETURN NULL;
END $$;
CREATE TRIGGER usage_day_of_late_row AFTER INSERT ON requests
    FOR EACH ROW WHEN (NEW.created_at < now() - interval '1 hour') EXECUTE FUNCTION suffice_reopen_day();
CREATE TRIGGER usage_day_of_moved_row AFTER UPDATE ON requests
    FOR EACH ROW WHEN (NEW.created_at < now() - interval '1 hour') EXECUTE FUNCTION suffice_reopen_day();
CREATE TRIGGER usage_days_of_changed_rows AFTER UPDATE ON requests
    REFERENCING OLD TABLE AS old_rows FOR EACH STATEMENT EXECUTE FUNCTION suffice_reopen_days();
CREATE TRIGGER usage_days_of_deleted_rows AFTER DELETE ON requests
    REFERENCING OLD TABLE AS old_rows FOR EACH STATEMENT EXECUTE FUNCTION suffice_reopen_days();
"""
_POSTGRES_DOWN = """
DROP TRIGGER usage_day_of_late_row ON requests;
DROP TRIGGER usage_day_of_moved_row ON requests;
DROP TRIGGER usage_days_of_changed_rows ON requests;
DROP TRIGGER usage_days_of_deleted_rows ON requests;
DROP FUNCTION suffice_reopen_day();
DROP FUNCTION suffice_reopen_days();
"""
_SQLITE = {
    "usage_day_of_new_row": ("INSERT", ("NEW",)),
    "usage_day_of_changed_row": ("UPDATE", ("OLD", "NEW")),
    "usage_day_of_deleted_row": ("DELETE", ("OLD",)),
}


def upgrade() -> None:
    op.create_table(
        "usage_days",
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("token", sa.String(36), nullable=False),
        sa.Column("is_complete", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("day", name="pk_usage_days"),
    )
    op.create_table(
        "daily_usage",
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("place", sa.Integer(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text()),
        *(sa.Column(each, sa.Text(), nullable=False) for each in ("policy_name", "policy_version")),
        *(sa.Column(each, sa.Text(), nullable=False) for each in ("router_version", "domain")),
        sa.Column("final_tier", sa.SmallInteger()),
        sa.Column("model_served", sa.Text()),
        *(sa.Column(each, sa.BigInteger(), nullable=False) for each in _COUNTS),
        sa.Column("compute_s", sa.Double(), nullable=False),
        *(sa.Column(each, sa.BigInteger(), nullable=False) for each in ("num_drawable", "num_undrawable")),
        sa.Column("least_probability", sa.Double()),
        sa.PrimaryKeyConstraint("day", "place", name="pk_daily_usage"),
    )
    for statement in _statements(_POSTGRES) if _is_postgres() else map(_sqlite_trigger, _SQLITE):
        op.execute(statement)


def downgrade() -> None:
    for statement in _statements(_POSTGRES_DOWN) if _is_postgres() else [f"DROP TRIGGER {name}" for name in _SQLITE]:
        op.execute(statement)
    op.drop_table("daily_usage")
    op.drop_table("usage_days")


def _is_postgres() -> bool:
    return op.get_bind().dialect.name == "postgresql"


def _statements(script: str) -> list[str]:
    """Split a script before each word that begins a statement, always at the beginning of a line."""
    return [each.strip() for each in re.split(r"^(?=CREATE|DROP)", script, flags=re.MULTILINE) if each.strip()]


def _sqlite_trigger(name: str) -> str:
    event, rows = _SQLITE[name]
    deletes = "".join(f"DELETE FROM usage_days WHERE day = substr({row}.created_at, 1, 10); " for row in rows)
    return f"CREATE TRIGGER {name} AFTER {event} ON requests BEGIN {deletes}END"
