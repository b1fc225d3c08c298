"""Reads the training table out of the log, in batches, in bounded memory.

Of checked requests all are read, of the others a sample that stands for them: both only up to a limit, beyond which
rows are drawn by the random digits of their ids, so that the same log gives the same table and a draw needs no second
pass. Rows travel through a server-side cursor; what is not wanted never leaves the database.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import numpy as np
import orjson
from sqlalchemy import ColumnElement, Select, Text, and_, cast, func, literal_column, select
from sqlalchemy.ext.asyncio import AsyncConnection

from classifier.log_view import ViewReader, tool_matrix, tool_values
from gateway.learn.learning_table import LEAST_CHANCE, Ints, LabelOrigin, LearningTable
from gateway.store.rows import from_nano_usd
from gateway.store.store import Store
from gateway.store.tables import gold_labels, request_texts, requests, verifications
from policies.sampling import FAULTY

BATCH_ROWS = 1000
_RANDOM_FROM = 25
_RANDOM_DIGITS = 6
_SPACE = 16**_RANDOM_DIGITS

Progress = Callable[[float], None]
"""Told the part that is done, 0..1."""


@dataclass(frozen=True, slots=True)
class TableSpec:
    """Says which part of the log to read.

    Parameters
    ----------
    num_tiers, num_components : of the base router
    versions : routers of this base, whose rows can be read
    since, until : of requests, aware
    max_checked, max_unchecked : rows beyond this are sampled
    reads_tools : the base router reads what requests say of tools
    """

    num_tiers: int
    num_components: int
    versions: tuple[str, ...]
    since: datetime
    until: datetime
    max_checked: int = 100_000
    max_unchecked: int = 30_000
    reads_tools: bool = False


@dataclass(slots=True)
class _Columns:
    """The table while it grows: one entry a request."""

    spec: TableSpec
    request_ids: list[str] = field(default_factory=list)
    created_s: list[float] = field(default_factory=list)
    views: list[Any] = field(default_factory=list)
    served: list[int] = field(default_factory=list)
    propensity: list[list[float]] = field(default_factory=list)
    labels: list[list[float]] = field(default_factory=list)
    chance: list[list[float]] = field(default_factory=list)
    label_origins: list[list[int]] = field(default_factory=list)
    sampling_weight: list[float] = field(default_factory=list)
    cost_usd: list[float] = field(default_factory=list)
    tokens: list[tuple[int, int]] = field(default_factory=list)
    num_steps: list[int] = field(default_factory=list)
    num_labels: Counter[tuple[int, int]] = field(default_factory=Counter)
    digests: list[str] = field(default_factory=list)
    policies: list[str] = field(default_factory=list)
    overrides: list[Mapping[str, Any]] = field(default_factory=list)
    tools: list[tuple[float, ...]] = field(default_factory=list)
    # Rows without features: ``log.prompts`` was ``none``.
    unread: set[str] = field(default_factory=set)

    def add(self, row: Any, reader: ViewReader, sampling_weight: float) -> bool:
        """Take one request without labels; False where its row cannot be used."""
        served, chances = int(row.final_tier), orjson.loads(row.propensities)
        propensity = [float(chances.get(str(tier), 0.0)) for tier in range(1, self.spec.num_tiers + 1)]
        if not 1 <= served <= self.spec.num_tiers or propensity[served - 1] <= 0.0:
            return False  # a fallback answered, with a chance nobody drew from
        features = orjson.loads(row.features)
        view = reader.read(features, orjson.loads(row.sufficiency), row.novelty)
        if view is None:
            self.unread.add(row.request_id)
            return False
        width = self.spec.num_tiers - 1
        self.request_ids.append(row.request_id)
        self.created_s.append(row.created_at.timestamp())
        self.views.append(view)
        self.served.append(served - 1)
        self.propensity.append(propensity)
        self.labels.append([float("nan")] * width)
        self.chance.append([1.0] * width)
        self.label_origins.append([LabelOrigin.NONE] * width)
        self.sampling_weight.append(sampling_weight)
        self.cost_usd.append(float(from_nano_usd(row.cost_nano_usd)))
        self.tokens.append((row.prompt_tokens, row.completion_tokens))
        self.num_steps.append(1)
        self.digests.append(row.prompt_digest or row.request_id)
        self.policies.append(row.policy_name)
        self.overrides.append(orjson.loads(row.overrides))
        self.tools.append(tool_values(features))
        return True

    def label(self, place: int, tier: int, value: float, chance: float, origin: LabelOrigin) -> None:
        """Note what is known of a tier's answer (1-based); gold beats a grader."""
        if self.label_origins[place][tier - 1] != LabelOrigin.GOLD:
            self.labels[place][tier - 1] = min(max(value, 0.0), 1.0)
            self.chance[place][tier - 1] = max(chance, LEAST_CHANCE)
            self.label_origins[place][tier - 1] = origin

    def label_step(self, place: int, tier: int, value: float, origin: LabelOrigin) -> None:
        """Take in what is known of a further step of a turn: its label is the mean over them, drawn as the turn was."""
        num = self.num_labels[place, tier]
        if not num or self.label_origins[place][tier - 1] != origin:
            return
        mean = self.labels[place][tier - 1]
        self.labels[place][tier - 1] = mean + (min(max(value, 0.0), 1.0) - mean) / (num + 1)
        self.num_labels[place, tier] = num + 1


async def read_table(store: Store, spec: TableSpec, progress: Progress = lambda done: None) -> LearningTable:
    """Return the table, oldest request first.

    Raises
    ------
    StoreUnavailable and its kinds
    """
    reader = ViewReader(spec.num_tiers, spec.num_components, reads_tools=spec.reads_tools)
    columns = _Columns(spec)
    async with store.transaction() as connection:
        num_checked, num_unchecked, num_other = await _counts(connection, spec)
        kept = _threshold(num_checked, spec.max_checked)
        weight = 1.0 if kept is None else num_checked / spec.max_checked
        total = min(num_checked, spec.max_checked) + min(num_unchecked, spec.max_unchecked) + 1
        async for row in _stream(connection, _checked(spec, kept)):
            _take_checked(columns, row, reader, weight)
            if not len(columns.request_ids) % BATCH_ROWS:
                progress(len(columns.request_ids) / total)
        rows_checked = len(columns.request_ids)
        kept = _threshold(num_unchecked, spec.max_unchecked)
        async for row in _stream(connection, _unchecked(spec, kept)):
            columns.add(row, reader, 1.0)
            if not len(columns.request_ids) % BATCH_ROWS:
                progress(len(columns.request_ids) / total)
        _weigh_unchecked(columns, rows_checked, num_unchecked)
        await _add_steps(connection, spec, columns)
        await _add_gold(connection, spec, columns, reader)
    progress(1.0)
    return _table(columns, reader, num_checked + num_unchecked, num_other)


async def read_texts(store: Store, request_ids: Sequence[str]) -> dict[str, str]:
    """Prompts that retention kept, by request id."""
    found: dict[str, str] = {}
    async with store.transaction() as connection:
        for start in range(0, len(request_ids), BATCH_ROWS):
            wanted = request_texts.c.request_id.in_(request_ids[start : start + BATCH_ROWS])
            rows = await connection.execute(select(request_texts.c.request_id, request_texts.c.prompt).where(wanted))
            found |= {row.request_id: row.prompt for row in rows if row.prompt is not None}
    return found


# ---- statements

_KEPT = (
    requests.c.request_id,
    requests.c.created_at,
    requests.c.prompt_digest,
    requests.c.policy_name,
    # As text: decoded only where a row is used.
    cast(requests.c.features, Text).label("features"),
    cast(requests.c.sufficiency, Text).label("sufficiency"),
    cast(requests.c.propensities, Text).label("propensities"),
    cast(requests.c.overrides, Text).label("overrides"),
    requests.c.novelty,
    requests.c.final_tier,
    requests.c.prompt_tokens,
    requests.c.completion_tokens,
    requests.c.cost_nano_usd,
)
_DONE = and_(verifications.c.status == "done", verifications.c.p_good.is_not(None))


def _usable(spec: TableSpec) -> ColumnElement[bool]:
    """Answered as decided, by an estimate that can be read, not by the caller's own choice of a tier."""
    r = requests.c
    return and_(
        r.created_at >= spec.since,
        r.created_at < spec.until,
        r.error_code.is_(None),
        r.final_tier == r.decided_tier,
        r.router_version.in_(spec.versions),
        r.reason != "pinned",
        # A step of a tool loop follows the decision of its turn: the turn is the unit.
        r.turn_id.is_(None),
    )


def _has_check() -> ColumnElement[bool]:
    # Looked up by request: a bare comparison would tempt SQLite to walk all finished checks for every request.
    is_done = (verifications.c.status.concat("") == "done") & verifications.c.p_good.is_not(None)
    wanted = (verifications.c.request_id == requests.c.request_id) & is_done
    return select(verifications.c.request_id).where(wanted).exists()


def _random_digits() -> ColumnElement[str]:
    return func.substr(requests.c.request_id, _RANDOM_FROM, _RANDOM_DIGITS)


def _threshold(found: int, wanted: int) -> str | None:
    """Random digits below which a row is kept; None keeps all."""
    return None if found <= wanted else f"{int(_SPACE * wanted / found):0{_RANDOM_DIGITS}x}"


def _checked(spec: TableSpec, kept: str | None) -> Select[Any]:
    v = verifications.c
    joined = requests.join(verifications, v.request_id == requests.c.request_id)
    columns = (*_KEPT, v.tier, v.against_tier, v.inclusion_probability, v.stratum, v.p_good)
    statement = select(*columns).select_from(joined).where(_usable(spec), _DONE)
    if kept is not None:
        statement = statement.where(_random_digits() < kept)
    return statement.order_by(requests.c.request_id)


def _unchecked(spec: TableSpec, kept: str | None) -> Select[Any]:
    statement = select(*_KEPT).where(_usable(spec), ~_has_check())
    if kept is not None:
        statement = statement.where(_random_digits() < kept)
    return statement.order_by(requests.c.request_id)


async def _counts(connection: AsyncConnection, spec: TableSpec) -> tuple[int, int, int]:
    """Usable requests with a check and without, and checked ones of other routers."""
    num = func.count(literal_column("1"))
    checked = (await connection.execute(select(num).select_from(requests).where(_usable(spec), _has_check()))).scalar()
    usable = (await connection.execute(select(num).select_from(requests).where(_usable(spec)))).scalar()
    r = requests.c
    others = and_(
        r.created_at >= spec.since, r.created_at < spec.until, r.router_version.not_in(spec.versions), _has_check()
    )
    other = (await connection.execute(select(num).select_from(requests).where(others))).scalar()
    return int(checked or 0), int((usable or 0) - (checked or 0)), int(other or 0)


async def _stream(connection: AsyncConnection, statement: Select[Any]) -> AsyncIterator[Any]:
    result = await connection.stream(statement.execution_options(yield_per=BATCH_ROWS))
    async for row in result:
        yield row


# ---- labels


def _take_checked(columns: _Columns, row: Any, reader: ViewReader, weight: float) -> None:
    """One check; several of a request come one after another."""
    is_known = bool(columns.request_ids) and columns.request_ids[-1] == row.request_id
    if not is_known and not columns.add(row, reader, weight):
        return
    place, top = len(columns.request_ids) - 1, columns.spec.num_tiers
    cheap, dear = sorted((int(row.tier), int(row.against_tier)))
    if not 1 <= cheap < dear <= top:
        return
    if dear == top:
        origin = LabelOrigin.UP if row.final_tier == cheap else LabelOrigin.DOWN
        columns.label(place, cheap, row.p_good, row.inclusion_probability, origin)
        # A turn that began with a fault is known without its draw, and what the draw finds later adds nothing.
        columns.num_labels[place, cheap] = int(row.stratum != FAULTY)
        return
    # Compared with a tier between: as good as the top tier where that one is, too.
    between = _p_good(columns.views[place], dear, top)
    columns.label(place, cheap, row.p_good * between, row.inclusion_probability, LabelOrigin.DERIVED)


def _weigh_unchecked(columns: _Columns, first: int, num_unchecked: int) -> None:
    """Set the sampling weights of unchecked rows: each stands for as many of the requests that were not checked."""
    drawn = len(columns.request_ids) - first
    columns.sampling_weight[first:] = [num_unchecked / drawn] * drawn if drawn else []


async def _add_steps(connection: AsyncConnection, spec: TableSpec, columns: _Columns) -> None:
    """Add to each turn what its further steps took, and what was found of them."""
    places = {name: place for place, name in enumerate(columns.request_ids)}
    r, v = requests.c, verifications.c
    mine = and_(r.turn_id.is_not(None), r.created_at >= spec.since)
    sums = (func.sum(r.prompt_tokens), func.sum(r.completion_tokens), func.sum(r.cost_nano_usd), func.count())
    async for row in _stream(connection, select(r.turn_id, *sums).where(mine).group_by(r.turn_id)):
        if (place := places.get(row[0])) is None:
            continue
        num_in, num_out = columns.tokens[place]
        columns.tokens[place] = (num_in + int(row[1]), num_out + int(row[2]))
        columns.cost_usd[place] += float(from_nano_usd(int(row[3])))
        columns.num_steps[place] += int(row[4])
    joined = requests.join(verifications, v.request_id == r.request_id)
    # What is known without a draw is no part of what the turn was drawn for.
    checked = select(r.turn_id, v.tier, v.against_tier, v.direction, v.p_good).select_from(joined)
    async for row in _stream(connection, checked.where(mine, _DONE, v.stratum != FAULTY)):
        cheap, dear = sorted((int(row.tier), int(row.against_tier)))
        if (place := places.get(row.turn_id)) is not None and dear == columns.spec.num_tiers and cheap < dear:
            columns.label_step(place, cheap, row.p_good, LabelOrigin.UP if row.direction == "up" else LabelOrigin.DOWN)


async def _add_gold(connection: AsyncConnection, spec: TableSpec, columns: _Columns, reader: ViewReader) -> None:
    """Add labels from outside the draw: a right answer is as good as any, a wrong one as far as the top tier errs.

    Such labels were not drawn with a known chance (people report what they notice), so requests that only they speak of
    stand for nobody but themselves.
    """
    places = {name: place for place, name in enumerate(columns.request_ids)}
    joined = requests.join(gold_labels, gold_labels.c.request_id == requests.c.request_id)
    statement = select(*_KEPT, gold_labels.c.tier, gold_labels.c.label).select_from(joined).where(_usable(spec))
    async for row in _stream(connection, statement.order_by(requests.c.request_id).limit(spec.max_checked)):
        if row.tier >= spec.num_tiers:
            continue
        if row.request_id not in places:
            if not columns.add(row, reader, 0.0):
                continue
            places[row.request_id] = len(columns.request_ids) - 1
        place = places[row.request_id]
        top_right = _p_right(columns.views[place], spec.num_tiers, spec.num_tiers)
        value = row.label + (1.0 - row.label) * (1.0 - top_right)
        columns.label(place, int(row.tier), value, 1.0, LabelOrigin.GOLD)


def _table(columns: _Columns, reader: ViewReader, num_requests: int, num_other: int) -> LearningTable:
    num, tiers = len(columns.request_ids), columns.spec.num_tiers
    tokens = np.array(columns.tokens, dtype=np.int64).reshape(num, 2)
    created_s = np.array(columns.created_s)
    oldest_first = np.argsort(created_s, kind="stable")
    table = LearningTable(
        request_ids=tuple(columns.request_ids),
        created_s=created_s,
        views=replace(reader.stack(columns.views), tools=tool_matrix(columns.tools)),
        served=np.array(columns.served, dtype=np.int64),
        propensity=np.array(columns.propensity).reshape(num, tiers),
        labels=np.array(columns.labels).reshape(num, tiers - 1),
        chance=np.array(columns.chance).reshape(num, tiers - 1),
        label_origins=np.array(columns.label_origins, dtype=np.int8).reshape(num, tiers - 1),
        sampling_weight=np.array(columns.sampling_weight),
        cost_usd=np.array(columns.cost_usd),
        prompt_tokens=tokens[:, 0],
        completion_tokens=tokens[:, 1],
        num_steps=np.array(columns.num_steps, dtype=np.int64),
        groups=_groups(columns.digests, oldest_first),
        policies=tuple(columns.policies),
        overrides=tuple(columns.overrides),
        tools=tuple(columns.tools),
        num_requests=num_requests,
        num_other=num_other,
        num_unread=len(columns.unread),
    )
    return table.take(oldest_first)


# A view ends with P(right) of every tier, P(as good) of every tier, and the novelty: see ``ViewReader.read``.


def _p_right(view: Any, tier: int, num_tiers: int) -> float:
    """Return a view's P(right) of a tier, counted from 1."""
    return float(view[len(view) - 1 - 2 * num_tiers + tier - 1])


def _p_good(view: Any, tier: int, num_tiers: int) -> float:
    """Return a view's P(as good as the top tier) of a tier, counted from 1."""
    return float(view[len(view) - 1 - num_tiers + tier - 1])


def _groups(digests: Sequence[str], oldest_first: Ints) -> Ints:
    """Equal digests get one number, in the order in which they first came.

    Not in the digests' own order: that is the installation's key's, and folds are dealt by these numbers, so that the
    same log would teach a different router wherever it was written.
    """
    numbers: dict[str, int] = {}
    for row in oldest_first:
        numbers.setdefault(digests[row], len(numbers))
    return np.array([numbers[each] for each in digests], dtype=np.int64)
