"""Joins what a backend writes to a text that somebody else began."""

from __future__ import annotations


class Seam:
    """Leaves out of a continuation what its reader has already.

    Who searches for stop strings holds back the end of the begun text and gives it out later; a model that was not
    shown the blanks at its end writes them again.

    Parameters
    ----------
    held : the end of the begun text that may come once more

    Examples
    --------
    >>> seam = Seam(" ")
    >>> seam.take(" wor"), seam.take("ld ")
    ('wor', 'ld ')
    """

    def __init__(self, held: str = "") -> None:
        self._held = held

    def take(self, text: str) -> str:
        """Return what is new of a piece of text."""
        if not self._held or not text:
            return text
        size = 0
        while size < min(len(text), len(self._held)) and text[size] == self._held[size]:
            size += 1
        self._held = self._held[size:] if size == len(text) else ""
        return text[size:]
