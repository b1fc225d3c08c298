"""The tables, once, for both databases. ``migrations/`` holds how they came to be."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Date,
    DateTime,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator

# The newest revision in migrations/versions; a test compares the two. Kept here so that a start needs no Alembic.
SCHEMA_REVISION = "0013"

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)


class UtcDateTime(TypeDecorator[datetime]):
    """``timestamptz`` in PostgreSQL; in SQLite ISO text in UTC, which sorts. Always timezone aware in Python."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.replace(tzinfo=value.tzinfo or UTC)


def _json() -> Any:
    return JSON().with_variant(JSONB(), "postgresql")


def _few(name: str) -> Index:
    """Return an index of the rows that have a value at all, which are few."""
    has_value = text(f"{name} IS NOT NULL")
    return Index(None, name, sqlite_where=has_value, postgresql_where=has_value)


requests = Table(
    "requests",
    metadata,
    Column("request_id", String(36), primary_key=True),
    Column("created_at", UtcDateTime, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("key_id", Text),
    Column("session_id", Text),
    Column("endpoint", Text, nullable=False),
    Column("model_requested", Text, nullable=False),
    Column("stream", Boolean, nullable=False),
    Column("num_choices", Integer, nullable=False),
    Column("policy_name", Text, nullable=False),
    Column("policy_version", Text, nullable=False),
    Column("router_version", Text, nullable=False),
    Column("config_hash", Text, nullable=False),
    Column("features", _json(), nullable=False),
    Column("sufficiency", _json(), nullable=False),
    Column("novelty", Double),
    Column("decided_tier", SmallInteger),
    Column("final_tier", SmallInteger),
    Column("model_served", Text),
    Column("ladder", _json(), nullable=False),
    Column("propensity", Double),
    Column("propensities", _json(), nullable=False),
    Column("reason", Text, nullable=False),
    Column("explored", Boolean, nullable=False),
    Column("confidence", Double),
    Column("overrides", _json(), nullable=False),
    Column("attempts", _json(), nullable=False),
    Column("prompt_tokens", Integer, nullable=False),
    Column("completion_tokens", Integer, nullable=False),
    Column("cached_tokens", Integer, nullable=False),
    Column("reasoning_tokens", Integer, nullable=False),
    Column("draft_tokens", Integer, nullable=False),
    Column("accepted_draft_tokens", Integer, nullable=False),
    Column("compute_s", Double),
    Column("cost_nano_usd", BigInteger, nullable=False),
    Column("measured_cost_nano_usd", BigInteger),
    Column("ttft_s", Double),
    Column("itl_s", Double),
    Column("queue_s", Double, nullable=False),
    Column("total_s", Double, nullable=False),
    Column("overhead_s", Double, nullable=False),
    Column("finish_reason", Text, nullable=False),
    Column("status_code", SmallInteger, nullable=False),
    Column("error_code", Text),
    Column("prompt_digest", String(64)),
    Column("answer_digest", String(64)),
    Column("verify_probability", Double),
    Column("traceparent", Text),
    Column("domain", Text, nullable=False, server_default=""),
    Column("barred", _json()),
    Column("conversation", String(32)),
    Column("turn", Integer),
    Column("step", Integer),
    Column("turn_id", String(36)),
    Column("call_digest", String(32)),
    Index(None, "created_at"),
    Index(None, "key_id", "created_at"),
    _few("turn_id"),
    _few("call_digest"),
)

# Days whose rows are summed up in ``daily_usage``. Triggers on ``requests`` take a day out when a row of it comes or
# goes later, so a day that stands here is exact; ``token`` names its sums. See gateway/store/rollups.py.
usage_days = Table(
    "usage_days",
    metadata,
    Column("day", Date, primary_key=True),
    Column("token", String(36), nullable=False),
    Column("is_complete", Boolean, nullable=False),
)

daily_usage = Table(
    "daily_usage",
    metadata,
    Column("day", Date, primary_key=True),
    Column("place", Integer, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("key_id", Text),
    Column("policy_name", Text, nullable=False),
    Column("policy_version", Text, nullable=False),
    Column("router_version", Text, nullable=False),
    Column("domain", Text, nullable=False),
    Column("final_tier", SmallInteger),
    Column("model_served", Text),
    Column("num_requests", BigInteger, nullable=False),
    Column("num_failed", BigInteger, nullable=False),
    Column("num_choices", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("cost_nano_usd", BigInteger, nullable=False),
    Column("measured_cost_nano_usd", BigInteger, nullable=False),
    Column("serving_cost_nano_usd", BigInteger, nullable=False),
    Column("compute_s", Double, nullable=False),
    Column("num_drawable", BigInteger, nullable=False),
    Column("num_undrawable", BigInteger, nullable=False),
    Column("least_probability", Double),
)

# Apart from the row: text is big, rarely read, and deleted sooner.
request_texts = Table(
    "request_texts",
    metadata,
    Column("request_id", String(36), ForeignKey("requests.request_id", ondelete="CASCADE"), primary_key=True),
    Column("prompt", Text),
    Column("answer", Text),
)

# Answers of ``/v1/responses`` that may be gone on from. Each holds its own items alone: an earlier one that is erased
# stands nowhere else. ``chained_bytes`` counts the items of all that it goes on from, and its own; ``conversation`` is
# not keyed, as the text that it is a digest of stands beside it. See gateway/store/responses.py.
responses = Table(
    "responses",
    metadata,
    Column("request_id", String(36), ForeignKey("requests.request_id", ondelete="CASCADE"), primary_key=True),
    Column("created_at", UtcDateTime, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("previous_id", String(36)),
    Column("num_chained", Integer, nullable=False),
    Column("chained_bytes", BigInteger, nullable=False),
    Column("conversation", String(32)),
    Column("regions", _json()),
    Column("input", Text, nullable=False),
    Column("response", Text, nullable=False),
    Index(None, "created_at"),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("key_id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("key_hash", String(64), nullable=False, unique=True),
    Column("prefix", Text, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("revoked_at", UtcDateTime),
    Column("last_used_at", UtcDateTime),
    Column("limits", _json(), nullable=False),
    Column("scope", Text, nullable=False, server_default="use"),
    Column("permissions", _json(), nullable=False, server_default="{}"),
    Column("expires_at", UtcDateTime),
)

sessions = Table(
    "sessions",
    metadata,
    Column("tenant", Text, primary_key=True),
    Column("session_id", Text, primary_key=True),
    Column("tier", SmallInteger, nullable=False),
    Column("model", Text, nullable=False),
    Column("cached_tokens", Integer, nullable=False),
    Column("updated_at", UtcDateTime, nullable=False),
    Index(None, "updated_at"),
)

policy_versions = Table(
    "policy_versions",
    metadata,
    Column("name", Text, primary_key=True),
    Column("version", Text, primary_key=True),
    Column("created_at", UtcDateTime, nullable=False),
    Column("body", _json(), nullable=False),
    Column("author", Text, nullable=False),
    Column("note", Text, nullable=False),
)

# What ``requests.config_hash`` stands for, without secrets.
configs = Table(
    "configs",
    metadata,
    Column("config_hash", Text, primary_key=True),
    Column("created_at", UtcDateTime, nullable=False),
    Column("body", _json(), nullable=False),
)

# Keys of this installation, made at its first start (the one that digests are made with).
secrets = Table(
    "secrets",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", Text, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
)

# Answers drawn to be checked: each row is the work and, once done, its result. See gateway/verify.
verifications = Table(
    "verifications",
    metadata,
    Column("verification_id", String(36), primary_key=True),
    Column("request_id", String(36), ForeignKey("requests.request_id", ondelete="CASCADE"), nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("direction", Text, nullable=False),
    Column("tier", SmallInteger, nullable=False),
    Column("against_tier", SmallInteger, nullable=False),
    Column("inclusion_probability", Double, nullable=False),
    Column("stratum", Text, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("domain", Text, nullable=False),
    Column("policy_name", Text, nullable=False),
    Column("policy_version", Text, nullable=False),
    Column("router_version", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("claimed_by", Text),
    Column("claimed_until", UtcDateTime),
    Column("num_attempts", Integer, nullable=False),
    Column("retry_at", UtcDateTime),
    Column("finished_at", UtcDateTime),
    Column("p_good", Double),
    Column("verdict", SmallInteger),
    Column("grader", Text),
    Column("grader_version", Text),
    Column("scores", _json(), nullable=False),
    Column("cost_nano_usd", BigInteger, nullable=False),
    Column("compute_s", Double),
    Column("error", Text),
    Column("regions", _json()),
    Column("turn_id", String(36)),
    UniqueConstraint("request_id", "direction"),
    Index(None, "status", "created_at"),
    Index(None, "finished_at"),
)

# What a check reads; deleted once it is done, unless the log keeps texts anyway.
verification_texts = Table(
    "verification_texts",
    metadata,
    Column(
        "verification_id",
        String(36),
        ForeignKey("verifications.verification_id", ondelete="CASCADE"),
        primary_key=True,
    ),
    Column("prompt", Text, nullable=False),
    Column("sampling", _json(), nullable=False),
    Column("answer", Text, nullable=False),
    Column("other_answer", Text),
)

feedback = Table(
    "feedback",
    metadata,
    Column("feedback_id", String(36), primary_key=True),
    Column("request_id", String(36), ForeignKey("requests.request_id", ondelete="CASCADE"), nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("key_id", Text),
    Column("idempotency_key", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("value", Double),
    Column("reference", Text),
    Column("comment", Text),
    Column("metadata", _json(), nullable=False),
    UniqueConstraint("tenant", "idempotency_key"),
    Index(None, "request_id"),
    Index(None, "created_at"),
    Index(None, "key_id", "created_at"),
)

# What is known of an answer's quality apart from the graders; it measures the graders' own errors.
gold_labels = Table(
    "gold_labels",
    metadata,
    Column("gold_id", String(36), primary_key=True),
    Column("request_id", String(36), ForeignKey("requests.request_id", ondelete="CASCADE"), nullable=False),
    Column("tier", SmallInteger, nullable=False),
    Column("source", Text, nullable=False),
    Column("label", Double, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("note", Text, nullable=False),
    Index(None, "request_id"),
    Index(None, "created_at"),
)

# What is in force, one row a matter; ``generation`` counts the changes. See gateway/control.
control = Table(
    "control",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", _json(), nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("updated_at", UtcDateTime, nullable=False),
    Column("updated_by", Text, nullable=False),
)

# The artifact is the bytes of an ``.npz`` without objects, never a pickle.
router_versions = Table(
    "router_versions",
    metadata,
    Column("version", Text, primary_key=True),
    Column("created_at", UtcDateTime, nullable=False),
    Column("artifact", LargeBinary, nullable=False),
    Column("card", _json(), nullable=False),
    Column("parent", Text, nullable=False),
    Column("origin", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("note", Text, nullable=False),
    Index(None, "created_at"),
)

rollouts = Table(
    "rollouts",
    metadata,
    Column("rollout_id", String(36), primary_key=True),
    Column("router_version", Text, nullable=False),
    Column("baseline_version", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("stage", Text, nullable=False),
    Column("share", Double, nullable=False),
    Column("state", _json(), nullable=False),
    Column("started_at", UtcDateTime, nullable=False),
    Column("updated_at", UtcDateTime, nullable=False),
    Column("ended_at", UtcDateTime),
    Column("reason", Text, nullable=False),
    Column("history", _json(), nullable=False),
    Index(None, "started_at"),
)

# What a router in shadow would have done with requests that another one routed.
shadow_decisions = Table(
    "shadow_decisions",
    metadata,
    Column("request_id", String(36), primary_key=True),
    Column("router_version", Text, primary_key=True),
    Column("created_at", UtcDateTime, nullable=False),
    Column("policy_name", Text, nullable=False),
    Column("tier", SmallInteger, nullable=False),
    Column("shadow_tier", SmallInteger, nullable=False),
    Column("sufficiency", _json(), nullable=False),
    Column("novelty", Double, nullable=False),
    Index(None, "router_version", "created_at"),
)

evaluations = Table(
    "evaluations",
    metadata,
    Column("evaluation_id", String(36), primary_key=True),
    Column("created_at", UtcDateTime, nullable=False),
    Column("kind", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("body", _json(), nullable=False),
    Index(None, "created_at"),
)

alerts = Table(
    "alerts",
    metadata,
    Column("alert_id", String(36), primary_key=True),
    Column("created_at", UtcDateTime, nullable=False),
    Column("kind", Text, nullable=False),
    Column("severity", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("body", _json(), nullable=False),
    Column("resolved_at", UtcDateTime),
    Index(None, "created_at"),
)

# One holder at a time; ``token`` rises with every new holder, so that a late one can be told from the present one.
leases = Table(
    "leases",
    metadata,
    Column("name", Text, primary_key=True),
    Column("holder", Text, nullable=False),
    Column("expires_at", UtcDateTime, nullable=False),
    Column("token", BigInteger, nullable=False),
)

# One row a living process that calls priced remote models: what its calls under way may cost at most. A row that is not
# renewed was left by a process that died; reporting it takes it away. See gateway/access/spending_lease.py.
spending_leases = Table(
    "spending_leases",
    metadata,
    Column("lease_id", String(36), primary_key=True),
    Column("process", Text, nullable=False),
    Column("holder", Text, nullable=False),
    Column("opened_at", UtcDateTime, nullable=False),
    Column("expires_at", UtcDateTime, nullable=False),
    Column("amount_nano_usd", BigInteger, nullable=False),
)

retrain_runs = Table(
    "retrain_runs",
    metadata,
    Column("run_id", String(36), primary_key=True),
    Column("created_at", UtcDateTime, nullable=False),
    Column("trigger", Text, nullable=False),
    Column("reason", Text, nullable=False, server_default=""),
    Column("status", Text, nullable=False),
    Column("stage", Text, nullable=False),
    Column("progress", Double, nullable=False),
    Column("holder", Text, nullable=False),
    Column("router_version", Text),
    Column("evaluation_id", Text),
    Column("error", Text),
    Column("finished_at", UtcDateTime),
    Index(None, "created_at"),
)

admin_audit = Table(
    "admin_audit",
    metadata,
    Column("audit_id", String(36), primary_key=True),
    Column("created_at", UtcDateTime, nullable=False),
    Column("key_id", Text),
    Column("action", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("before", _json()),
    Column("after", _json()),
    Column("status", SmallInteger, nullable=False),
    Column("remote", Text, nullable=False),
    Index(None, "created_at"),
)
