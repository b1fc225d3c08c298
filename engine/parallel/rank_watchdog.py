"""Notices that a rank is gone, while whoever needs it waits for a device.

A captured step waits on the device for the other ranks, where no library's timeout reaches: without somebody beside it
a rank that died would leave the others' kernels spinning, and the host waiting for them, for good.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

from engine.parallel.ranks import STEP_TIMEOUT_S

_LOOK_EVERY_S = 1.0


class RankWatchdog:
    """Looks after the processes of a model's other ranks, on a thread of its own.

    Parameters
    ----------
    workers : process i is that of rank i + 1
    let_go : called once, on the thread, with the reason: a process ended, a limit passed, or an alarm was raised
    """

    def __init__(self, workers: Sequence[BaseProcess], let_go: Callable[[str], None]) -> None:
        self._workers = workers
        self._let_go = let_go
        self._due_s: dict[object, float] = {}
        self._lock = threading.Lock()
        self._bell, self._rope = Pipe(duplex=False)
        threading.Thread(target=self._look, name="ranks", daemon=True).start()

    @contextmanager
    def limit(self, seconds: float = STEP_TIMEOUT_S) -> Iterator[None]:
        """Let go where what is done within takes longer."""
        mark = object()
        with self._lock:
            self._due_s[mark] = time.monotonic() + seconds
        try:
            yield
        finally:
            with self._lock:
                del self._due_s[mark]

    def alarm(self, reason: str) -> None:
        """Let go now."""
        self._rope.send(reason)

    def stop(self) -> None:
        """Look no more."""
        self._rope.send(None)

    def _look(self) -> None:
        sentinels = {worker.sentinel: rank for rank, worker in enumerate(self._workers, 1)}
        while True:
            ready = wait([self._bell, *sentinels], _LOOK_EVERY_S)
            if self._bell in ready:
                reason = self._bell.recv()
                if reason is None:
                    return
            elif ready:
                reason = f"the process of rank {sentinels[ready[0]]} has ended"  # type: ignore[index]
            elif self._is_overdue():
                reason = f"a step took longer than {STEP_TIMEOUT_S:.0f} s"
            else:
                continue
            self._let_go(reason)
            return

    def _is_overdue(self) -> bool:
        with self._lock:
            return min(self._due_s.values(), default=float("inf")) < time.monotonic()
