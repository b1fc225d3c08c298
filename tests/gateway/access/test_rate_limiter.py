"""Own books beside a log that others write too: what is reserved, settled, read again and when."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from redis.asyncio import Redis

from gateway.access import rate_limiter
from gateway.access.authenticator import Caller
from gateway.access.key_limits import KeyLimits
from gateway.access.rate_limiter import RateLimiter, Reservation
from gateway.access.redis_ledger import RedisLedger
from gateway.errors import QuotaExhausted, RateLimited
from gateway.ids import uuid7
from gateway.store.key_sums import KeySum
from policies.policy import Policy
from tests.gateway.raw import PATIENCE_S, eventually

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


class Log:
    """Sums that others' requests raise, and how often each owner's were read."""

    def __init__(self) -> None:
        self.sums = KeySum(0, 0, 0)
        self.num_reads = 0

    async def since(self, key_id: str, moment: datetime) -> KeySum:
        self.num_reads += 1
        return self.sums

    async def since_by_policy(self, policy_name: str, moment: datetime) -> KeySum:
        return await self.since(policy_name, moment)


class Rates:
    """A limiter, its log and its clock."""

    def __init__(self, *, renews: bool = True, shared: RedisLedger | None = None, key_id: str = "k") -> None:
        self.now = NOON
        self.log = Log()
        self.key_id = key_id
        self.limiter = RateLimiter(self.log, shared, renews=renews, clock=lambda: self.now)

    async def ask(self, hold_id: str, limits: KeyLimits, num_tokens: int = 1, cost_nano_usd: int = 1) -> Reservation:
        reservation = await self.limiter.admit(hold_id, Caller(key_id=self.key_id, limits=limits), num_tokens)
        await self.limiter.afford(reservation, None, cost_nano_usd)
        await eventually(lambda: not self.limiter._tasks)
        return reservation

    def left(self, reservation: Reservation) -> dict[str, int]:
        prefix = b"x-ratelimit-remaining-"
        return {
            name.removeprefix(prefix).decode(): int(value)
            for name, value in reservation.headers
            if name.startswith(prefix)
        }


@pytest.mark.parametrize(
    ("renews", "wait_s", "num_again"), [(True, 1.9, 0), (True, 2.0, 2), (True, 30.0, 3), (False, 30.0, 0)]
)
async def test_each_account_is_read_again_when_its_turn_comes(renews: bool, wait_s: float, num_again: int) -> None:
    """Minutes every two seconds, days every thirty, and never where nobody else writes the log."""
    rates = Rates(renews=renews)
    limits = KeyLimits(requests_per_minute=100, tokens_per_minute=1000, budget_usd_per_day=Decimal(1))
    await rates.ask("first", limits)
    assert rates.log.num_reads == 3
    rates.now += timedelta(seconds=wait_s)
    await rates.ask("second", limits)
    assert rates.log.num_reads == 3 + num_again
    await rates.ask("third", limits)
    assert rates.log.num_reads == 3 + num_again, "once a turn"


async def test_what_others_used_is_taken_over_and_what_is_held_stays_held() -> None:
    rates = Rates()
    limits = KeyLimits(requests_per_minute=100, tokens_per_minute=1000)
    first = await rates.ask("first", limits, num_tokens=50)
    assert rates.left(first) == {"requests": 99, "tokens": 950}
    rates.log.sums = KeySum(10, 200, 0)
    rates.now += timedelta(seconds=2)
    await rates.ask("second", limits, num_tokens=50)
    third = await rates.ask("third", limits, num_tokens=50)
    assert rates.left(third) == {"requests": 87, "tokens": 650}
    rates.limiter.settle(first, num_requests=1, num_tokens=5, cost_nano_usd=0)
    rates.limiter.settle(first, num_requests=1, num_tokens=5, cost_nano_usd=0)
    fourth = await rates.ask("fourth", limits, num_tokens=0)
    assert rates.left(fourth) == {"requests": 86, "tokens": 695}, "settled once"
    rates.log.sums = KeySum(11, 205, 0)
    rates.now += timedelta(seconds=2)
    await rates.ask("fifth", limits, num_tokens=0)
    sixth = await rates.ask("sixth", limits, num_tokens=0)
    assert rates.left(sixth) == {"requests": 84, "tokens": 695}, "its row is in the log by now"


async def test_a_refusal_says_whose_what_and_how_long_and_holds_nothing() -> None:
    rates = Rates()
    limits = KeyLimits(requests_per_minute=2, budget_usd_per_day=Decimal(1), budget_usd_per_month=Decimal(2))
    rates.now = NOON + timedelta(seconds=59.5)
    for hold_id in ("first", "second"):
        await rates.ask(hold_id, limits)
    with pytest.raises(RateLimited) as refused:
        await rates.ask("third", limits)
    assert refused.value.retry_after_s == 1.0, "never less than a second"
    rates.now = NOON + timedelta(minutes=1)
    policy = Policy(name="thrifty", budget_usd_per_day=Decimal("0.6"))
    for cost_nano_usd, whose in ((10**9 - 1, "this key"), (10**9 - 2, "policy 'thrifty'"), (600_000_000, None)):
        reservation = await rates.limiter.admit("fourth", Caller(key_id="k", limits=limits), 0)
        if whose is None:
            await rates.limiter.afford(reservation, policy, cost_nano_usd)
        else:
            with pytest.raises(QuotaExhausted, match=f"of {whose} of .* a day") as exhausted:
                await rates.limiter.afford(reservation, policy, cost_nano_usd)
            assert exhausted.value.retry_after_s == 12 * 3600 - 60
        rates.limiter.settle(reservation, num_requests=0, num_tokens=0, cost_nano_usd=0)
    await rates.ask("last", limits, cost_nano_usd=10**9 - 2)


async def test_a_request_that_was_refused_spends_itself_and_no_tokens() -> None:
    rates = Rates()
    limits = KeyLimits(requests_per_minute=3, tokens_per_minute=100)
    for hold_id in ("first", "second"):
        await rates.limiter.charge_refusal(hold_id, Caller(key_id="k", limits=limits))
    # The log has no row of them, so that reading it again does not give them back.
    rates.now += timedelta(seconds=2)
    await rates.ask("third", limits, num_tokens=0)
    with pytest.raises(RateLimited) as refused:
        await rates.ask("fourth", limits, num_tokens=0)
    assert (b"x-ratelimit-remaining-tokens", b"100") in refused.value.headers
    poor = Rates()
    await poor.ask("first", KeyLimits(tokens_per_minute=1), num_tokens=1)
    await poor.limiter.charge_refusal("second", Caller(key_id="k", limits=KeyLimits(tokens_per_minute=1)))


@pytest.fixture
async def pair(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Rates, Rates, Redis]]:
    """Two limiters that share their books, which are waited for however busy the machine is; and the books."""
    monkeypatch.setattr(rate_limiter, "_REDIS_TIMEOUT_S", PATIENCE_S)
    redis, key_id = Redis.from_url(redis_url), uuid7()
    both = [Rates(shared=RedisLedger(Redis.from_url(redis_url), lapse_s=60), key_id=key_id) for _ in range(2)]
    for each in both:
        each.now = datetime.now(UTC)
    both[1].now = both[0].now
    yield both[0], both[1], redis
    for each in both:
        await each.limiter.close()
    await redis.aclose()


@pytest.mark.db
async def test_shared_books_begin_with_the_log_and_are_read_by_all(pair: tuple[Rates, Rates, Redis]) -> None:
    one, other, redis = pair
    limits = KeyLimits(requests_per_minute=100, tokens_per_minute=1000)
    for each in (one, other):
        each.log.sums = KeySum(10, 200, 0)
    first = await one.ask("first", limits, num_tokens=50)
    assert one.left(first) == {"requests": 89, "tokens": 750}
    second = await other.ask("second", limits, num_tokens=50)
    assert other.left(second) == {"requests": 88, "tokens": 700}
    one.limiter.settle(first, num_requests=1, num_tokens=5, cost_nano_usd=0)
    await eventually(lambda: not one.limiter._tasks)
    third = await other.ask("third", limits, num_tokens=0)
    assert other.left(third) == {"requests": 87, "tokens": 745}
    assert (one.log.num_reads, other.log.num_reads) == (2, 2), "once an account and server"
    async for name in redis.scan_iter(f"*{one.key_id}*"):
        await redis.delete(name)
    one.log.sums = KeySum(13, 205, 0)
    fourth = await one.ask("fourth", limits, num_tokens=0)
    assert one.left(fourth) == {"requests": 86, "tokens": 795}, "emptied, they begin anew"
    assert one.log.num_reads == 4
    one.limiter.settle(fourth, num_requests=1, num_tokens=5, cost_nano_usd=0)
    await one.limiter.close()
    last = await other.ask("last", limits, num_tokens=0)
    assert other.left(last) == {"requests": 85, "tokens": 790}, "a server that stops settles first"


async def test_while_redis_is_away_each_counts_by_itself_and_asks_again_after_a_second(
    free_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = RedisLedger(Redis.from_url(f"redis://127.0.0.1:{free_port}", socket_connect_timeout=0.2), lapse_s=60)
    rates = Rates(shared=ledger)
    limits = KeyLimits(requests_per_minute=4)
    for hold_id in ("first", "second"):
        await rates.ask(hold_id, limits)
    assert rates.log.num_reads == 2, "one for the shared books, one for its own"
    rates.now += timedelta(seconds=1)
    await rates.ask("third", limits)
    assert rates.log.num_reads == 3, "asked again"
    last = await rates.ask("fourth", limits)
    assert rates.left(last) == {"requests": 0}
    with pytest.raises(RateLimited):
        await rates.ask("fifth", limits)
    told = [record.message for record in caplog.records if "Redis does not answer" in record.message]
    assert len(told) == 1, "said once"
    await rates.limiter.close()
