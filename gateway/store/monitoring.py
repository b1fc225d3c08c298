"""Reads for the monitor: checked answers, the traffic they stand for, what is known of the grader, decisions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import case, distinct, func, literal, select

from gateway.store.feedback import FeedbackBook
from gateway.store.rollups import Span, UsageSums
from gateway.store.store import Store
from gateway.store.tables import requests, retrain_runs, shadow_decisions, verifications
from policies.judge_correction import GoldCounts
from policies.sampling import FAULTY
from policies.turn_outcome import turn_outcome
from policies.types import ReasonCode

_BATCH = 500
_KEY = ("policy_name", "policy_version", "router_version", "final_tier")
_DRAWABLE = ("num_drawable", "num_undrawable", "least_probability")
_V, _R = verifications.c, requests.c

Key = tuple[str, str, str, int]
"""Policy's name and version, router's version, tier that answered."""


@dataclass(frozen=True, slots=True)
class CheckedRow:
    """One finished check.

    Parameters
    ----------
    tier : the cheap tier whose answer was judged, whichever of the two answered the request
    dear_tier : the tier it was compared with
    is_up : the cheap answer was the served one
    inclusion : probability with which it was drawn
    loss : 1 - P(the cheap answer was good enough)
    verdict : 1 good enough, 0 not; of a turn of several steps, the share
    p_as_good : what the router had estimated for that tier; None without an estimate
    is_quarantine_check : the request had gone up because a tier was in doubt
    is_known : its answer was faulty for certain, so it is in the sample without a draw
    turn_id : the request that the tier was decided for, where that is another
    """

    verification_id: str
    request_id: str
    created_at: datetime
    finished_at: datetime
    is_up: bool
    tier: int
    inclusion: float
    tenant: str
    domain: str
    policy_name: str
    policy_version: str
    router_version: str
    loss: float
    verdict: float
    p_as_good: float | None
    is_quarantine_check: bool = False
    dear_tier: int = 0
    is_known: bool = False
    turn_id: str | None = None


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests of one policy, router and tier that could have been drawn.

    ``num_undrawable`` could not (their chance was 0), so nothing is said about them; ``least`` is the least chance of
    the others, in either direction together.
    """

    num_requests: int = 0
    num_undrawable: int = 0
    least: float = 1.0


@dataclass(frozen=True, slots=True)
class DrawnCount:
    """Counts answers drawn for a check, and how many of the checks are done."""

    num_drawn: int = 0
    num_done: int = 0


@dataclass(frozen=True, slots=True)
class Learnable:
    """Finished checks: those since the last retrain, and all."""

    num_new: int
    num: int


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision that the router made itself."""

    request_id: str
    tenant: str
    tier: int


class MonitorReader:
    """Reads in small batches, so that nothing else on the event loop waits for long."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._gold: tuple[tuple[Any, ...], GoldCounts] | None = None

    async def checked(self, *, finished_since: datetime, limit: int) -> AsyncIterator[CheckedRow]:
        """Finished checks of decisions in the order of their ends; further steps of their turns left out.

        A test that looks at each answer as it comes wants one a turn: what follows is no news of its own.
        """
        joined = verifications.join(requests, _V.request_id == _R.request_id)
        statement = (
            select(*(_V[name] for name in _COLUMNS), _R.sufficiency, _R.reason, _R.confidence)
            .select_from(joined)
            .where(_V.status == "done", _V.finished_at >= finished_since, _V.turn_id.is_(None))
            .order_by(_V.finished_at, _V.verification_id)
            .limit(limit)
        )
        async for row in self._stream(statement):
            yield _checked(row)

    async def tried(self, version: str, *, finished_since: datetime, limit: int) -> AsyncIterator[CheckedRow]:
        """Finished checks that tell what a router on its way is worth, in the order of their ends.

        Those of answers it decided itself, upward; and those, in either direction, of answers of the very tier that it
        would have chosen where another router decided.
        """
        shadow = shadow_decisions.c
        is_shadowed = (shadow.request_id == _V.request_id) & (shadow.router_version == version)
        joined = verifications.join(requests, _V.request_id == _R.request_id)
        joined = joined.join(shadow_decisions, is_shadowed, isouter=True)
        cheap = case((_V.direction == "up", _V.tier), else_=_V.against_tier)
        is_own = (_V.router_version == version) & (_V.direction == "up")
        statement = (
            select(*(_V[name] for name in _COLUMNS), _R.sufficiency, _R.reason, _R.confidence)
            .select_from(joined)
            .where(_V.status == "done", _V.finished_at >= finished_since, _V.turn_id.is_(None))
            .where(is_own | ((_V.router_version != version) & (shadow.shadow_tier == cheap)))
            .order_by(_V.finished_at, _V.verification_id)
            .limit(limit)
        )
        async for row in self._stream(statement):
            yield _checked(row)

    async def newest_checked(self, *, created_since: datetime, limit: int) -> list[CheckedRow]:
        """The newest finished checks of requests since a moment, oldest first."""
        joined = verifications.join(requests, _V.request_id == _R.request_id)
        statement = (
            select(*(_V[name] for name in _COLUMNS), _R.sufficiency, _R.reason, _R.confidence)
            .select_from(joined)
            .where(_V.status == "done", _V.created_at >= created_since)
            .order_by(_V.finished_at.desc(), _V.verification_id.desc())
            .limit(limit)
        )
        return [_checked(row) async for row in self._stream(statement)][::-1]

    async def by_turn(self, rows: Sequence[CheckedRow]) -> list[CheckedRow]:
        """Return checked answers with those of one turn as one row, in their order.

        The row stands for its turn as :func:`policies.turn_outcome.turn_outcome` says; its estimate is the decision's.
        """
        ids = list({row.turn_id or row.request_id: None for row in rows})
        sizes: dict[str, int] = {}
        has_steps = bool(await self._all(select(_R.request_id).where(_R.turn_id.is_not(None)).limit(1)))
        for begin in range(0, len(ids) if has_steps else 0, _BATCH):
            mine = _R.turn_id.in_(ids[begin : begin + _BATCH])
            counted = select(_R.turn_id, func.count().label("num")).where(mine, _R.verify_probability.is_not(None))
            sizes |= {row["turn_id"]: row["num"] for row in await self._all(counted.group_by(_R.turn_id))}
        turns: dict[Any, list[CheckedRow]] = {}
        for row in rows:
            key = (row.turn_id or row.request_id, row.is_up, row.tier, row.dear_tier)
            turns.setdefault(key, []).append(row)
        return [_turn(found, 1 + sizes.get(key[0], 0)) for key, found in turns.items()]

    async def traffic(self, since: datetime) -> dict[Key, Traffic]:
        """Turns whose answers could be drawn, by what decided them and who answered."""
        found = await UsageSums(self._store).read(Span(since), _KEY, _DRAWABLE)
        return {key: traffic for key, sums in found.items() if (traffic := _traffic(key, sums)) is not None}

    async def traffic_of(
        self, family: Literal["tenant", "domain"], names: Collection[str], since: datetime
    ) -> dict[tuple[str, Key], Traffic]:
        """The same for some tenants or domains: (name, key) -> its part."""
        found = await UsageSums(self._store).read(Span(since), (*_KEY, family), _DRAWABLE, {family: names})
        return {
            (str(key[-1]), key[:-1]): traffic
            for key, sums in found.items()
            if (traffic := _traffic(key[:-1], sums)) is not None
        }

    async def drawn(self, since: datetime) -> dict[tuple[Key, bool], DrawnCount]:
        """Drawn turns by the same key and whether they are checked upward; those known without a draw left out."""
        key = (_V.policy_name, _V.policy_version, _V.router_version, _V.tier, _V.direction)
        statement = (
            select(*key, _num_turns(True).label("num"), _num_turns(_V.status == "done").label("done"))
            .where(_V.created_at >= since, _V.stratum != FAULTY)
            .group_by(*key)
        )
        found: dict[tuple[Key, bool], DrawnCount] = {}
        for row in await self._all(statement):
            name = (row["policy_name"], row["policy_version"], row["router_version"], row["tier"])
            found[name, row["direction"] == "up"] = DrawnCount(row["num"], row["done"])
        return found

    async def gold(self, min_each: int) -> GoldCounts | None:
        """The grader's own errors; None while fewer than ``min_each`` faults or sound answers are known.

        Summed anew only once labels or checks were added or deleted.
        """
        book = FeedbackBook(self._store)
        mark = await book.gold_mark()
        if self._gold is None or self._gold[0] != mark:
            self._gold = mark, await book.gold_counts()
        counts = self._gold[1]
        return counts if min(counts.num_faults, counts.num_sound) >= min_each else None

    async def learnable(self, since: datetime, *, is_foreign: bool = False) -> Learnable | None:
        """Checks that a retrain could learn from; None while one is asked for or under way.

        Parameters
        ----------
        since : of the requests, aware
        is_foreign : only of requests that had gone up for being foreign to the router
        """
        runs = retrain_runs.c
        statement = select(
            func.count().filter(runs.status.in_(("requested", "running"))).label("num_open"),
            func.max(runs.finished_at).label("ended_at"),
        )
        (row,) = await self._all(statement)
        if row["num_open"]:
            return None
        is_new = literal(True) if row["ended_at"] is None else _V.finished_at > row["ended_at"]
        counted = select(func.count().label("num"), func.count().filter(is_new).label("num_new"))
        counted = counted.select_from(verifications).where(
            _V.status == "done", _V.created_at >= since, _V.turn_id.is_(None)
        )
        if is_foreign:
            counted = counted.join(requests, _V.request_id == _R.request_id).where(_R.reason == ReasonCode.NOVEL.value)
        (found,) = await self._all(counted)
        return Learnable(found["num_new"], found["num"])

    async def decisions(
        self, *, after_id: str, before: datetime, reasons: tuple[str, ...], limit: int
    ) -> list[Decided]:
        """Decisions for these reasons after a request's id, oldest first; ids sort by time."""
        statement = (
            select(_R.request_id, _R.tenant, _R.decided_tier)
            .where(
                _R.request_id > after_id,
                _R.created_at < before,
                _R.reason.in_(reasons),
                _R.decided_tier.is_not(None),
            )
            .order_by(_R.request_id)
            .limit(limit)
        )
        return [Decided(row["request_id"], row["tenant"], row["decided_tier"]) async for row in self._stream(statement)]

    async def last_request_id(self) -> str:
        """The newest request's id; empty without any."""
        rows = await self._all(select(func.max(_R.request_id).label("last")))
        return str(rows[0]["last"] or "")

    async def _all(self, statement: Any) -> list[Mapping[str, Any]]:
        async with self._store.transaction() as connection:
            return [dict(row) for row in (await connection.execute(statement)).mappings()]

    async def _stream(self, statement: Any) -> AsyncIterator[Mapping[str, Any]]:
        async with self._store.transaction() as connection:
            found = await connection.stream(statement.execution_options(yield_per=_BATCH))
            async for row in found.mappings():
                yield dict(row)


def _num_turns(which: Any) -> Any:
    turn = func.coalesce(_V.turn_id, _V.request_id)
    return func.count(distinct(turn if which is True else case((which, turn))))


def _turn(rows: Sequence[CheckedRow], num_steps: int) -> CheckedRow:
    """Return one row for what was checked of a turn; a turn of one step is its own."""
    first = min(rows, key=lambda row: (row.turn_id is not None, row.request_id))
    if num_steps == 1 and len(rows) == 1:
        return first
    drawn, known = [row for row in rows if not row.is_known], [row for row in rows if row.is_known]
    inclusion = drawn[0].inclusion if drawn else 1.0
    loss, weigh_by = turn_outcome([r.loss for r in drawn], [r.loss for r in known], num_steps, inclusion)
    flag, _ = turn_outcome([1.0 - r.verdict for r in drawn], [1.0 - r.verdict for r in known], num_steps, inclusion)
    return replace(
        first,
        request_id=first.turn_id or first.request_id,
        finished_at=max(row.finished_at for row in rows),
        inclusion=weigh_by,
        loss=loss,
        verdict=1.0 - flag,
        is_known=not drawn,
        turn_id=None,
    )


def _traffic(key: Any, sums: Mapping[str, Any]) -> Traffic | None:
    """None where no answer was ever asked whether to be drawn, or none was given."""
    num, never, least = (sums[name] for name in _DRAWABLE)
    if key[-1] is None or not num + never:
        return None
    return Traffic(num, never, 1.0 if least is None else least)


_COLUMNS = (
    "verification_id",
    "request_id",
    "created_at",
    "finished_at",
    "direction",
    "tier",
    "against_tier",
    "inclusion_probability",
    "stratum",
    "turn_id",
    "tenant",
    "domain",
    "policy_name",
    "policy_version",
    "router_version",
    "p_good",
    "verdict",
)


def _checked(row: Mapping[str, Any]) -> CheckedRow:
    is_up = row["direction"] == "up"
    tier = row["tier"] if is_up else row["against_tier"]
    p_good = row["p_good"] if row["p_good"] is not None else float(row["verdict"] or 0)
    verdict = row["verdict"] if row["verdict"] is not None else int(p_good >= 0.5)
    estimates = {each[0]: each[2] for each in row["sufficiency"]}
    return CheckedRow(
        row["verification_id"],
        row["request_id"],
        row["created_at"],
        row["finished_at"],
        is_up,
        tier,
        row["inclusion_probability"],
        row["tenant"],
        row["domain"],
        row["policy_name"],
        row["policy_version"],
        row["router_version"],
        min(max(1.0 - p_good, 0.0), 1.0),
        int(verdict),
        # A step stands under its turn's decision, and so under the estimate of that.
        row["confidence"] if is_up and row["turn_id"] is not None else estimates.get(tier),
        row["reason"] == ReasonCode.QUARANTINED.value,
        row["against_tier"] if is_up else row["tier"],
        row["stratum"] == FAULTY,
        row["turn_id"],
    )
