"""Asks engines from a thread that may block."""

from __future__ import annotations

from engine.engine import Engine, Result, collect
from engine.request import Request
from engine.sink import QueueSink


def answer_of(engine: Engine, request: Request, timeout_s: float) -> Result:
    """Submit, and wait for the whole answer; raises the error of a request that ended with one."""
    sink = QueueSink()
    engine.submit(request, sink)
    return collect(sink, timeout_s)
