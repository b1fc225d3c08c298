"""Sums over the log's rows, read from daily roll-ups where a day has one and row by row where it has none.

A day is summed up once it is over, by the leader, beside the traffic: it is marked, its rows are read without any
lock, and its sums are stored only if the mark is still there. Triggers on ``requests`` delete the mark whenever a row
of the day comes, goes or changes. So a sum is that of the rows, whatever was late, pruned or erased, and whichever
server wrote it; a day without a mark costs the time to read its rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import ColumnElement, delete, func, insert, select, text, update

from gateway.ids import uuid7
from gateway.store.store import Store
from gateway.store.tables import daily_usage, requests, usage_days

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

_R, _D = requests.c, daily_usage.c
# The triggers on PostgreSQL take the same lock, shared.
_LOCK = 6222542
# The triggers on PostgreSQL pass over rows younger than an hour by the database's clock.
_SETTLED = timedelta(hours=2)
_DAY, _HOUR = timedelta(days=1), timedelta(hours=1)
_TRIES = 3
_ROWS_AT_ONCE = 500

DIMENSIONS = (
    *("tenant", "key_id", "policy_name", "policy_version", "router_version", "domain", "final_tier", "model_served"),
)


def _sum(column: Any, default: Any = 0) -> Any:
    return func.coalesce(func.sum(column), default)


# A row whose tier was decided; the others followed such a decision, as further steps of its turn.
_IS_DECIDED = _R.turn_id.is_(None)

MEASURES: Mapping[str, Any] = {
    "num_requests": func.count(),
    "num_failed": func.count().filter(_R.error_code.is_not(None)),
    "num_choices": _sum(_R.num_choices),
    "prompt_tokens": _sum(_R.prompt_tokens),
    "completion_tokens": _sum(_R.completion_tokens),
    "cached_tokens": _sum(_R.cached_tokens),
    "cost_nano_usd": _sum(_R.cost_nano_usd),
    "measured_cost_nano_usd": _sum(_R.measured_cost_nano_usd),
    # By device seconds where measured, else by the price table.
    "serving_cost_nano_usd": _sum(func.coalesce(_R.measured_cost_nano_usd, _R.cost_nano_usd)),
    "compute_s": _sum(_R.compute_s, 0.0),
    # Turns that could be drawn for a check, that could not, and the least chance of the first.
    "num_drawable": func.count().filter(_IS_DECIDED, _R.verify_probability > 0.0),
    "num_undrawable": func.count().filter(_IS_DECIDED, _R.verify_probability <= 0.0),
    "least_probability": func.min(_R.verify_probability).filter(_IS_DECIDED, _R.verify_probability > 0.0),
}
"""Name -> how it is computed of rows; sums of sums in the roll-ups, but the least of the least."""

Key = tuple[Any, ...]
Sums = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time, from ``since`` to before ``until``; None is without end."""

    since: datetime | None = None
    until: datetime | None = None

    def holds(self, day: date) -> bool:
        """Whether a whole day lies in it."""
        begin, end = _begin(day), _begin(day) + _DAY
        return (self.since is None or begin >= self.since) and (self.until is None or end <= self.until)

    def without(self, days: Collection[date]) -> list[Span]:
        """Return what is left of it outside whole days, which lie in it."""
        found, since = [], self.since
        for day in sorted(days):
            if since is None or _begin(day) > since:
                found.append(Span(since, _begin(day)))
            since = _begin(day) + _DAY
        if self.until is None or since is None or since < self.until:
            found.append(Span(since, self.until))
        return found

    def conditions(self) -> list[ColumnElement[bool]]:
        """As SQL over the rows."""
        found: list[ColumnElement[bool]] = []
        if self.since is not None:
            found.append(_R.created_at >= self.since)
        if self.until is not None:
            found.append(_R.created_at < self.until)
        return found


class UsageSums:
    """Sums over requests, by day and by who asked, what decided and who answered."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def read(
        self,
        span: Span,
        group_by: Sequence[str] = (),
        measures: Sequence[str] = tuple(MEASURES),
        where: Mapping[str, Collection[Any]] | None = None,
        conditions: Sequence[ColumnElement[bool]] = (),
    ) -> dict[Key, Sums]:
        """Sum up requests of a stretch of time.

        Parameters
        ----------
        group_by : of ``DIMENSIONS``, and ``day``
        measures : of ``MEASURES``
        where : dimension -> the values that count
        conditions : further ones, on rows; with any no roll-up can help

        Returns
        -------
        key, in the order of ``group_by`` -> sums by name

        Raises
        ------
        StoreUnavailable and its kinds
        """
        where = where or {}
        for last in range(_TRIES - 1, -1, -1):
            async with self._store.reading() as connection:
                marks = await _marks(connection, span) if last and not conditions else {}
                found: dict[Key, Sums] = {}
                for statement in self._statements(span, list(marks), group_by, measures, where):
                    chosen = statement.where(*conditions)
                    _merge(found, await connection.execute(chosen), group_by, measures)
                now = await _marks(connection, span) if marks else {}
                # Sums that were taken apart meanwhile may have been read in part.
                if all(now.get(day) == token for day, token in marks.items()):
                    return found
        raise AssertionError("the last try rests on rows alone")

    def _statements(
        self,
        span: Span,
        days: Sequence[date],
        group_by: Sequence[str],
        measures: Sequence[str],
        where: Mapping[str, Collection[Any]],
    ) -> Iterable[Any]:
        if days:
            wanted = [_sum_again(name) for name in measures]
            keys = [_D[name] for name in group_by]
            statement = select(*keys, *wanted).where(*(_D[name].in_(values) for name, values in where.items()))
            runs = [_D.day.between(first, last) for first, last in _runs(days)]
            for together in runs:
                yield statement.where(together).group_by(*keys)
        for gap in span.without(days):
            yield _select_rows(gap, self._keys(group_by), measures, where)

    def _keys(self, group_by: Sequence[str]) -> list[Any]:
        return [_day_of_row(self._store).label("day") if name == "day" else _R[name] for name in group_by]


class DayFolder:
    """Sums up days that are over; on the leader, though two at once do no harm.

    Parameters
    ----------
    store : the open database
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    async def fold_next(self, now: datetime | None = None) -> date | None:
        """Sum up the newest day that needs it. None where there is none.

        Parameters
        ----------
        now : instead of the clock; on PostgreSQL the database's own, which its triggers go by

        Raises
        ------
        StoreUnavailable and its kinds
        """
        day = await self._next(now)
        if day is not None:
            await self._fold(day)
        return day

    async def _next(self, now: datetime | None) -> date | None:
        async with self._store.reading() as connection:
            if now is None:
                is_sqlite = self._store.dialect == "sqlite"
                now = datetime.now(UTC) if is_sqlite else (await connection.execute(select(func.now()))).scalar_one()
            until = _begin((now - _SETTLED).astimezone(UTC).date())
            span = Span(None, until)
            for gap in reversed(span.without(list(await _marks(connection, span)))):
                newest = (await connection.execute(select(func.max(_R.created_at)).where(*gap.conditions()))).scalar()
                if newest is not None:
                    day: date = newest.astimezone(UTC).date()
                    return day
        return None

    async def _fold(self, day: date) -> bool:
        """Sum up a day; False where a row of it came or went meanwhile."""
        token = uuid7()
        async with self._store.transaction() as connection:
            await self._lock(connection)
            await connection.execute(delete(usage_days).where(usage_days.c.day == day))
            await connection.execute(delete(daily_usage).where(_D.day == day))
            await connection.execute(insert(usage_days).values(day=day, token=token, is_complete=False))
        found: dict[Key, Sums] = {}
        measures = tuple(MEASURES)
        # Hour by hour: no statement reads for long.
        for hour in range(24):
            begin = _begin(day) + hour * _HOUR
            statement = _select_rows(Span(begin, begin + _HOUR), [_R[name] for name in DIMENSIONS], measures, {})
            async with self._store.reading() as connection:
                _merge(found, await connection.execute(statement), DIMENSIONS, measures)
        rows = [
            {"day": day, "place": place, **dict(zip(DIMENSIONS, key, strict=True)), **sums}
            for place, (key, sums) in enumerate(found.items())
        ]
        async with self._store.transaction() as connection:
            await self._lock(connection)
            is_ours = (usage_days.c.day == day) & (usage_days.c.token == token)
            marked = await connection.execute(update(usage_days).where(is_ours).values(is_complete=True))
            if marked.rowcount != 1:
                return False
            for begin_at in range(0, len(rows), _ROWS_AT_ONCE):
                await connection.execute(insert(daily_usage), rows[begin_at : begin_at + _ROWS_AT_ONCE])
        return True

    async def _lock(self, connection: AsyncConnection) -> None:
        """Wait for transactions that are adding or deleting older rows; SQLite's one writer needs no more."""
        if self._store.dialect == "postgresql":
            await connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))


def _begin(day: date) -> datetime:
    return datetime.combine(day, time(), UTC)


def _runs(days: Iterable[date]) -> list[tuple[date, date]]:
    """Days as runs, both ends included."""
    found: list[tuple[date, date]] = []
    for day in sorted(days):
        if found and found[-1][1] + _DAY == day:
            found[-1] = (found[-1][0], day)
        else:
            found.append((day, day))
    return found


async def _marks(connection: AsyncConnection, span: Span) -> dict[date, str]:
    """Days of a stretch that are summed up -> which sums they are."""
    statement = select(usage_days.c.day, usage_days.c.token).where(usage_days.c.is_complete)
    return {row.day: row.token for row in await connection.execute(statement) if span.holds(row.day)}


def _select_rows(span: Span, keys: Sequence[Any], measures: Sequence[str], where: Mapping[str, Collection[Any]]) -> Any:
    wanted = [MEASURES[name].label(name) for name in measures]
    statement = select(*keys, *wanted).where(*span.conditions())
    return statement.where(*(_R[name].in_(values) for name, values in where.items())).group_by(*keys)


def _sum_again(name: str) -> Any:
    if name == "least_probability":
        return func.min(_D[name]).label(name)
    return _sum(_D[name]).label(name)


def _day_of_row(store: Store) -> ColumnElement[str]:
    """The day of a row in UTC, as ``2026-01-31``."""
    if store.dialect == "sqlite":
        return func.strftime("%Y-%m-%d", _R.created_at)
    return func.to_char(func.timezone("UTC", _R.created_at), "YYYY-MM-DD")


def _merge(found: dict[Key, Sums], rows: Any, group_by: Sequence[str], measures: Sequence[str]) -> None:
    for row in rows.mappings():
        key = tuple(str(row[name]) if name == "day" else row[name] for name in group_by)
        sums = found.get(key)
        if sums is None:
            found[key] = {name: _number(name, row[name]) for name in measures}
            continue
        for name in measures:
            value = _number(name, row[name])
            if name != "least_probability":
                sums[name] += value
            elif value is not None:
                sums[name] = value if sums[name] is None else min(sums[name], value)


def _number(name: str, value: Any) -> Any:
    if name == "least_probability":
        return None if value is None else float(value)
    return float(value) if name == "compute_s" else int(value)
