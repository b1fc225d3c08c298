"""Predicts how long a request would wait for a place, from how long places have been held.

By Little's law ``places`` of which each is held for ``held_s`` become free at ``places / held_s`` a second.
"""

from __future__ import annotations

# Requests over which the running mean forgets.
_MEMORY = 32
_FIRST_GUESS_S = 1.0


class HeldTime:
    """Estimates how long a place is held while all are taken.

    A place is held longer the more are taken beside it, as they share a device. What ends while places are free is
    counted only until something has ended while none was.

    Attributes
    ----------
    is_measured : something has
    """

    __slots__ = ("_last_s", "_mean_s", "_num", "is_measured")

    def __init__(self) -> None:
        self._mean_s = _FIRST_GUESS_S
        self._num = 0
        self._last_s: float | None = None
        self.is_measured = False

    def ended(self, held_s: float, now_s: float, *, was_full: bool) -> None:
        """Count a request that ended; ``was_full`` tells whether all places were taken until then."""
        self._last_s = now_s
        if was_full and not self.is_measured:
            self.is_measured, self._num = True, 0
        if was_full or not self.is_measured:
            self._num = min(self._num + 1, _MEMORY)
            self._mean_s += (held_s - self._mean_s) / self._num

    def filled(self, now_s: float) -> None:
        """Note that the last free place was taken: from now on ends are to be expected."""
        self._last_s = now_s

    def expect_s(self, now_s: float) -> float:
        """Return the expected time; where nothing has ended for longer than the mean, that long."""
        silence_s = 0.0 if self._last_s is None else now_s - self._last_s
        return max(self._mean_s, silence_s)
