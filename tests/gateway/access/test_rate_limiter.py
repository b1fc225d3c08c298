"""Own books beside a log that others write too: what is reserved, settled, read again and when."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from gateway.access.authenticator import Caller
from gateway.access.key_limits import KeyLimits
from gateway.access.rate_limiter import RateLimiter, Reservation
from gateway.errors import QuotaExhausted, RateLimited
from gateway.store.key_sums import KeySum
from policies.policy import Policy
from tests.gateway.raw import eventually

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

    def __init__(self, *, renews: bool = True) -> None:
        self.now = NOON
        self.log = Log()
        self.limiter = RateLimiter(self.log, renews=renews, clock=lambda: self.now)

    async def ask(self, hold_id: str, limits: KeyLimits, num_tokens: int = 1, cost_nano_usd: int = 1) -> Reservation:
        reservation = await self.limiter.admit(hold_id, Caller(key_id="k", limits=limits), num_tokens)
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
