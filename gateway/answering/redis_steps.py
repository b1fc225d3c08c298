"""Where conversations stand, in Redis, for several servers. What it does not know, the log does."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import msgspec

from gateway.answering.sessions import ConversationState

if TYPE_CHECKING:
    from redis.asyncio import Redis

_log = logging.getLogger("suffice.sessions")

_PREFIX = "suffice:steps:"
_TIMEOUT_S = 0.25
# Not asked again for so long after it failed: no request is to wait for it one by one.
_PAUSE_S = 5.0


class RedisSteps:
    """Puts and gets states; never raises.

    Parameters
    ----------
    url : of the Redis server; nothing is connected before the first call
    ttl_s : what rests longer is forgotten
    """

    def __init__(self, url: str, ttl_s: float) -> None:
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        never = Retry(NoBackoff(), 0)
        self._client: Redis = Redis.from_url(
            url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S, retry=never
        )
        self._ttl_ms = max(1, int(ttl_s * 1000))
        self._silent_until_s = 0.0

    async def get(self, key: str) -> ConversationState | None:
        """Return what is known; None where nothing is, or Redis does not answer."""
        if time.monotonic() < self._silent_until_s:
            return None
        try:
            found = await self._client.get(_PREFIX + key)
            return None if found is None else msgspec.json.decode(found, type=ConversationState)
        except Exception as problem:
            self._pause(problem)
            return None

    async def put(self, states: dict[str, ConversationState]) -> None:
        """Keep states until they are too old."""
        if time.monotonic() < self._silent_until_s:
            return
        try:
            async with self._client.pipeline(transaction=False) as pipeline:
                for key, state in states.items():
                    pipeline.set(_PREFIX + key, msgspec.json.encode(state), px=self._ttl_ms)
                await pipeline.execute()
        except Exception as problem:
            self._pause(problem)

    async def close(self) -> None:
        """Close the client's connections."""
        await self._client.aclose()

    def _pause(self, problem: Exception) -> None:
        # Whatever Redis, the system or a strange value raises: the log is asked instead.
        _log.warning("Redis does not tell where conversations stand (%s); the log is asked", problem)
        self._silent_until_s = time.monotonic() + _PAUSE_S
