"""Cuts text at stop strings: some servers ignore ``stop``, some take four, some leave the stop string in the text."""

from __future__ import annotations

from collections.abc import Sequence


class StopCutter:
    """Pass text through up to the first stop string (``found``), holding back only what may be the beginning of one.

    Examples
    --------
    >>> cutter = StopCutter(["END"])
    >>> cutter.feed("the E"), cutter.feed("NDs")
    ('the ', '')
    >>> cutter.is_stopped
    True
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found: str | None = None

    @property
    def is_stopped(self) -> bool:
        return self.found is not None

    def feed(self, text: str) -> str:
        """Take more text and return what may be shown now; nothing once stopped."""
        if not self._stops or self.is_stopped:
            return "" if self.is_stopped else text
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.found = min(found)
            self._held = ""
            return text[:at]
        # The longest overlap of any stop string, since each could still be the one that completes.
        num_held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """Return what is still held back: the text has ended without a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` that begins, but does not complete, ``stop``."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
