"""Waiting for what must come, however long it takes on a busy machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.gateway.raw import PATIENCE_S


async def until(holds: Callable[[], bool], what: str = "") -> float:
    """Seconds until a condition held; fails when it never does."""
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    for _ in range(int(PATIENCE_S / 0.005)):
        if holds():
            return loop.time() - begun_s
        await asyncio.sleep(0.005)
    raise AssertionError(f"waited {PATIENCE_S:g} s in vain {what}".strip())
