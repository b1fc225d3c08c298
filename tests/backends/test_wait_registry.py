"""Bounded waits end by their limit, by closing or by themselves, and can be told apart."""

from __future__ import annotations

import asyncio

import pytest

from backends.remote.wait_registry import BackendClosed, WaitRegistry


async def say(text: str) -> str:
    await asyncio.sleep(0)
    return text


async def test_what_comes_in_time_is_returned_and_what_it_raises_is_raised() -> None:
    waits = WaitRegistry()
    assert await waits.bounded(say("done"), 60) == "done"

    async def fail() -> None:
        raise KeyError("theirs")

    with pytest.raises(KeyError, match="theirs"):
        await waits.bounded(fail(), 60)


@pytest.mark.parametrize("limit_s", [0.0, -5.0, 0.001])
async def test_a_limit_that_passes_is_a_timeout(limit_s: float) -> None:
    with pytest.raises(TimeoutError):
        await WaitRegistry().bounded(asyncio.Event().wait(), limit_s)


async def test_closing_ends_every_wait_as_closed() -> None:
    waits, event = WaitRegistry(), asyncio.Event()
    tasks = [asyncio.create_task(waits.bounded(event.wait(), 3600)) for _ in range(5)]
    await asyncio.sleep(0)
    waits.close()
    waits.close()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(each) for each in ended] == [BackendClosed] * 5


async def test_a_wait_that_is_over_is_not_touched_by_closing() -> None:
    waits = WaitRegistry()
    assert await waits.bounded(say("before"), 60) == "before"
    waits.close()
    # What is ready at once may still be read; only waiting is over.
    assert await waits.bounded(say("after"), 60) == "after"
    with pytest.raises(BackendClosed):
        await waits.bounded(asyncio.Event().wait(), 0.0)


async def test_cancelling_the_task_is_no_timeout() -> None:
    waits = WaitRegistry()
    task = asyncio.create_task(waits.bounded(asyncio.Event().wait(), 3600))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    waits.close()
