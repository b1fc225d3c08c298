"""Keeps what callers report, which never changes, and what is known of answers apart from the graders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from sqlalchemy import ColumnElement, and_, case, func, insert, or_, select
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from gateway.ids import uuid7
from gateway.store.errors import FeedbackFull
from gateway.store.records import CALLS_MARK
from gateway.store.store import Store
from gateway.store.tables import feedback, gold_labels, request_texts, requests, verification_texts, verifications
from policies.judge_correction import GoldCounts

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

FeedbackKind = Literal["rating", "correct", "reference", "preferred_tier"]
GoldSource = Literal["reference", "checker", "feedback", "admin"]

# Where sources differ about an answer, the surer one counts; of one source the newest.
_RANK: Mapping[str, int] = {"feedback": 0, "checker": 1, "reference": 2, "admin": 3}
# A label of half a point or more reads as "right".
_RIGHT = 0.5
# What is kept about one request: reports, and characters of their texts together.
MAX_REPORTS = 16
MAX_REPORTED_CHARS = 262_144


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

        Raises
        ------
        FeedbackFull
            About this request as much is kept as may be.
        """
        values = asdict(record)
        insert_one = sqlite_insert(feedback) if self._store.dialect == "sqlite" else postgres_insert(feedback)
        async with self._store.transaction() as connection:
            added = await connection.execute(insert_one.values(**values).on_conflict_do_nothing())
            is_new = added.rowcount == 1
            if is_new:
                await self._check_bounds(connection, record.request_id)
            if is_new and labels:
                await connection.execute(insert(gold_labels), [asdict(label) for label in labels])
            same = and_(feedback.c.tenant == record.tenant, feedback.c.idempotency_key == record.idempotency_key)
            kept = (await connection.execute(select(feedback).where(same))).mappings().one()
        return FeedbackRecord(**kept), is_new

    async def _check_bounds(self, connection: AsyncConnection, request_id: str) -> None:
        """Refuse what goes beyond the bounds; the row's lock lets reports that come together see each other."""
        row = select(requests.c.request_id).where(requests.c.request_id == request_id)
        await connection.execute(row.with_for_update(key_share=True))
        texts = func.coalesce(func.length(feedback.c.reference), 0) + func.coalesce(func.length(feedback.c.comment), 0)
        kept = select(func.count(), func.coalesce(func.sum(texts), 0)).where(feedback.c.request_id == request_id)
        num_reports, num_chars = (await connection.execute(kept)).one()
        if num_reports > MAX_REPORTS or num_chars > MAX_REPORTED_CHARS:
            raise FeedbackFull(request_id, MAX_REPORTS, MAX_REPORTED_CHARS)

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
        """The answers to a request whose texts are still there: as served, and as written for a check.

        Answers with calls of tools are left out: no reference text says what they are worth.
        """
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
        return [KeptAnswer(tier, text) for tier, text in found.items() if not text.startswith(CALLS_MARK)]

    async def gold_mark(self) -> tuple[Any, ...]:
        """Return what differs once labels or finished checks were added or deleted; read from indexes alone."""
        done = verifications.c.finished_at
        marks = select(
            select(func.count()).select_from(gold_labels).scalar_subquery(),
            select(func.max(gold_labels.c.gold_id)).scalar_subquery(),
            select(func.max(done)).scalar_subquery(),
        )
        async with self._store.transaction() as connection:
            return tuple((await connection.execute(marks)).one())

    async def gold_counts(self, *, policy_name: str | None = None, since: datetime | None = None) -> GoldCounts:
        """The graders' verdicts against what is known: their own sensitivity and specificity. Summed by the database.

        A fault is a cheap answer that is known to be wrong where the dear one is known to be right. A cheap answer that
        is right, or wrong like the dear one, was good enough. Where a label is missing that this needs, the check does
        not count.
        """
        conditions = [verifications.c.status == "done"]
        if policy_name is not None:
            conditions.append(verifications.c.policy_name == policy_name)
        if since is not None:
            conditions.append(verifications.c.finished_at >= since)
        async with self._store.transaction() as connection:
            counts = (await connection.execute(_select_counts(conditions))).one()
        return GoldCounts(*(int(each) for each in counts))


def _select_best(conditions: Sequence[ColumnElement[bool]]) -> Any:
    """(request, tier) -> the label of the surest source, of that the newest; of requests with such checks alone."""
    gold = gold_labels.c
    checked = select(verifications.c.request_id).where(*conditions)
    surest = case(_RANK, value=gold.source).desc(), gold.created_at.desc(), gold.gold_id.desc()
    place = func.row_number().over(partition_by=(gold.request_id, gold.tier), order_by=surest).label("place")
    ranked = select(gold.request_id, gold.tier, gold.label, place).where(gold.request_id.in_(checked)).subquery()
    return select(ranked.c.request_id, ranked.c.tier, ranked.c.label).where(ranked.c.place == 1)


def _select_counts(conditions: Sequence[ColumnElement[bool]]) -> Any:
    check = verifications.c
    best = _select_best(conditions).cte("best")
    cheap, dear = best.alias("cheap"), best.alias("dear")
    is_lower = check.tier < check.against_tier
    lower = case((is_lower, check.tier), else_=check.against_tier)
    upper = case((is_lower, check.against_tier), else_=check.tier)
    joined = verifications.join(cheap, and_(cheap.c.request_id == check.request_id, cheap.c.tier == lower))
    joined = joined.outerjoin(dear, and_(dear.c.request_id == check.request_id, dear.c.tier == upper))
    is_sound = or_(cheap.c.label >= _RIGHT, dear.c.label < _RIGHT)
    is_fault = and_(cheap.c.label < _RIGHT, dear.c.label >= _RIGHT)
    is_found = check.verdict == 0
    counted = [func.count().filter(each) for each in (is_fault & is_found, is_fault, is_sound & is_found, is_sound)]
    return select(*counted).select_from(joined).where(*conditions)
