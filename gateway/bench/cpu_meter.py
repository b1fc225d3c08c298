"""Meters a request's CPU time by part, around the gateway's own functions inside the running server.

Each part's figure is its own time, without the parts within it, by the main thread's CPU clock; reading that clock
costs as much as some parts do, so what it costs is measured and taken off. What no part accounts for (the event loop,
the kernel's share, garbage collection, the thread that writes the log) is the difference to the server's whole time.
"""

from __future__ import annotations

import inspect
import time
import types
from collections import Counter
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.access.authenticator import Authenticator
from gateway.answering import request_router
from gateway.answering.recorder import AnswerRecorder
from gateway.answering.request_router import RequestRouter
from gateway.api.answer_encoder import CompletionsEncoder
from gateway.api.chat_codec import ChatDecoder
from gateway.edge.gate import RequestGate
from gateway.edge.responder import Responder
from gateway.edge.response_cycle import OneWriteCycle
from gateway.endpoints import generation
from gateway.endpoints.generation import GenerationEndpoint, GenerationRun
from gateway.models.predictor import Predictor
from gateway.store import store
from gateway.store.committer import GroupCommitter
from gateway.verify.check_sampler import CheckSampler

_PARTS: tuple[tuple[Any, str, str], ...] = (
    (HttpToolsProtocol, "data_received", "parse HTTP"),
    (GenerationEndpoint, "__call__", "endpoint"),
    (RequestGate, "open", "parse request"),
    (ChatDecoder, "__call__", "parse request"),
    (Authenticator, "check", "auth"),
    (GenerationRun, "run", "limits"),
    (RequestRouter, "route", "route"),
    (Predictor, "_answer_waiting", "estimate"),
    (request_router, "decide", "decide"),
    (generation, "start_answer", "generate"),
    (GenerationRun, "_whole", "generate"),
    (AnswerRecorder, "settle", "settle"),
    (CheckSampler, "inclusion_probabilities", "sampling"),
    (CheckSampler, "draw_check", "sampling"),
    (AnswerRecorder, "_row", "log row"),
    (store, "encode_record", "encode row"),
    (GroupCommitter, "commit", "commit"),
    (GroupCommitter, "_commit", "commit"),
    (AnswerRecorder, "_note", "metrics and log line"),
    (GenerationRun, "_make_encoder", "response"),
    (CompletionsEncoder, "whole", "response"),
    (generation, "answer_headers", "response"),
    (Responder, "whole", "response"),
    (OneWriteCycle, "send", "write HTTP"),
)
# Entered once for each request.
_ONCE = "decide"
_CALIBRATION_CALLS = 20_000


class CpuMeter:
    """CPU time by part, of one thread.

    Attributes
    ----------
    own_ns : part -> nanoseconds, without the parts within it, what the meter costs included
    """

    def __init__(self) -> None:
        self._running: list[list[Any]] = []
        self.own_ns: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()
        self._inner: Counter[str] = Counter()

    def install(self) -> None:
        """Put the meter around every part, in this process, for good."""
        for owner, name, part in _PARTS:
            setattr(owner, name, self.around(part, getattr(owner, name)))

    def clear(self) -> None:
        """Forget what was metered, such as a warm-up; nothing must be running."""
        for counter in (self.own_ns, self._calls, self._inner):
            counter.clear()

    def cpu_us(self) -> dict[str, float]:
        """CPU microseconds a request by part, the meter's own taken off."""
        within_ns, beside_ns = _calibrated()
        num_requests = max(self._calls[_ONCE], 1)
        found = {}
        for part in dict.fromkeys(part for _, _, part in _PARTS):
            own_ns = self.own_ns[part] - within_ns * self._calls[part] - beside_ns * self._inner[part]
            found[part] = max(own_ns, 0.0) / 1e3 / num_requests
        return found

    def begin(self, part: str) -> None:
        """A part begins, or goes on."""
        now_ns = time.thread_time_ns()
        if self._running:
            outer, since_ns = self._running[-1]
            self.own_ns[outer] += now_ns - since_ns
            self._inner[outer] += 1
        self._calls[part] += 1
        self._running.append([part, time.thread_time_ns()])

    def end(self) -> None:
        """The part begun last ends, or waits."""
        part, since_ns = self._running.pop()
        self.own_ns[part] += time.thread_time_ns() - since_ns
        if self._running:
            self._running[-1][1] = time.thread_time_ns()

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the same function or coroutine function, metered."""
        if inspect.iscoroutinefunction(function):

            def awaited(*arguments: Any, **options: Any) -> Any:
                return self._driven(part, function(*arguments, **options))

            return awaited

        def called(*arguments: Any, **options: Any) -> Any:
            self.begin(part)
            try:
                return function(*arguments, **options)
            finally:
                self.end()

        return called

    @types.coroutine
    def _driven(self, part: str, coroutine: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Run a coroutine, metered while it runs and not while it waits."""
        step, value = coroutine.send, None
        while True:
            self.begin(part)
            try:
                yielded = step(value)
            except StopIteration as end:
                return end.value
            finally:
                self.end()
            try:
                step, value = coroutine.send, (yield yielded)
            except BaseException as error:
                step, value = coroutine.throw, error


def _calibrated() -> tuple[float, float]:
    """Return what the meter adds to an empty part and to the part around it, in nanoseconds a call."""
    meter = CpuMeter()
    meter.begin("outer")
    for _ in range(_CALIBRATION_CALLS):
        meter.begin("inner")
        meter.end()
    meter.end()
    within_ns, beside_ns = (meter.own_ns[part] / _CALIBRATION_CALLS for part in ("inner", "outer"))
    return within_ns, beside_ns
