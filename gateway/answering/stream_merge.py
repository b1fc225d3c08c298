"""Several streams as one, in the order their items come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")

# Items a stream may be ahead of the reader: a slow client holds the engine's output back here.
_MAX_AHEAD = 64


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield (place of the stream, item). The first exception of any stream ends all; closing this closes them."""
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue(_MAX_AHEAD)

    async def pump(place: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            # Closed here, not by the garbage collector: whatever the stream holds is free when its task is done.
            async with aclosing(stream):
                async for item in stream:
                    await queue.put((place, item))
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(pump(place, stream)) for place, stream in enumerate(streams)]
    try:
        num_left = len(tasks)
        while num_left:
            item = await queue.get()
            if item is None:
                num_left -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
