"""Reports what processes that were killed may have spent without a row; see :mod:`gateway.access.spending_lease`."""

from __future__ import annotations

import logging

from gateway.store.control_records import Lease
from gateway.store.spending_leases import SpendingLeaseStore
from gateway.store.store import Store
from policies.pricing import from_nano_usd

_log = logging.getLogger("suffice.spending")


class SpendingWatch:
    """Looks for leases of dead processes, at the start and while this server leads.

    Parameters
    ----------
    ttl_s : how long leases run

    Attributes
    ----------
    unlogged_nano_usd, num_reported : sum and number of the leases that this process reported
    """

    def __init__(self, store: Store, ttl_s: float) -> None:
        self.unlogged_nano_usd = 0
        self.num_reported = 0
        self._store = store
        self._leases = SpendingLeaseStore(store)
        self._ttl_s = ttl_s

    async def look_at_start(self) -> None:
        """Report what is known to be dead. On SQLite that is every other server: the file has one at a time.

        Raises
        ------
        StoreUnavailable and its kinds
        """
        await self._report(is_only_server=self._store.dialect == "sqlite")

    async def look(self, lease: Lease) -> None:
        """Report leases that ran out: a job of the leader's.

        Raises
        ------
        StoreUnavailable and its kinds
        """
        await self._report(is_only_server=False)

    async def _report(self, *, is_only_server: bool) -> None:
        for each in await self._leases.report(self._ttl_s, is_only_server=is_only_server):
            self.num_reported += 1
            self.unlogged_nano_usd += each.amount_nano_usd
            _log.warning(
                "the %s %s did not end in order: up to %s USD of calls to remote models that it had under way are not "
                "in the log",
                *(each.process, each.holder, f"{from_nano_usd(each.amount_nano_usd):f}"),
            )
