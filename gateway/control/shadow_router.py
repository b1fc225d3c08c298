"""The shadow router predicts for requests that another one decided, and what it would have done is kept.

In shadow it sees a share of all requests; and in shadow and after it every request that was drawn for a check, since
there what it would have done can be told from what was found. Nothing here is in a request's way: the queue is bounded,
what does not fit is left out, predictions run in a thread of their own, and rows are written in batches.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Protocol

from msgspec import structs

from classifier.types import Router, RouterRequest, Sufficiency
from gateway.control.router_set import RouterSlot
from gateway.store.control_records import ShadowDecision
from gateway.store.errors import StoreError
from policies.errors import PolicyError
from policies.exploration import Uniform
from policies.ladder import Ladder
from policies.routing_decision import decide
from policies.types import RequestFacts, TierEstimate

_log = logging.getLogger("suffice.shadow")

_MAX_WAITING = 256
_MAX_BATCH = 100
_WRITE_EVERY_S = 1.0


class ShadowWriter(Protocol):
    """The part of the store that is needed here."""

    async def add_shadow_decisions(self, decisions: list[ShadowDecision]) -> None: ...


@dataclass(frozen=True, slots=True)
class ShadowRequest:
    """A request as its router decided it; ``router_version`` is that router's, ``tier`` what it chose."""

    request_id: str
    created_at: datetime
    policy_name: str
    router_version: str
    turns: tuple[tuple[str, str], ...]
    facts: RequestFacts
    tier: int
    tools: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class _ShadowWatch:
    """Holds the shadow router, the share of unchecked requests it sees, and its quarantines."""

    slot: RouterSlot
    share: float
    quarantine: Mapping[str, Mapping[int, float]]


class ShadowRouter:
    """Watches with one router at a time.

    Parameters
    ----------
    ladder : the tiers
    writer : where decisions are kept
    share : of the requests that a router which serves nothing looks at
    rng : draws them
    keeps_estimates : whether the numbers that it made of a text may be kept, or what it would have done alone

    Attributes
    ----------
    version : of the router that watches; None without one
    num_left_out : requests it had no time for, or whose decision could not be stored
    """

    def __init__(
        self, ladder: Ladder, writer: ShadowWriter, share: float, rng: Uniform, *, keeps_estimates: bool = True
    ) -> None:
        self._ladder = ladder
        self._writer = writer
        self._share = share
        self._rng = rng
        self._keeps_estimates = keeps_estimates
        self.version: str | None = None
        self._watching: _ShadowWatch | None = None
        self._queue: asyncio.Queue[ShadowRequest | None] = asyncio.Queue(_MAX_WAITING)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="suffice-shadow")
        self._task: asyncio.Task[None] | None = None
        self.num_left_out = 0

    def start(self) -> None:
        """Begin to work off what is shown."""
        self._task = asyncio.create_task(self._run(), name="suffice-shadow")

    def watch_with(
        self,
        slot: RouterSlot | None,
        *,
        serves: bool = False,
        quarantine: Mapping[str, Mapping[int, float]] = MappingProxyType({}),
    ) -> None:
        """Use another router, or none.

        Parameters
        ----------
        serves : it has a share of the traffic already; then only what is checked is looked at
        quarantine : policy's name -> quarantined tier under this router -> P(as good) it must reach
        """
        self._watching = None if slot is None else _ShadowWatch(slot, 0.0 if serves else self._share, quarantine)
        self.version = None if slot is None else slot.version

    def observe(self, routed: ShadowRequest, *, is_drawn: bool) -> None:
        """Take in a request that was just answered; pinned and explored ones say nothing new of a router.

        Parameters
        ----------
        is_drawn : its answer will be checked; no outcome has influenced that
        """
        watching = self._watching
        if watching is None or routed.router_version == watching.slot.version or not routed.turns:
            return
        if not (is_drawn or self._rng.random() < watching.share):
            return
        try:
            self._queue.put_nowait(routed)
        except asyncio.QueueFull:
            self.num_left_out += 1

    async def settle(self) -> None:
        """Wait until everything shown so far was worked off and kept."""
        await self._queue.put(None)
        await self._queue.join()

    async def close(self) -> None:
        """Stop; what was not worked off is left out."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self) -> None:
        batch: list[ShadowDecision] = []
        num_taken, written_s = 0, time.monotonic()
        while True:
            wait_s = max(0.0, written_s + _WRITE_EVERY_S - time.monotonic()) if num_taken else None
            is_awaited = False
            try:
                routed = await asyncio.wait_for(self._queue.get(), wait_s)
                num_taken += 1
                is_awaited = routed is None
                decided = await self._decide(routed) if routed is not None else None
                batch += [decided] if decided is not None else []
            except TimeoutError:
                pass
            if is_awaited or len(batch) >= _MAX_BATCH or time.monotonic() - written_s >= _WRITE_EVERY_S:
                await self._write(batch)
                for _ in range(num_taken):
                    self._queue.task_done()
                batch, num_taken, written_s = [], 0, time.monotonic()

    async def _decide(self, routed: ShadowRequest) -> ShadowDecision | None:
        watching = self._watching
        if watching is None or routed.policy_name not in watching.slot.policies:
            return None
        slot, router = watching.slot, watching.slot.router
        if router is None:
            return None
        loop = asyncio.get_running_loop()
        try:
            asked = RouterRequest(routed.turns, tools=routed.tools)
            estimate = await loop.run_in_executor(self._thread, _predict, router, asked)
            tier = self._would_be(watching, routed, estimate)
        except PolicyError:
            return None
        except Exception:
            # A router in shadow is on trial; that it fails must be seen, and cost nothing else.
            _log.exception("the router in shadow failed")
            return None
        keeps = self._keeps_estimates
        return ShadowDecision(
            request_id=routed.request_id,
            router_version=slot.version,
            created_at=routed.created_at,
            policy_name=routed.policy_name,
            tier=routed.tier,
            shadow_tier=tier,
            sufficiency=tuple((each.tier, each.p_right, each.p_as_good) for each in estimate.tiers) if keeps else (),
            novelty=estimate.novelty if keeps else 0.0,
        )

    def _would_be(self, watching: _ShadowWatch, routed: ShadowRequest, estimate: Sufficiency) -> int:
        estimates = tuple(TierEstimate(each.tier, each.p_right, each.p_as_good) for each in estimate.tiers)
        # The serving router's quarantines are not this one's: its estimates mean something else.
        quarantine = watching.quarantine.get(routed.policy_name, {})
        facts = structs.replace(routed.facts, estimates=estimates, novelty=estimate.novelty, quarantine=quarantine)
        policy = replace(watching.slot.policies[routed.policy_name], exploration_share=0.0)
        return decide(facts, policy, self._ladder, random.Random(0)).tier

    async def _write(self, batch: list[ShadowDecision]) -> None:
        if not batch:
            return
        try:
            await self._writer.add_shadow_decisions(batch)
        except StoreError as problem:
            self._lose(batch, problem)
        except Exception:
            # One of them cannot be stored; its neighbours can, and the task must not end with it.
            for each in batch:
                await self._write_alone(each)

    async def _write_alone(self, decision: ShadowDecision) -> None:
        try:
            await self._writer.add_shadow_decisions([decision])
        except Exception as problem:
            self._lose([decision], problem)

    def _lose(self, batch: list[ShadowDecision], problem: Exception) -> None:
        self.num_left_out += len(batch)
        _log.warning("%d shadow decisions were not kept at %s: %s", len(batch), datetime.now(UTC), problem)


def _predict(router: Router, request: RouterRequest) -> Sufficiency:
    return router.predict([request])[0]
