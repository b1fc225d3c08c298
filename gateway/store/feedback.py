"""Keeps what callers report, which never changes, and what is known of answers apart from the graders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import and_, insert, select
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from gateway.ids import uuid7
from gateway.store.store import Store
from gateway.store.tables import feedback, gold_labels, request_texts, verification_texts, verifications
from policies.judge_correction import GoldCounts

FeedbackKind = Literal["rating", "correct", "reference", "preferred_tier"]
GoldSource = Literal["reference", "checker", "feedback", "admin"]

# Where sources differ about an answer, the surer one counts; of one source the newest.
_RANK: Mapping[str, int] = {"feedback": 0, "checker": 1, "reference": 2, "admin": 3}
# A label of half a point or more reads as "right".
_RIGHT = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedbackRecord:
    """One report about one request; ``idempotency_key`` is unique within its tenant."""

    feedback_id: str
    request_id: str
    created_at: datetime
    tenant: str
    key_id: str | None
    idempotency_key: str
    kind: FeedbackKind
    value: float | None = None
    reference: str | None = None
    comment: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def content(self) -> tuple[Any, ...]:
        """Return what was reported, apart from when and under which id."""
        return (self.request_id, self.kind, self.value, self.reference, self.comment, dict(self.metadata))


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldLabel:
    """Says how good one tier's answer to one request is, 0..1, and who says so."""

    request_id: str
    tier: int
    source: GoldSource
    label: float
    created_at: datetime
    note: str = ""
    gold_id: str = field(default_factory=uuid7)


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """An answer whose text is still there."""

    tier: int
    text: str


class FeedbackBook:
    """The tables ``feedback`` and ``gold_labels`` of one database."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def add(self, record: FeedbackRecord, labels: Sequence[GoldLabel]) -> tuple[FeedbackRecord, bool]:
        """Keep a report and its labels together, once; returns what is kept, and whether it is new.

        A report under the same tenant and key was there before: it is returned, and nothing is added.
        """
        values = asdict(record)
        insert_one = sqlite_insert(feedback) if self._store.dialect == "sqlite" else postgres_insert(feedback)
        async with self._store.transaction() as connection:
            added = await connection.execute(insert_one.values(**values).on_conflict_do_nothing())
            is_new = added.rowcount == 1
            if is_new and labels:
                await connection.execute(insert(gold_labels), [asdict(label) for label in labels])
            same = and_(feedback.c.tenant == record.tenant, feedback.c.idempotency_key == record.idempotency_key)
            kept = (await connection.execute(select(feedback).where(same))).mappings().one()
        return FeedbackRecord(**kept), is_new

    async def of_request(self, request_id: str) -> list[FeedbackRecord]:
        """Return what was reported about a request, oldest first."""
        wanted = select(feedback).where(feedback.c.request_id == request_id).order_by(feedback.c.created_at)
        async with self._store.transaction() as connection:
            return [FeedbackRecord(**row) for row in (await connection.execute(wanted)).mappings()]

    async def add_gold(self, labels: Iterable[GoldLabel]) -> None:
        """Note what is known of answers from elsewhere: a checker, an operator."""
        rows = [asdict(label) for label in labels]
        if rows:
            async with self._store.transaction() as connection:
                await connection.execute(insert(gold_labels), rows)

    async def kept_answers(self, request_id: str, final_tier: int | None) -> list[KeptAnswer]:
        """The answers to a request whose texts are still there: as served, and as written for a check."""
        served = select(request_texts.c.answer).where(request_texts.c.request_id == request_id)
        checked = (
            select(verifications.c.tier, verifications.c.against_tier, verification_texts)
            .select_from(verification_texts.join(verifications))
            .where(verifications.c.request_id == request_id)
        )
        found: dict[int, str] = {}
        async with self._store.transaction() as connection:
            text = (await connection.execute(served)).scalar()
            if text is not None and final_tier is not None:
                found[final_tier] = text
            for row in (await connection.execute(checked)).mappings():
                found[row["tier"]] = row["answer"]
                if row["other_answer"] is not None:
                    found[row["against_tier"]] = row["other_answer"]
        return [KeptAnswer(tier, text) for tier, text in found.items()]

    async def gold_counts(self, *, policy_name: str | None = None, since: datetime | None = None) -> GoldCounts:
        """The graders' verdicts against what is known: their own sensitivity and specificity.

        A fault is a cheap answer that is known to be wrong where the dear one is known to be right. A cheap answer that
        is right, or wrong like the dear one, was good enough. Where a label is missing that this needs, the check does
        not count.
        """
        checks = select(
            verifications.c.request_id,
            verifications.c.direction,
            verifications.c.tier,
            verifications.c.against_tier,
            verifications.c.verdict,
        ).where(verifications.c.status == "done", verifications.c.request_id.in_(select(gold_labels.c.request_id)))
        if policy_name is not None:
            checks = checks.where(verifications.c.policy_name == policy_name)
        if since is not None:
            checks = checks.where(verifications.c.finished_at >= since)
        known = select(gold_labels).order_by(gold_labels.c.created_at, gold_labels.c.gold_id)
        async with self._store.transaction() as connection:
            rows = [dict(row) for row in (await connection.execute(checks)).mappings()]
            labels = _best(dict(row) for row in (await connection.execute(known)).mappings())
        faults = [row["verdict"] == 0 for row in rows if _is_fault(row, labels) is True]
        sound = [row["verdict"] == 0 for row in rows if _is_fault(row, labels) is False]
        return GoldCounts(sum(faults), len(faults), sum(sound), len(sound))


def _best(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, int], float]:
    """(request, tier) -> label by the surest source; rows come oldest first."""
    best: dict[tuple[str, int], tuple[int, float]] = {}
    for row in rows:
        key, rank = (row["request_id"], row["tier"]), _RANK[row["source"]]
        if key not in best or rank >= best[key][0]:
            best[key] = (rank, row["label"])
    return {key: label for key, (_, label) in best.items()}


def _is_fault(check: Mapping[str, Any], labels: Mapping[tuple[str, int], float]) -> bool | None:
    tiers = (check["tier"], check["against_tier"])
    cheap, dear = (labels.get((check["request_id"], tier)) for tier in (min(tiers), max(tiers)))
    if cheap is None:
        return None
    if cheap >= _RIGHT:
        return False
    return None if dear is None else dear >= _RIGHT
