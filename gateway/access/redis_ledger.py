"""The same books in Redis, shared by every gateway; each operation is one script, and so one step.

An account is a hash (``used``, ``held``, and ``h:ID`` for each hold) beside a sorted set of the holds by the time they
lapse: what a killed gateway held does not stay held. Redis's own clock counts, so gateways need not agree on theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from gateway.access.ledger import Verdict
from gateway.access.rate_windows import Account, Want

if TYPE_CHECKING:
    from redis.asyncio import Redis

_PREFIX = "suffice:rates"
# Kept this much longer than the window: a request that began in its last second still has to be settled.
_GRACE_S = 3600

_RESERVE = """
local hold, lapse_ms = ARGV[1], tonumber(ARGV[2])
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local spent, refused, unknown = {}, 0, {}
for i = 1, #KEYS / 2 do
  local book, holds = KEYS[2 * i - 1], KEYS[2 * i]
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', holds, '-inf', now_ms)) do
    local amount = redis.call('HGET', book, 'h:' .. id)
    if amount then
      redis.call('HDEL', book, 'h:' .. id)
      redis.call('HINCRBY', book, 'held', string.format('%.0f', 0 - amount))
    end
    redis.call('ZREM', holds, id)
  end
  local used = redis.call('HGET', book, 'used')
  if used then
    spent[i] = tonumber(used) + tonumber(redis.call('HGET', book, 'held') or '0')
    if refused == 0 and spent[i] + tonumber(ARGV[3 * i + 1]) > tonumber(ARGV[3 * i]) then refused = i end
  else
    unknown[#unknown + 1] = i
  end
end
if #unknown > 0 then return {'unknown', unknown} end
if refused > 0 then return {'refused', refused, spent} end
for i = 1, #KEYS / 2 do
  local amount = ARGV[3 * i + 1]
  redis.call('HSET', KEYS[2 * i - 1], 'h:' .. hold, amount)
  redis.call('HINCRBY', KEYS[2 * i - 1], 'held', amount)
  redis.call('ZADD', KEYS[2 * i], now_ms + lapse_ms, hold)
  redis.call('EXPIREAT', KEYS[2 * i - 1], ARGV[3 * i + 2])
  redis.call('EXPIREAT', KEYS[2 * i], ARGV[3 * i + 2])
  spent[i] = spent[i] + tonumber(amount)
end
return {'reserved', 0, spent}
"""

_SETTLE = """
for i = 1, #KEYS / 2 do
  local book, holds = KEYS[2 * i - 1], KEYS[2 * i]
  local amount = redis.call('HGET', book, 'h:' .. ARGV[1])
  if amount then
    redis.call('HDEL', book, 'h:' .. ARGV[1])
    redis.call('HINCRBY', book, 'held', string.format('%.0f', 0 - amount))
    redis.call('ZREM', holds, ARGV[1])
  end
  if redis.call('HEXISTS', book, 'used') == 1 then redis.call('HINCRBY', book, 'used', ARGV[i + 1]) end
end
return 1
"""

_OPEN = """
local used = redis.call('HGET', KEYS[1], 'used')
if not used or tonumber(used) < tonumber(ARGV[1]) then redis.call('HSET', KEYS[1], 'used', ARGV[1]) end
redis.call('EXPIREAT', KEYS[1], ARGV[2])
return 1
"""


class RedisLedger:
    """As :class:`~gateway.access.ledger.LocalLedger`, for several processes. Raises what the client raises.

    Parameters
    ----------
    client : answers in text
    lapse_s : after this long a hold lapses; longer than any request may live
    """

    def __init__(self, client: Redis, *, lapse_s: float) -> None:
        self._client = client
        self._lapse_ms = int(lapse_s * 1000)
        self._reserve = client.register_script(_RESERVE)
        self._settle = client.register_script(_SETTLE)
        self._open = client.register_script(_OPEN)

    async def reserve(self, hold_id: str, wants: Sequence[Want]) -> Verdict:
        """Hold all that is wanted, or nothing."""
        arguments: list[Any] = [hold_id, self._lapse_ms]
        for want in wants:
            arguments += [want.limit, want.amount, _expires_s(want.account)]
        said, what, *rest = await self._reserve(keys=_keys([want.account for want in wants]), args=arguments)
        if _text(said) == "unknown":
            return Verdict(unknown=tuple(wants[place - 1].account for place in what))
        return Verdict(tuple(rest[0]), refused=what - 1 if _text(said) == "refused" else None)

    async def settle(self, hold_id: str, actual: Mapping[Account, int]) -> None:
        """Replace what was held by what was used; 0 is a release. An account that was lost stays so."""
        await self._settle(keys=_keys(list(actual)), args=[hold_id, *actual.values()])

    async def open(self, account: Account, used: int) -> None:
        """Make an account known, with what the log says was used of it."""
        await self._open(keys=_keys([account])[:1], args=[used, _expires_s(account)])

    async def forget_connections(self) -> None:
        """Connections that idled through an outage would fail one by one."""
        with suppress(Exception):
            await self._client.connection_pool.disconnect(inuse_connections=False)

    async def close(self) -> None:
        """Close the client's connections."""
        await self._client.aclose()


def _keys(accounts: Sequence[Account]) -> list[str]:
    # The braces put all accounts of an owner into one slot of a cluster.
    names = [f"{_PREFIX}:{{{each.owner}}}:{each.meter}:{each.begins_at:%Y%m%d%H%M}" for each in accounts]
    return [key for name in names for key in (name, f"{name}:holds")]


def _expires_s(account: Account) -> int:
    return int(account.ends_at.timestamp()) + _GRACE_S


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
