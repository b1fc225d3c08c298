"""A backend whose every priced call is covered by the process's spending lease before it begins; for checks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, cast

from backends.protocol import Backend, Capability, EmbedResult, Event, GenerateRequest, Health, Load, ScoreResult
from gateway.access.call_cost import covered, most_reading_nano_usd
from gateway.access.spending_lease import SpendingHold
from policies.types import Tier


class CoveredBackend:
    """Passes everything on to a backend; see :class:`backends.protocol.Backend`.

    Calls raise :class:`gateway.store.errors.StoreUnavailable` where the lease does not cover them.
    """

    def __init__(self, backend: Backend, tier: Tier, hold: SpendingHold) -> None:
        self._backend = backend
        self._tier = tier
        self._hold = hold

    @property
    def model_id(self) -> str:
        return self._backend.model_id

    @property
    def context_length(self) -> int | None:
        return self._backend.context_length

    @property
    def capabilities(self) -> frozenset[Capability]:
        return self._backend.capabilities

    async def start(self) -> None:
        await self._backend.start()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        (asked,) = await covered(self._hold, self._tier, [request])
        async with aclosing(cast("Any", self._backend.generate(asked))) as events:
            async for event in events:
                yield event

    async def count_tokens(self, request: GenerateRequest, *, limit: int | None = None) -> int | None:
        return await self._backend.count_tokens(request, limit=limit)

    async def score(self, prompt: GenerateRequest, answer: str) -> ScoreResult:
        await self._cover_attempts(most_reading_nano_usd(self._tier, answer, prompt=prompt))
        return await self._backend.score(prompt, answer)

    async def embed(self, texts: Sequence[str]) -> EmbedResult:
        await self._cover_attempts(most_reading_nano_usd(self._tier, *texts))
        return await self._backend.embed(texts)

    async def health(self) -> Health:
        return await self._backend.health()

    def load(self) -> Load:
        return self._backend.load()

    async def close(self) -> None:
        await self._backend.close()

    async def _cover_attempts(self, amount_nano_usd: int) -> None:
        """Cover a call with all its retries at once: it is small."""
        await self._hold.cover(amount_nano_usd * self._hold.max_attempts(self._tier))
