"""A router in shadow: it predicts for a share of requests after they were decided, and what it would have done is kept.

Nothing here is in a request's way: the queue is bounded, what does not fit is left out, predictions run in a thread of
their own, and rows are written in batches.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Protocol

from classifier.types import Router, RouterRequest, Sufficiency
from gateway.control.routers import Slot
from gateway.exchange import Exchange
from gateway.store.control_records import ShadowDecision
from gateway.store.errors import StoreError
from policies.decide import decide
from policies.errors import PolicyError
from policies.exploration import Uniform
from policies.ladder import Ladder
from policies.types import RequestFacts, TierEstimate

_log = logging.getLogger("suffice.shadow")

_MAX_WAITING = 256
_MAX_BATCH = 100
_WRITE_EVERY_S = 1.0


class ShadowWriter(Protocol):
    """The part of the store that is needed here."""

    async def add_shadow_decisions(self, decisions: list[ShadowDecision]) -> None: ...


@dataclass(frozen=True, slots=True)
class _Seen:
    """A decided request, as the router in shadow is to see it."""

    request_id: str
    created_at: datetime
    policy_name: str
    turns: tuple[tuple[str, str], ...]
    facts: RequestFacts
    tier: int


class Shadow:
    """Watches with one router at a time.

    Parameters
    ----------
    ladder : the tiers
    writer : where decisions are kept
    share : of the requests to look at
    rng : draws them
    """

    def __init__(self, ladder: Ladder, writer: ShadowWriter, share: float, rng: Uniform) -> None:
        self._ladder = ladder
        self._writer = writer
        self._share = share
        self._rng = rng
        self._slot: Slot | None = None
        self._seen: asyncio.Queue[_Seen] = asyncio.Queue(_MAX_WAITING)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="suffice-shadow")
        self._task: asyncio.Task[None] | None = None
        self.num_left_out = 0

    @property
    def version(self) -> str | None:
        """Of the router in shadow."""
        return self._slot.version if self._slot is not None else None

    def start(self) -> None:
        """Begin to work off what is shown."""
        self._task = asyncio.create_task(self._run(), name="suffice-shadow")

    def watch_with(self, slot: Slot | None) -> None:
        """Use another router, or none."""
        self._slot = slot

    def show(self, exchange: Exchange, facts: RequestFacts) -> None:
        """A request that was just decided; pinned and explored ones say nothing of a router."""
        if self._slot is None:
            return
        decision, policy = exchange.decision, exchange.policy
        if decision is None or policy is None or decision.explored or facts.overrides.tier is not None:
            return
        if not exchange.request.turns or self._rng.random() >= self._share:
            return
        seen = _Seen(
            exchange.request_id, exchange.created_at, policy.name, exchange.request.turns, facts, decision.tier
        )
        try:
            self._seen.put_nowait(seen)
        except asyncio.QueueFull:
            self.num_left_out += 1

    async def close(self) -> None:
        """Stop; what was not worked off is left out."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self) -> None:
        batch: list[ShadowDecision] = []
        written_s = time.monotonic()
        while True:
            wait_s = max(0.0, written_s + _WRITE_EVERY_S - time.monotonic()) if batch else None
            try:
                seen = await asyncio.wait_for(self._seen.get(), wait_s)
                decided = await self._decide(seen)
                batch += [decided] if decided is not None else []
            except TimeoutError:
                pass
            if len(batch) >= _MAX_BATCH or (batch and time.monotonic() - written_s >= _WRITE_EVERY_S):
                await self._write(batch)
                batch, written_s = [], time.monotonic()

    async def _decide(self, seen: _Seen) -> ShadowDecision | None:
        slot = self._slot
        if slot is None or slot.router is None or seen.policy_name not in slot.policies:
            return None
        loop = asyncio.get_running_loop()
        try:
            request = await slot.predictor.read(RouterRequest(seen.turns))
            estimate = await loop.run_in_executor(self._thread, _predict, slot.router, request)
            tier = self._would_be(slot, seen, estimate)
        except PolicyError:
            return None
        except Exception:
            # A router in shadow is on trial; that it fails must be seen, and cost nothing else.
            _log.exception("the router in shadow failed")
            return None
        return ShadowDecision(
            request_id=seen.request_id,
            router_version=slot.version,
            created_at=seen.created_at,
            policy_name=seen.policy_name,
            tier=seen.tier,
            shadow_tier=tier,
            sufficiency=tuple((each.tier, each.p_right, each.p_as_good) for each in estimate.tiers),
            novelty=estimate.novelty,
        )

    def _would_be(self, slot: Slot, seen: _Seen, estimate: Sufficiency) -> int:
        estimates = tuple(TierEstimate(each.tier, each.p_right, each.p_as_good) for each in estimate.tiers)
        facts = replace(seen.facts, estimates=estimates, novelty=estimate.novelty)
        policy = replace(slot.policies[seen.policy_name], exploration_share=0.0)
        return decide(facts, policy, self._ladder, random.Random(0)).tier

    async def _write(self, batch: list[ShadowDecision]) -> None:
        try:
            await self._writer.add_shadow_decisions(batch)
        except StoreError as problem:
            _log.warning("%d shadow decisions were not kept at %s: %s", len(batch), datetime.now(UTC), problem)


def _predict(router: Router, request: RouterRequest) -> Sufficiency:
    return router.predict([request])[0]
