"""Captures steps: the launches of one shape of step are recorded once and replayed as a whole.

A launch costs the host about 14 microseconds, one inside a replayed graph about 1 on the device and nothing on the
host; a decode step of a large model is 700 launches. A graph replays the same kernels on the same addresses, so
everything that changes from step to step is read from buffers that stay in place (:mod:`engine.device.step_buffers`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

# Batch sizes worth a graph of their own: padding to the next costs less than the graphs in between would hold.
LADDER = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 384, 512)


def bucket(count: int, ladder: tuple[int, ...] = LADDER) -> int | None:
    """Return the smallest size of the ladder that holds ``count``, None beyond its end."""
    return next((size for size in ladder if size >= count), None)


@dataclass(slots=True)
class _CapturedGraph:
    graph: torch.cuda.CUDAGraph
    output: Tensor | None


class GraphCache:
    """Runs functions of fixed launches, captured from their second whole run on.

    The first run of a key is eager, and each until one did not raise, so that kernels are compiled and libraries are
    ready before the capture. All graphs share one memory pool, which is right because they replay one after the other
    on one stream.

    Parameters
    ----------
    name : of the engine, for the log
    enabled : False runs everything eagerly
    agree : whether all who capture the same step, each its part, could; a part alone could not be replayed

    Attributes
    ----------
    has_failed : a capture did, most likely for want of memory, and there will be no other
    """

    def __init__(self, name: str, *, enabled: bool, agree: Callable[[bool], bool] = bool) -> None:
        self._name = name
        self._agree = agree
        self.is_enabled = enabled
        self.has_failed = False
        self._captured: dict[Hashable, _CapturedGraph | None] = {}
        self._pool = torch.cuda.graph_pool_handle() if enabled else None
        self.num_replays = 0
        self.num_runs = 0

    def __len__(self) -> int:
        return sum(captured is not None for captured in self._captured.values())

    def run(self, key: Hashable, function: Callable[[], Tensor | None]) -> Tensor | None:
        """Do what ``function`` does, on the current stream.

        Parameters
        ----------
        key : stands for everything that ``function`` depends on besides the contents of its buffers
        function : makes the same launches on the same addresses at every call; its output lives until the next run
        """
        self.num_runs += 1
        captured = self._captured.get(key)
        if captured is None:
            if key not in self._captured or not self.is_enabled:
                output = function()
                self._captured[key] = None  # not where that raised: a run cut short did not compile everything
                return output
            captured = self._captured[key] = self._capture(key, function)
            if not self._agree(captured is not None) or captured is None:
                self._captured[key] = None
                self.is_enabled, self.has_failed = False, True
                return function()
            # Capturing took long; from the next time on it is a replay.
            captured.graph.replay()
            return captured.output
        captured.graph.replay()
        self.num_replays += 1
        return captured.output

    def _capture(self, key: Hashable, function: Callable[[], Tensor | None]) -> _CapturedGraph | None:
        """Record the launches; None, and no further tries for any key, if that fails."""
        graph = torch.cuda.CUDAGraph()
        try:
            # Other engines' threads use the device meanwhile; only this thread's calls are held to the rules.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                output = function()
            finally:
                graph.capture_end()
        except RuntimeError as cause:  # out of memory is one of them
            logger.warning(
                "%s: step %s could not be captured (%s: %s); steps not captured so far are launched kernel by kernel",
                self._name,
                key,
                type(cause).__name__,
                str(cause).splitlines()[0],
            )
            return None
        return _CapturedGraph(graph, output)

    @property
    def num_others(self) -> int:
        """Runs that were no replays, though they could have been: first ones, captures, and those without a graph."""
        return self.num_runs - self.num_replays if self.is_enabled else 0

    def clear(self) -> None:
        """Drop every graph and its memory."""
        self._captured.clear()
