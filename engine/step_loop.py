"""Runs the thread that steps engines.

One thread steps every engine it is given, in turn. Engines usually get one each, on a CPU and on a GPU, so that a small
model's steps need not wait for a large one's.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger(__name__)

# A step gives up the interpreter lock in every tensor operation and must win it back each time. At CPython's default of
# 5 ms a single busy thread beside it made a 1 ms step of a small model take 94 ms; at 0.2 ms it took 3 ms, but a server
# under load then changes hands so often that every tier took a tenth more CPU time than at this value.
SWITCH_INTERVAL_S = 1e-3


class Steppable(Protocol):
    """Offers an engine as the thread sees it."""

    def has_work(self) -> bool: ...

    def step(self) -> float:
        """Do one step; never raises for what a request or a device can cause.

        Returns
        -------
        Seconds for which there is nothing to do here unless the loop is woken; 0 where the next step may follow
        """

    def idle(self) -> float | None:
        """Do a little of what waits for a quiet moment, if this is one; nobody has work. Never raises.

        Returns
        -------
        0 where something was done, else seconds until there may be something, None if there is nothing
        """


class StepLoop:
    """Steps engines round-robin while any has work, lets them use quiet moments, and sleeps otherwise.

    Parameters
    ----------
    name : of the thread
    on_start : runs first on the thread, for settings that belong to a thread
    """

    def __init__(self, name: str = "engine", *, on_start: Callable[[], None] | None = None) -> None:
        self._engines: tuple[Steppable, ...] = ()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._name = name
        self._on_start = on_start
        self._thread: threading.Thread | None = None

    @property
    def thread_id(self) -> int | None:
        return None if self._thread is None else self._thread.ident

    def add(self, engine: Steppable) -> None:
        """Step this engine too; starts the thread if it is the first."""
        with self._lock:
            assert not self._closed, "the loop is closed"
            self._engines = (*self._engines, engine)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def remove(self, engine: Steppable) -> None:
        """Step this engine no more; a step in progress is not waited for."""
        with self._lock:
            self._engines = tuple(each for each in self._engines if each is not engine)

    def wake(self) -> None:
        """Look for work now. Safe from any thread."""
        self._wake.set()

    def close(self) -> None:
        """End the thread after the step in progress. Idempotent; safe from any thread but its own."""
        with self._lock:
            self._closed = True
            thread = self._thread
        self._wake.set()
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        if self._on_start is not None:
            self._on_start()
        while not self._closed:
            rest_s: float | None = None  # None: until somebody has work
            for engine in self._engines:
                if engine.has_work():
                    wait_s = 0.0
                    try:
                        wait_s = engine.step()
                    except Exception:  # a bug of ours must not stop the other engines
                        logger.exception("engine step failed")
                    rest_s = wait_s if rest_s is None else min(rest_s, wait_s)
            if rest_s is None:
                rest_s = self._idle()
            if rest_s != 0.0:
                self._wake.wait(rest_s)
                self._wake.clear()

    def _idle(self) -> float | None:
        """Let one engine use the moment; whoever has work by then waits for no other."""
        rests = []
        for engine in self._engines:
            rest_s = engine.idle()
            if rest_s == 0.0:
                return 0.0
            rests.append(rest_s)
        return min((rest_s for rest_s in rests if rest_s is not None), default=None)
