"""Covers every call to a priced remote model by an amount that was durable before the call began.

::

    held      what calls under way may cost at most, their rows not yet durable; in memory
    amount    what the database says they may cost; held <= amount at every moment

A call whose worst cost fits below the amount begins at once. One that does not waits for the amount to be raised, in
blocks, by a write that all who wait share. So a process that is killed leaves an amount in the database that bounds
what its calls under way cost, and whoever starts next reports it.

What this does not bound: a provider that bills more than the prompt's bytes and the answer asked for; calls of commands
that write no log (``suffice evaluate``).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Protocol

from backends.config import RemoteModelConfig
from gateway.ids import uuid7
from gateway.store.errors import StoreError
from gateway.store.spending_leases import ProcessKind, SpendingLeaseRow, SpendingLeaseStore
from gateway.store.store import Store
from policies.ladder import Ladder
from policies.types import Tier

if TYPE_CHECKING:
    from gateway.config.settings import Settings

_log = logging.getLogger("suffice.spending")

# The least that is written: a cent, so that cheap calls do not each raise it.
_FIRST_NANO_USD = 10_000_000
# The amount is so many times what is held, that the next calls find room; far beyond it is lowered again.
_ROOM, _FAR = 2, 4
LEASE_RENEWALS = 3
"""Renewals that may be missed before the holder counts as dead."""


class LeaseRows(Protocol):
    """The part of the store that is needed here."""

    async def put(self, row: SpendingLeaseRow, ttl_s: float) -> None: ...

    async def end(self, lease_id: str) -> None: ...


class SpendingLease:
    """One process's lease. Touched only from the event loop's thread.

    Parameters
    ----------
    rows : where it lies
    process : what kind of process holds it
    max_attempts : remote model -> most attempts of one call; other models are not covered
    renew_s : how often an open lease is renewed; it runs for three times that
    clock : monotonic, seconds

    Attributes
    ----------
    held_nano_usd, amount_nano_usd : see above
    num_writes : to the database, since the start
    """

    def __init__(
        self,
        rows: LeaseRows,
        process: ProcessKind,
        max_attempts: Mapping[str, int],
        *,
        renew_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_attempts = max_attempts
        self.held_nano_usd = 0
        self.amount_nano_usd = 0
        self.num_writes = 0
        self._rows = rows
        self._process = process
        self._holder = f"{socket.gethostname()}:{os.getpid()}"
        self._lease_id = uuid7()
        self._opened_at: datetime | None = None
        self._renew_s = renew_s
        self._clock = clock
        self._good_until_s = float("-inf")
        self._wanted_nano_usd = 0
        self._peak_nano_usd = 0
        self._writing = asyncio.Lock()
        self._raising: asyncio.Task[StoreError | None] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def ttl_s(self) -> float:
        """Return how long the lease runs unless it is renewed."""
        return LEASE_RENEWALS * self._renew_s

    def start(self) -> None:
        """Keep the lease renewed while it is open."""
        self._task = asyncio.create_task(self._renew_forever(), name="suffice-spending")

    async def close(self) -> None:
        """End the lease. What is still held has no row and will get none: that is left to be reported."""
        for task in (self._task, self._raising):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._task = self._raising = None
        try:
            async with self._writing:
                if self.held_nano_usd:
                    await self._put(self.held_nano_usd, 0.0)
                elif self._opened_at is not None:
                    await self._end()
        except StoreError as problem:
            _log.warning("the spending lease was not ended, and will be reported as a killed server's: %s", problem)

    def try_hold(self, amount_nano_usd: int) -> bool:
        """Hold an amount if what is durable covers it."""
        held = self.held_nano_usd + amount_nano_usd
        if held > self.amount_nano_usd or self._clock() >= self._good_until_s:
            return False
        self.held_nano_usd = held
        if held > self._peak_nano_usd:
            self._peak_nano_usd = held
        return True

    async def hold(self, amount_nano_usd: int) -> None:
        """Hold an amount, once it is durable.

        Raises
        ------
        StoreUnavailable and its kinds
            The database does not take it, so the call must not begin.
        """
        self._wanted_nano_usd += amount_nano_usd
        try:
            while not self.try_hold(amount_nano_usd):
                if self._raising is None or self._raising.done():
                    self._raising = asyncio.create_task(self._raise(), name="suffice-spending-raise")
                raising = self._raising
                # Who stops waiting must not end the write that others wait for.
                await asyncio.wait([raising])
                if (problem := raising.result()) is not None:
                    raise problem
        finally:
            self._wanted_nano_usd -= amount_nano_usd

    def give_back(self, amount_nano_usd: int) -> None:
        """Let go of what was held: the rows of its calls are durable."""
        assert amount_nano_usd <= self.held_nano_usd, "more given back than held"
        self.held_nano_usd -= amount_nano_usd

    async def tick(self) -> None:
        """Renew an open lease, lower an amount far beyond what was held lately, end one that covered nothing.

        Raises
        ------
        StoreUnavailable and its kinds
        """
        async with self._writing:
            if self._opened_at is None:
                return
            peak, self._peak_nano_usd = self._peak_nano_usd, self.held_nano_usd
            if not peak and not self._wanted_nano_usd:
                await self._end()
            else:
                is_far = self.amount_nano_usd > max(_FAR * peak, _FIRST_NANO_USD)
                amount = max(_ROOM * peak, _FIRST_NANO_USD) if is_far else self.amount_nano_usd
                await self._put(max(amount, self.held_nano_usd), self.ttl_s)

    # ---- inside

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(self._renew_s)
            try:
                await self.tick()
            except StoreError as problem:
                _log.warning("the spending lease was not renewed: %s", problem)
            except Exception:
                _log.exception("renewing the spending lease failed; it is tried again")

    async def _raise(self) -> StoreError | None:
        """Make room for all who wait; what kept the database from it."""
        try:
            async with self._writing:
                need = _ROOM * (self.held_nano_usd + self._wanted_nano_usd)
                await self._put(max(need, self.amount_nano_usd, _FIRST_NANO_USD), self.ttl_s)
        except StoreError as problem:
            return problem
        return None

    async def _put(self, amount_nano_usd: int, ttl_s: float) -> None:
        """Write an amount. Until it is known to be durable the smaller one of before and after is counted on."""
        asked_s = self._clock()
        self.amount_nano_usd = min(self.amount_nano_usd, amount_nano_usd)
        # Before the write: one whose outcome is not known may have left a row.
        self._opened_at = self._opened_at or datetime.now(UTC)
        row = SpendingLeaseRow(
            lease_id=self._lease_id,
            process=self._process,
            holder=self._holder,
            opened_at=self._opened_at,
            amount_nano_usd=amount_nano_usd,
        )
        self.num_writes += 1
        await self._rows.put(row, ttl_s)
        self.amount_nano_usd, self._good_until_s = amount_nano_usd, asked_s + ttl_s

    async def _end(self) -> None:
        self.amount_nano_usd = 0
        self.num_writes += 1
        await self._rows.end(self._lease_id)
        self._opened_at = None


class SpendingHold:
    """What one request or check holds of the lease, over all its calls."""

    __slots__ = ("_lease", "held_nano_usd")

    def __init__(self, lease: SpendingLease) -> None:
        self._lease = lease
        self.held_nano_usd = 0

    def max_attempts(self, tier: Tier) -> int:
        """Return how often one call to a tier's model may be made; 0 where it is not covered."""
        return self._lease.max_attempts.get(tier.model, 0)

    async def cover(self, amount_nano_usd: int) -> None:
        """Return once a call that may cost so much is covered; without waiting where there is room.

        Raises
        ------
        StoreUnavailable and its kinds
            The call must not begin.
        """
        if not self._lease.try_hold(amount_nano_usd):
            await self._lease.hold(amount_nano_usd)
        self.held_nano_usd += amount_nano_usd

    def settle(self) -> None:
        """Give everything back: the row is durable. Idempotent."""
        amount, self.held_nano_usd = self.held_nano_usd, 0
        self._lease.give_back(amount)


def make_spending_lease(settings: Settings, ladder: Ladder, store: Store, process: ProcessKind) -> SpendingLease | None:
    """Return the lease of a process, not yet started; None where no model is both remote and priced."""
    priced = {tier.model for tier in ladder if _is_priced(tier)}
    priced |= {name for name, each in settings.embeddings.items() if each.price_per_token_usd}
    max_attempts = {
        name: config.retry.max_attempts
        for name, config in settings.models.items()
        if name in priced and isinstance(config, RemoteModelConfig)
    }
    if not max_attempts:
        return None
    return SpendingLease(SpendingLeaseStore(store), process, max_attempts, renew_s=settings.control.lease_s)


def _is_priced(tier: Tier) -> bool:
    prices = (tier.price_per_request_usd, tier.price_per_input_token_usd, tier.price_per_output_token_usd)
    return any(prices)
