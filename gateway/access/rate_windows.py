"""Declares what is metered, and over which window of the calendar."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from gateway.access.key_limits import KeyLimits
from policies.policy import Policy
from policies.pricing import to_nano_usd


class Meter(StrEnum):
    """Requests and tokens are counted by the minute; cost, in nano-dollars, by the day and the month.

    All are a key's but ``policy_day``, the cost of a day's requests that a policy decided.
    """

    REQUESTS = "requests"
    TOKENS = "tokens"
    DAY = "day"
    MONTH = "month"
    POLICY_DAY = "policy_day"


@dataclass(frozen=True, slots=True)
class Account:
    """A key's or policy's use of one meter in one window, ``[begins_at, ends_at)``; ``owner`` is key id or name."""

    owner: str
    meter: Meter
    begins_at: datetime
    ends_at: datetime


@dataclass(frozen=True, slots=True)
class Want:
    """So much is to be taken from an account that may hold no more than ``limit``."""

    account: Account
    limit: int
    amount: int


def account_of(owner: str, meter: Meter, now: datetime) -> Account:
    """The account that counts at a moment."""
    now = now.astimezone(UTC)
    if meter in (Meter.DAY, Meter.POLICY_DAY):
        begins_at = now.replace(hour=0, minute=0, second=0, microsecond=0)
        return Account(owner, meter, begins_at, begins_at + timedelta(days=1))
    if meter is Meter.MONTH:
        begins_at = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
        # The 28th and four days are always in the next month.
        return Account(owner, meter, begins_at, (begins_at.replace(day=28) + timedelta(days=4)).replace(day=1))
    begins_at = now.replace(second=0, microsecond=0)
    return Account(owner, meter, begins_at, begins_at + timedelta(minutes=1))


def rate_wants(key_id: str, limits: KeyLimits, now: datetime, num_tokens: int) -> Iterator[Want]:
    """Yield what one request wants of the minute."""
    if limits.requests_per_minute is not None:
        yield Want(account_of(key_id, Meter.REQUESTS, now), limits.requests_per_minute, 1)
    if limits.tokens_per_minute is not None:
        yield Want(account_of(key_id, Meter.TOKENS, now), limits.tokens_per_minute, num_tokens)


def budget_wants(key_id: str, limits: KeyLimits, now: datetime, cost_nano_usd: int) -> Iterator[Want]:
    """Yield what one request wants of the day's and the month's budget."""
    for meter, budget_usd in ((Meter.DAY, limits.budget_usd_per_day), (Meter.MONTH, limits.budget_usd_per_month)):
        if budget_usd is not None:
            yield Want(account_of(key_id, meter, now), to_nano_usd(budget_usd), cost_nano_usd)


def policy_wants(policy: Policy, now: datetime, cost_nano_usd: int) -> Iterator[Want]:
    """Yield what one request wants of the budget of the policy that decided it."""
    if policy.budget_usd_per_day is not None:
        account = account_of(policy.name, Meter.POLICY_DAY, now)
        yield Want(account, to_nano_usd(policy.budget_usd_per_day), cost_nano_usd)
