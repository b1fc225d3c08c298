"""Bounds what of a text is looked at, and cuts it into words once for everyone."""

from __future__ import annotations

import re
from collections.abc import Sequence

HEAD_CHARS = 6_144
TAIL_CHARS = 2_048
MAX_WORD_CHARS = 40

# A word with inner apostrophes, or a number with its separators. Linear in the text: the repeats do not nest.
_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*|\d+(?:[.,:/]\d+)*")
# The same of text that is all ASCII, in a third of the time.
_ASCII_WORD = re.compile(r"[A-Za-z]+(?:'[A-Za-z]+)*|[0-9]+(?:[.,:/][0-9]+)*")


def own_text(turns: Sequence[tuple[str, str]]) -> str:
    """Return the last user turn of (role, text) turns, or all text where there is none."""
    for role, content in reversed(turns):
        if role == "user":
            return content
    return "\n".join([content for _, content in turns])


def clip(text: str) -> str:
    """Keep the head and the tail: instructions stand at either end, and a megabyte must not cost a second."""
    if len(text) <= HEAD_CHARS + TAIL_CHARS:
        return text
    return f"{text[:HEAD_CHARS]} {text[-TAIL_CHARS:]}"


def words(text: str) -> list[str]:
    """Return words and numbers in order, as written."""
    return (_ASCII_WORD if text.isascii() else _WORD).findall(text)


def number_shape(word: str) -> str:
    """Replace digits by zeros: how large a number is matters to a model, rarely which one it is."""
    return "0" * min(len(word), MAX_WORD_CHARS) if word.isdecimal() else re.sub(r"\d", "0", word[:MAX_WORD_CHARS])


_DIGITS = "0123456789"


def normalise(word: str) -> str:
    """Return the form that is hashed: lower case, bounded, numbers by their shape."""
    return number_shape(word) if word[0].isdecimal() else word[:MAX_WORD_CHARS].lower()


def has_digit(text: str) -> bool:
    """Return whether a decimal digit of any script may be in a text."""
    # Ten searches for one byte are a tenth of one walk by an expression.
    return not text.isascii() or any(digit in text for digit in _DIGITS)
