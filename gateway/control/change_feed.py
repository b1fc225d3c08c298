"""Tells servers through Redis that something has changed. A lost word costs only time: every server also polls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from redis.asyncio import Redis

_log = logging.getLogger("suffice.control")

_CHANNEL = "suffice:control"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_TIMEOUT_S = 1.0


class ChangeFeed:
    """Publishes and listens, and comes back by itself when Redis does.

    Parameters
    ----------
    url : of the Redis server
    on_word : called for every word heard, and after each connecting, since words were missed before it
    """

    def __init__(self, url: str, on_word: Callable[[], None]) -> None:
        self._url = url
        self._on_word = on_word
        self._client: Redis | None = None
        self._task: asyncio.Task[None] | None = None
        self._sending: set[asyncio.Task[None]] = set()
        self.is_connected = False

    def start(self) -> None:
        """Begin to listen."""
        from redis.asyncio import Redis

        self._client = Redis.from_url(
            self._url, socket_connect_timeout=_TIMEOUT_S, socket_timeout=_TIMEOUT_S, health_check_interval=5
        )
        self._task = asyncio.create_task(self._listen(self._client), name="suffice-bus")

    def publish(self, generation: int) -> None:
        """Tell the others, without waiting for it."""
        if self._client is not None:
            task = asyncio.create_task(self._send(self._client, generation))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def close(self) -> None:
        """Say what is still to be said, then leave."""
        if self._sending:
            await asyncio.wait(self._sending, timeout=_TIMEOUT_S)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()

    async def _send(self, client: Redis, generation: int) -> None:
        try:
            await client.publish(_CHANNEL, str(generation))
        except Exception as problem:
            # Whatever keeps a word from being sent: the others look by themselves.
            _log.warning("Redis takes no word (%s); other servers find the change by looking", problem)

    async def _listen(self, client: Redis) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                async with client.pubsub() as words:
                    await words.subscribe(_CHANNEL)
                    pause_s = _FIRST_PAUSE_S
                    self._connected(True)
                    self._on_word()
                    while True:
                        word = await words.get_message(ignore_subscribe_messages=True, timeout=_TIMEOUT_S)
                        if word is not None:
                            self._on_word()
            except Exception as problem:
                # Redis raises its own errors, the system's and asyncio's; none of them is the end of the server.
                self._connected(False, problem)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _connected(self, is_connected: bool, problem: Exception | None = None) -> None:
        if is_connected != self.is_connected:
            if is_connected:
                _log.info("Redis is there")
            else:
                _log.warning("Redis is gone (%s); changes are found by looking", problem)
        self.is_connected = is_connected
