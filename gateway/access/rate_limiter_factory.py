"""The limits as the settings want them: shared over Redis where one is named."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.access.rate_limiter import RateLimiter
from gateway.store.key_sums import KeySums
from gateway.store.store import Store

if TYPE_CHECKING:
    from gateway.access.redis_ledger import RedisLedger
    from gateway.config.settings import Settings

# A hold outlives the longest request by this much.
_LAPSE_SLACK_S = 60.0


def make_rate_limiter(settings: Settings, store: Store) -> RateLimiter:
    """Nothing is connected yet: Redis is asked when the first limited key calls."""
    shared: RedisLedger | None = None
    if settings.redis.url is not None:
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        from gateway.access.redis_ledger import RedisLedger

        # Never tried again by the client: what was settled twice would count twice.
        never = Retry(NoBackoff(), 0)
        client = Redis.from_url(settings.redis.url, socket_timeout=1.0, socket_connect_timeout=1.0, retry=never)
        shared = RedisLedger(client, lapse_s=settings.server.request_timeout_s + _LAPSE_SLACK_S)
    # A SQLite log has one writing gateway: its own books are complete.
    return RateLimiter(KeySums(store), shared, renews=store.dialect == "postgresql")
