"""Limits of keys and budgets of policies: reserve before spending, settle by what was spent, release what is left.

With Redis the books are shared by every gateway. Without it, or while it does not answer, each process keeps its own
and takes the log's sums over every few seconds: then several gateways together may pass a limit by what they admit
between two readings.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Protocol, TypeVar

from gateway.access.authenticator import Caller
from gateway.access.ledger import LocalLedger, Verdict
from gateway.access.rate_headers import Headers, rate_headers
from gateway.access.rate_windows import Account, Meter, Want, budget_wants, policy_wants, rate_wants
from gateway.errors import QuotaExhausted, RateLimited
from gateway.store.key_sums import KeySum
from policies.policy import Policy

if TYPE_CHECKING:
    from gateway.access.redis_ledger import RedisLedger

T = TypeVar("T")

_log = logging.getLogger("suffice.rates")

# How often the log is read again while the books are this process's own.
_RENEW_S: Mapping[Meter, float] = {
    Meter.REQUESTS: 2,
    Meter.TOKENS: 2,
    Meter.DAY: 30,
    Meter.MONTH: 300,
    Meter.POLICY_DAY: 30,
}
# A Redis that failed is left alone this long.
_PAUSE_S = 1.0
_REDIS_TIMEOUT_S = 0.5
_MOST_REMEMBERED = 10_000


class Sums(Protocol):
    """The part of the store that is needed here."""

    async def since(self, key_id: str, moment: datetime) -> KeySum: ...

    async def since_by_policy(self, policy_name: str, moment: datetime) -> KeySum: ...


@dataclass(slots=True)
class Reservation:
    """Holds what is reserved for one request. ``headers`` tell its caller what is left."""

    hold_id: str
    caller: Caller
    wants: list[tuple[Want, bool]] = field(default_factory=list)
    headers: Headers = field(default_factory=list)


class RateLimiter:
    """The limits of all keys, and the budgets of all policies.

    Parameters
    ----------
    sums : reads what a key or a policy has used from the log
    shared : the books in Redis; None without
    renews : whether others may write the same log, so that own books must be read again
    clock : the wall clock
    """

    def __init__(
        self,
        sums: Sums,
        shared: RedisLedger | None = None,
        *,
        renews: bool = True,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._sums = sums
        self._shared = shared
        self._renews = renews
        self._clock = clock
        self._local = LocalLedger(clock=clock)
        self._read_at: dict[Account, datetime] = {}
        self._shared_again_at: datetime | None = None
        # Accounts whose shared books were raised to the log's sums since Redis last failed.
        self._confirmed: set[Account] = set()
        # Accounts whose own books were raised likewise since Redis last answered.
        self._own_confirmed: set[Account] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def admit(self, hold_id: str, caller: Caller, num_tokens: int) -> Reservation:
        """Reserve a request and its tokens of the minute.

        Raises
        ------
        RateLimited
        StoreUnavailable
            The key's use cannot be looked up.
        """
        reservation = Reservation(hold_id, caller)
        assert caller.key_id is not None, "only keys have limits"
        wants = list(rate_wants(caller.key_id, caller.limits, self._clock(), num_tokens))
        if wants:
            verdict = await self._reserve(reservation, wants)
            reservation.headers = rate_headers(wants, verdict.spent, self._clock())
            if verdict.refused is not None:
                want = wants[verdict.refused]
                raise RateLimited(
                    want.account.meter.value, want.limit, want.amount, self._left_s(want.account), reservation.headers
                )
        return reservation

    async def afford(self, reservation: Reservation, policy: Policy | None, cost_nano_usd: int) -> None:
        """Reserve what the request is expected to cost, of the key's budgets and then of its policy's, if it has one.

        Raises
        ------
        QuotaExhausted
        StoreUnavailable
        """
        caller, now = reservation.caller, self._clock()
        if caller.key_id is not None:
            await self._spend(
                reservation, list(budget_wants(caller.key_id, caller.limits, now, cost_nano_usd)), "this key"
            )
        if policy is None:
            return
        # One after the other: in a cluster the books of a key and of a policy need not lie on one machine.
        await self._spend(reservation, list(policy_wants(policy, now, cost_nano_usd)), f"policy {policy.name!r}")

    async def _spend(self, reservation: Reservation, wants: Sequence[Want], whose: str) -> None:
        if not wants:
            return
        verdict = await self._reserve(reservation, wants)
        if verdict.refused is not None:
            want = wants[verdict.refused]
            window = "month" if want.account.meter is Meter.MONTH else "day"
            raise QuotaExhausted(whose, window, want.limit, self._left_s(want.account))

    async def charge_refusal(self, hold_id: str, caller: Caller) -> None:
        """Count a request that was read and refused: reading it was work too.

        Raises
        ------
        RateLimited
            The key had no request left.
        StoreUnavailable
        """
        reservation = await self.admit(hold_id, caller, 0)
        self.settle(reservation, num_requests=1, num_tokens=0, cost_nano_usd=0, has_row=False)

    def settle(
        self,
        reservation: Reservation,
        *,
        num_requests: int,
        num_tokens: int,
        cost_nano_usd: int,
        has_row: bool = True,
    ) -> None:
        """Replace what was held by what was used; all zero releases it. Returns at once.

        ``has_row`` is False for what the log has no row of, and its sums therefore lack.
        """
        if not reservation.wants:
            return
        used = {Meter.REQUESTS: num_requests, Meter.TOKENS: num_tokens}
        own: dict[Account, int] = {}
        shared: dict[str, dict[Account, int]] = {}
        for want, is_shared in reservation.wants:
            account = want.account
            books = shared.setdefault(account.owner, {}) if is_shared else own
            books[account] = used.get(account.meter, cost_nano_usd)
        reservation.wants = []
        self._local.settle(reservation.hold_id, own, has_row=has_row)
        if self._shared is not None:
            for books in shared.values():
                self._spawn(self._settle_shared(self._shared, reservation.hold_id, books))

    async def close(self) -> None:
        """Let settlements that are under way end."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2 * _REDIS_TIMEOUT_S)
        if self._shared is not None:
            await self._shared.close()

    async def _settle_shared(self, ledger: RedisLedger, hold_id: str, actual: Mapping[Account, int]) -> None:
        # Where it fails the hold lapses by itself, and the row is in the log that the books are raised to.
        await self._try_shared(ledger.settle(hold_id, actual))

    async def _reserve(self, reservation: Reservation, wants: Sequence[Want]) -> Verdict:
        verdict = await self._reserve_shared(reservation.hold_id, wants)
        is_shared = verdict is not None
        if verdict is None:
            verdict = await self._reserve_own(reservation.hold_id, wants)
        if verdict.refused is None:
            reservation.wants += [(want, is_shared) for want in wants]
        return verdict

    async def _reserve_shared(self, hold_id: str, wants: Sequence[Want]) -> Verdict | None:
        """None when Redis is not there, or does not answer."""
        ledger = self._shared
        if ledger is None or (self._shared_again_at is not None and self._clock() < self._shared_again_at):
            return None
        for want in wants:
            if want.account not in self._confirmed and not await self._raise_shared(ledger, want.account):
                return None
        verdict = await self._try_shared(ledger.reserve(hold_id, wants))
        if verdict is not None and verdict.unknown:
            # Redis was emptied under us.
            for account in verdict.unknown:
                if not await self._raise_shared(ledger, account):
                    return None
            verdict = await self._try_shared(ledger.reserve(hold_id, wants))
        if verdict is None or verdict.unknown:
            return None
        self._own_confirmed.clear()
        return verdict

    async def _raise_shared(self, ledger: RedisLedger, account: Account) -> bool:
        used = await self._used(account)
        if await self._try_shared(ledger.open(account, used), True) is None:
            return False
        _remember(self._confirmed, account)
        return True

    async def _try_shared(self, work: Awaitable[T], instead: T | None = None) -> T | None:
        """Return what Redis answers, ``instead`` where that is nothing; None where it does not answer."""
        from redis.exceptions import RedisError

        try:
            async with asyncio.timeout(_REDIS_TIMEOUT_S):
                found = await work
        except (RedisError, OSError, TimeoutError) as error:
            if self._shared_again_at is None:
                _log.warning("Redis does not answer, so each process counts by itself: %s", error)
            self._shared_again_at = datetime.fromtimestamp(self._clock().timestamp() + _PAUSE_S, UTC)
            self._confirmed.clear()
            if self._shared is not None:
                await self._shared.forget_connections()
            return None
        if self._shared_again_at is not None:
            self._shared_again_at = None
            _log.warning("Redis answers again")
        return instead if instead is not None else found

    async def _reserve_own(self, hold_id: str, wants: Sequence[Want]) -> Verdict:
        for want in wants:
            if want.account not in self._own_confirmed:
                self._local.open(want.account, await self._used(want.account))
                _remember(self._own_confirmed, want.account)
            self._renew_if_old(want.account)
        return self._local.reserve(hold_id, wants)

    def _renew_if_old(self, account: Account) -> None:
        now, read_at = self._clock(), self._read_at.get(account)
        if self._renews and read_at is not None and (now - read_at).total_seconds() >= _RENEW_S[account.meter]:
            self._read_at[account] = now
            self._spawn(self._renew(account))

    async def _renew(self, account: Account) -> None:
        mark = self._local.mark(account)
        # A database that is down now is read at the next turn.
        with suppress(Exception):
            self._local.renew(account, await self._used(account), mark)

    async def _used(self, account: Account) -> int:
        is_policys = account.meter is Meter.POLICY_DAY
        read = self._sums.since_by_policy if is_policys else self._sums.since
        found = await read(account.owner, account.begins_at)
        if len(self._read_at) > _MOST_REMEMBERED:
            self._read_at.clear()
        self._read_at[account] = self._clock()
        if account.meter is Meter.REQUESTS:
            return found.num_requests
        return found.num_tokens if account.meter is Meter.TOKENS else found.cost_nano_usd

    def _left_s(self, account: Account) -> float:
        return max(1.0, (account.ends_at - self._clock()).total_seconds())

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _remember(accounts: set[Account], account: Account) -> None:
    """Add to a set that is begun anew now and then: windows that are over would stay for ever."""
    if len(accounts) > _MOST_REMEMBERED:
        accounts.clear()
    accounts.add(account)
