"""Says whether this server can answer: the log takes rows, and some tier that requests may use works.

A model that has just answered a request works. Only one that has not is asked, by its own check, once in ``ttl_s``
however many ask; a hosted one is not made to generate for it (:meth:`backends.protocol.Backend.health`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from backends.protocol import Health
from gateway.models.catalog import Catalog
from gateway.store.committer import GroupCommitter
from gateway.store.errors import StoreError

_CHECK_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class ReadinessReport:
    """``reason`` is ``database`` where the log takes no row; ``tiers`` has what is known of each."""

    is_ready: bool
    tiers: Mapping[str, Any]
    reason: str | None = None


class Readiness:
    """Health of every served model, believed for ``ttl_s``; concurrent askers share one check."""

    def __init__(
        self, catalog: Catalog, ttl_s: float, log: GroupCommitter, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._catalog = catalog
        self._ttl_s = ttl_s
        self._log = log
        self._clock = clock
        self._checked_s: dict[str, float] = {}
        self._health: dict[str, Health] = {}
        self._lock = asyncio.Lock()

    async def check(self) -> ReadinessReport:
        """Return whether the server is ready, and what is known of each tier."""
        async with self._lock:
            is_logging = await self._is_logging()
            await self._ask_old()
        ladder = self._catalog.ladder
        tiers = {tier.name: _shown(self._health[tier.model]) | {"model": tier.model} for tier in ladder}
        permitted = self._catalog.policies.values()
        some_works = any(
            tiers[tier.name]["ok"]
            for tier in ladder
            if any(not each.allowed_tiers or tier.index in each.allowed_tiers for each in permitted)
        )
        return ReadinessReport(is_logging and some_works, tiers, None if is_logging else "database")

    async def _is_logging(self) -> bool:
        try:
            await self._log.check()
        except StoreError:
            return False
        return True

    async def _ask_old(self) -> None:
        """Ask the models of which nothing recent is known."""
        now_s = self._clock()
        asked = []
        for model in dict.fromkeys(tier.model for tier in self._catalog.ladder):
            answered_s = self._catalog.answered_s.get(model, float("-inf"))
            if now_s - answered_s < self._ttl_s and answered_s >= self._checked_s.get(model, float("-inf")):
                self._health[model] = Health(True, 0.0, "has just answered a request")
            elif now_s - self._checked_s.get(model, float("-inf")) >= self._ttl_s:
                asked.append(model)
        for model, health in zip(asked, await asyncio.gather(*map(self._ask_one, asked)), strict=True):
            self._health[model] = health
            self._checked_s[model] = self._clock()

    async def _ask_one(self, model: str) -> Health:
        started_s = self._clock()
        try:
            async with asyncio.timeout(_CHECK_TIMEOUT_S):
                return await self._catalog.backends[model].health()
        except TimeoutError:
            return Health(False, _CHECK_TIMEOUT_S, f"no answer within {_CHECK_TIMEOUT_S:g} s")
        except Exception as error:
            # A check that breaks is an unhealthy model, not a broken check page.
            return Health(False, self._clock() - started_s, f"{type(error).__name__}: {error}")


def _shown(health: Health) -> dict[str, Any]:
    return {"ok": health.ok, "latency_ms": round(health.latency_s * 1e3, 3), "detail": health.detail}
