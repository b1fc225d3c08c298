"""Whether each tier really makes a token, asked rarely and by one asker at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from backends.protocol import Health
from gateway.models.catalog import Catalog

_CHECK_TIMEOUT_S = 30.0


class Readiness:
    """Health of every served model, believed for ``ttl_s``; concurrent askers share one check."""

    def __init__(self, catalog: Catalog, ttl_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._catalog = catalog
        self._ttl_s = ttl_s
        self._clock = clock
        self._checked_s = float("-inf")
        self._health: Mapping[str, Health] = {}
        self._lock = asyncio.Lock()

    async def check(self) -> tuple[bool, dict[str, Any]]:
        """Whether every tier is ready, and what is known of each."""
        async with self._lock:
            if self._clock() - self._checked_s >= self._ttl_s:
                self._health = await self._ask()
                self._checked_s = self._clock()
        tiers = {tier.name: _shown(self._health[tier.model]) | {"model": tier.model} for tier in self._catalog.ladder}
        return all(tier["ok"] for tier in tiers.values()), tiers

    async def _ask(self) -> dict[str, Health]:
        models = list(dict.fromkeys(tier.model for tier in self._catalog.ladder))
        results = await asyncio.gather(*map(self._ask_one, models))
        return dict(zip(models, results, strict=True))

    async def _ask_one(self, model: str) -> Health:
        started_s = self._clock()
        try:
            async with asyncio.timeout(_CHECK_TIMEOUT_S):
                return await self._catalog.backends[model].health()
        except TimeoutError:
            return Health(False, _CHECK_TIMEOUT_S, f"no token within {_CHECK_TIMEOUT_S:g} s")
        except Exception as error:
            # A check that breaks is an unhealthy model, not a broken check page.
            return Health(False, self._clock() - started_s, f"{type(error).__name__}: {error}")


def _shown(health: Health) -> dict[str, Any]:
    return {"ok": health.ok, "latency_ms": round(health.latency_s * 1e3, 3), "detail": health.detail}
