"""Asks the router without letting it hold up the event loop, or a request fail for want of an estimate."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from classifier.types import Router, RouterRequest, Sufficiency

_log = logging.getLogger("suffice.router")

# A prediction this long on average is made in a thread: other requests' tokens should not wait for it.
_INLINE_S = 0.002
_INLINE_CHARS = 20_000
_NEWEST = 0.05


class Predictor:
    """One router, or none. ``predict`` gives None where no estimate can be had; the policy then plays safe."""

    def __init__(
        self, router: Router | None, *, timeout_s: float, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.router = router
        self._timeout_s = timeout_s
        self._clock = clock
        self._mean_s = 0.0

    @property
    def version(self) -> str:
        return self.router.version if self.router is not None else "none"

    async def predict(self, turns: tuple[tuple[str, str], ...]) -> Sufficiency | None:
        """Calibrated estimates for one request, or None: no router, no text, too slow, or it failed."""
        if self.router is None or not turns:
            return None
        request = RouterRequest(turns)
        started_s = self._clock()
        try:
            if self._mean_s < _INLINE_S and sum(len(text) for _, text in turns) < _INLINE_CHARS:
                estimate = self.router.predict([request])[0]
            else:
                async with asyncio.timeout(self._timeout_s):
                    estimate = (await asyncio.to_thread(self.router.predict, [request]))[0]
        except TimeoutError:
            _log.warning("no estimate within %g s; the policy plays safe", self._timeout_s)
            return None
        except Exception:
            # A router is foreign code to the request: whatever it raises, the request is served without it.
            _log.exception("the router failed; the policy plays safe")
            return None
        self._mean_s += _NEWEST * (self._clock() - started_s - self._mean_s)
        return estimate
