"""Asks the router without letting it hold up the event loop, or a request fail for want of an estimate."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from classifier.types import Router, RouterRequest, Sufficiency

_log = logging.getLogger("suffice.router")

# A prediction that takes this much CPU time on average is made in a thread: other requests' tokens should not wait.
# CPU time, because the wall time of a thread is mostly waiting for the interpreter when the server is busy, and a rule
# resting on it would never lead back.
_INLINE_CPU_S = 0.002
_INLINE_CHARS = 20_000
_NEWEST = 0.05
# Predictions are bound by the interpreter or spread over cores by themselves; more threads would only contend.
_MAX_THREADS = 2
_SAMPLE = RouterRequest((("user", "How many letters has the word estimate?"),))


_FAILED = "the router failed; the policy plays safe"


def make_threads() -> ThreadPoolExecutor:
    """Threads for predictions that are too long for the event loop's own."""
    return ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="suffice-router")


class Predictor:
    """One router, or none. ``predict`` gives None where no estimate can be had; the policy then plays safe.

    Requests that come in two turns of the event loop are estimated together, which a router does for less than one by
    one. Nothing waits for company: what the second turn takes in had come while the first was under way.

    Parameters
    ----------
    router : what estimates
    timeout_s : a prediction in a thread that takes longer counts as missing
    threads : shared with other routers, which then outlive this one; its own when not given
    """

    def __init__(
        self,
        router: Router | None,
        *,
        timeout_s: float,
        threads: ThreadPoolExecutor | None = None,
    ) -> None:
        self.router = router
        self._timeout_s = timeout_s
        self._mean_cpu_s = 0.0
        self._threads = threads or make_threads()
        self._waiting: list[tuple[RouterRequest, asyncio.Future[Sufficiency | None]]] = []

    @property
    def version(self) -> str:
        return self.router.version if self.router is not None else "none"

    async def warm_up(self) -> None:
        """Predict twice: the first time loads what is loaded late, the second says what a prediction takes."""
        if self.router is None:
            return
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._threads, self._timed, self.router, [_SAMPLE])
            _, self._mean_cpu_s = await loop.run_in_executor(self._threads, self._timed, self.router, [_SAMPLE])
        except Exception:
            _log.exception("the router failed on a sample; requests it fails on are routed without an estimate")

    async def predict(self, turns: tuple[tuple[str, str], ...], tools: tuple[float, ...] = ()) -> Sufficiency | None:
        """Calibrated estimates for one request, or None: no router, no text, too slow, or it failed."""
        router = self.router
        if router is None or not turns:
            return None
        request = RouterRequest(turns, tools=tools)
        loop = asyncio.get_running_loop()
        if self._mean_cpu_s < _INLINE_CPU_S and sum([len(text) for _, text in turns]) < _INLINE_CHARS:
            answer: asyncio.Future[Sufficiency | None] = loop.create_future()
            if not self._waiting:
                loop.call_soon(loop.call_soon, self._answer_waiting, router)
            self._waiting.append((request, answer))
            return await answer
        try:
            work = loop.run_in_executor(self._threads, self._timed, router, [request])
            (estimate,), cpu_s = await asyncio.wait_for(work, self._timeout_s)
        except TimeoutError:
            _log.warning("no estimate within %g s; the policy plays safe", self._timeout_s)
            return None
        except Exception:
            # A router is foreign code to the request: whatever it raises, the request is served without it.
            _log.exception(_FAILED)
            return None
        self._mean_cpu_s += _NEWEST * (cpu_s - self._mean_cpu_s)
        return estimate

    def _answer_waiting(self, router: Router) -> None:
        """Estimate for all who wait and still want to know."""
        waiting, self._waiting = self._waiting, []
        waiting = [each for each in waiting if not each[1].done()]
        if not waiting:
            return
        requests = [request for request, _ in waiting]
        try:
            found: Sequence[Sufficiency | None]
            found, cpu_s = self._timed(router, requests)
            if len(found) != len(requests):
                raise ValueError(f"the router gave {len(found)} estimates for {len(requests)} requests")
        except Exception:
            # Whose text it was is not known, and one request's must not be another's loss.
            found = [_alone(router, request) for request in requests]
        else:
            self._mean_cpu_s += _NEWEST * (cpu_s / len(waiting) - self._mean_cpu_s)
        for (_, answer), estimate in zip(waiting, found, strict=True):
            answer.set_result(estimate)

    @staticmethod
    def _timed(router: Router, requests: list[RouterRequest]) -> tuple[list[Sufficiency], float]:
        begun_s = time.thread_time()
        return router.predict(requests), time.thread_time() - begun_s

    def close(self) -> None:
        """Let the threads go; a prediction that runs ends unheard."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _alone(router: Router, request: RouterRequest) -> Sufficiency | None:
    """One request's estimate, or None: whatever a router raises, the request is served without it."""
    try:
        (estimate,) = router.predict([request])
        return estimate
    except Exception:
        _log.exception(_FAILED)
        return None
