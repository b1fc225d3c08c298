"""Books against integers: in memory and in Redis, whatever the order of reservations, settlements and readings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Protocol

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from gateway.access.ledger import LocalLedger, Verdict
from gateway.access.rate_windows import Account, Meter, Want, account_of
from gateway.access.redis_ledger import RedisLedger
from gateway.ids import uuid7

NOW = datetime.now(UTC)


class Books(Protocol):
    async def reserve(self, hold_id: str, wants: Sequence[Want]) -> Verdict: ...

    async def settle(self, hold_id: str, actual: Mapping[Account, int]) -> None: ...

    async def open(self, account: Account, used: int) -> None: ...


class InMemory:
    """The local books under the same names as those in Redis."""

    def __init__(self) -> None:
        self.ledger = LocalLedger()

    async def reserve(self, hold_id: str, wants: Sequence[Want]) -> Verdict:
        return self.ledger.reserve(hold_id, wants)

    async def settle(self, hold_id: str, actual: Mapping[Account, int]) -> None:
        self.ledger.settle(hold_id, actual)

    async def open(self, account: Account, used: int) -> None:
        self.ledger.open(account, used)


@pytest_asyncio.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.db)])
async def books(request: pytest.FixtureRequest) -> AsyncIterator[Books]:
    if request.param == "memory":
        yield InMemory()
        return
    ledger = RedisLedger(Redis.from_url(request.getfixturevalue("redis_url")), lapse_s=60)
    yield ledger
    await ledger.close()


Step = tuple[str, int, int, int]
steps: st.SearchStrategy[list[Step]] = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "settle", "release", "again"]),
        st.integers(0, 5),
        st.integers(0, 40),
        st.integers(0, 60),
    ),
    max_size=30,
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=steps, limits=st.tuples(st.integers(0, 100), st.integers(0, 100)), opening=st.integers(0, 50))
async def test_books_agree_with_integers(
    books: Books, steps: list[Step], limits: tuple[int, int], opening: int
) -> None:
    key_id = uuid7()
    accounts = [account_of(key_id, Meter.REQUESTS, NOW), account_of(key_id, Meter.DAY, NOW)]
    for account in accounts:
        await books.open(account, opening)
    used, held = [opening, opening], dict[str, tuple[int, int]]()
    for verb, name, first, second in steps:
        hold = f"hold-{name}"
        if verb == "reserve" and hold not in held:
            spent = [used[i] + sum(each[i] for each in held.values()) for i in (0, 1)]
            wants = [Want(a, limit, n) for a, limit, n in zip(accounts, limits, (first, second), strict=True)]
            verdict = await books.reserve(hold, wants)
            short = [i for i in (0, 1) if spent[i] + wants[i].amount > limits[i]]
            assert verdict.refused == (short[0] if short else None)
            if not short:
                held[hold] = (first, second)
                spent = [spent[0] + first, spent[1] + second]
            assert list(verdict.spent) == spent
            assert min(spent) >= 0
        elif verb in ("settle", "release") and hold in held:
            actual = (first, second) if verb == "settle" else (0, 0)
            await books.settle(hold, dict(zip(accounts, actual, strict=True)))
            del held[hold]
            used = [used[0] + actual[0], used[1] + actual[1]]
        elif verb == "again":
            for account in accounts:
                await books.open(account, min(used))
    for hold in list(held):
        await books.settle(hold, dict.fromkeys(accounts, 0))
    free = await books.reserve("last", [Want(a, 10**9, 0) for a in accounts])
    assert list(free.spent) == used, "what is released leaves no trace"


async def test_nothing_is_reserved_of_what_is_not_known(books: Books) -> None:
    account = account_of(uuid7(), Meter.TOKENS, NOW)
    assert (await books.reserve("a", [Want(account, 10, 1)])).unknown == (account,)
    await books.open(account, 9)
    assert (await books.reserve("a", [Want(account, 10, 1)])).spent == (10,)
    assert (await books.reserve("b", [Want(account, 10, 1)])).refused == 0


async def test_many_at_once_never_pass_the_limit(books: Books) -> None:
    account = account_of(uuid7(), Meter.REQUESTS, NOW)
    await books.open(account, 0)
    verdicts = await asyncio.gather(*(books.reserve(f"h{i}", [Want(account, 17, 1)]) for i in range(50)))
    assert sum(each.refused is None for each in verdicts) == 17


@pytest.mark.db
async def test_what_a_killed_gateway_held_lapses(redis_url: str) -> None:
    redis = Redis.from_url(redis_url)
    dying = RedisLedger(redis, lapse_s=600)
    other = RedisLedger(Redis.from_url(redis_url), lapse_s=60)
    account = account_of(uuid7(), Meter.MONTH, NOW)
    await dying.open(account, 5)
    assert (await dying.reserve("lost", [Want(account, 10, 5)])).refused is None
    assert (await other.reserve("next", [Want(account, 10, 5)])).refused == 0
    # Its time is over by Redis's clock, which nobody can set: so the moment is moved, not the clock.
    (holds,) = [name async for name in redis.scan_iter() if await redis.type(name) == b"zset"]
    await redis.zadd(holds, {"lost": 0}, xx=True)
    await dying.close()
    assert (await other.reserve("next", [Want(account, 10, 5)])).spent == (10,)
    # The lost one was not lost after all: what it used counts.
    await other.settle("lost", {account: 3})
    assert (await other.reserve("look", [Want(account, 100, 0)])).spent == (13,)
    await other.close()


def test_own_books_take_over_what_others_used() -> None:
    ledger = LocalLedger()
    account = account_of("k", Meter.DAY, NOW)
    ledger.open(account, 100)
    ledger.reserve("a", [Want(account, 1000, 50)])
    ledger.settle("a", {account: 60})
    mark = ledger.mark(account)
    ledger.reserve("b", [Want(account, 1000, 10)])
    ledger.settle("b", {account: 10})
    # The log's sum was read after "a" and before "b": another process had used 40.
    ledger.renew(account, 200, mark)
    assert ledger.spent(account) == 210


def test_windows_that_are_over_are_forgotten_but_for_what_is_held() -> None:
    """A long life and many keys must not fill the memory."""
    now = datetime(2026, 1, 31, 12, tzinfo=UTC)
    ledger = LocalLedger(clock=lambda: now)
    minutes = [account_of(f"k{number}", Meter.REQUESTS, now) for number in range(1500)]
    days = [account_of(each.owner, Meter.DAY, now) for each in minutes]
    for each in minutes:
        ledger.open(each, 1)
    assert ledger.reserve("runs", [Want(minutes[0], 10, 2)]).refused is None
    now = minutes[0].ends_at
    for each in days * 2:
        ledger.open(each, 1)
    assert not any(ledger.reserve("h", [Want(each, 10, 0)]).unknown for each in (*days, minutes[0]))
    assert all(ledger.reserve("h", [Want(each, 10, 0)]).unknown == (each,) for each in minutes[1:])
    assert ledger.spent(minutes[0]) == 3


@pytest.mark.parametrize("meter", list(Meter))
@given(moment=st.datetimes(min_value=datetime(2024, 1, 1), max_value=datetime(2040, 1, 1)))
def test_a_moment_is_in_its_window_and_windows_meet(meter: Meter, moment: datetime) -> None:
    aware = moment.replace(tzinfo=UTC)
    account = account_of("k", meter, aware)
    assert account.begins_at <= aware < account.ends_at
    assert account_of("k", meter, account.ends_at).begins_at == account.ends_at
    assert account_of("k", meter, account.ends_at - timedelta(microseconds=1)) == account
