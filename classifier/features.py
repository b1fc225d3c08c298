"""Computes the dense features of a request: pure, bounded, and quick enough to run before every answer.

They are the seed's (length, entities, reasoning keywords, question depth, domain, history per tier) and what
measuring added: how many numbers there are and how large, what is quoted, listed and punctuated. Counts enter as
``log1p`` so that a linear model sees ratios and a megabyte is not a thousand times a kilobyte.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence

from classifier.lexicon import GROUP_NAMES, WORD_GROUPS
from classifier.text import has_digit
from classifier.tool_features import TOOL_FEATURES
from classifier.types import RouterRequest

HISTORY_PRIOR = 8.0
"""Pseudo-observations that pull a short history towards even odds; 8 right of 8 then reads as 75 %."""

_PUNCTUATION: tuple[tuple[str, str], ...] = (
    ("num_question_marks", "?"),
    ("num_commas", ","),
    ("num_semicolons", ";:"),
    ("num_sentence_ends", ".!"),
    ("num_operators", "+*/=^%<>×÷−"),
    ("num_dashes", "-–—"),
    ("num_brackets", "([{"),
    ("num_quotes", "\"“”`'‘’"),
    ("num_lines", "\n"),
)

_MARK = re.compile("[" + re.escape("".join(characters for _, characters in _PUNCTUATION)) + "]")
_MARK_COLUMN = {mark: column for column, (_, characters) in enumerate(_PUNCTUATION) for mark in characters}
_NO_MARKS = bytes(code for code in range(128) if chr(code) not in _MARK_COLUMN)
_QUESTION_MARKS, _BRACKETS = (_MARK_COLUMN[mark] for mark in "?(")
_CLAUSES = tuple(GROUP_NAMES.index(name) for name in ("question", "condition", "sequence", "instruction"))
_CAPITALS = string.ascii_uppercase.encode()

TEXT_FEATURES: tuple[str, ...] = (
    "num_chars",
    "num_words",
    "mean_word_chars",
    "max_word_chars",
    "distinct_word_share",
    "num_entities",
    "capital_share",
    "foreign_share",
    "num_numbers",
    "max_number_digits",
    "second_number_digits",
    "total_number_digits",
    "mean_number_digits",
    "max_number_log10",
    "num_decimals",
    "num_years",
    "num_zero_endings",
    "max_quoted_chars",
    "question_depth",
    "num_turns",
    "num_context_chars",
    "num_system_chars",
    *(name for name, _ in _PUNCTUATION),
    *(f"group_{name}" for name in GROUP_NAMES),
)
"""Order of the text's features in every vector; part of an artifact's schema."""


def _number_features(tokens: Sequence[str]) -> tuple[float, ...]:
    """Return the nine features of a prompt's numbers, in :data:`TEXT_FEATURES` order (counts as ``log1p``)."""
    if not tokens:
        return (0.0,) * 9
    digits = [sum(c.isdecimal() for c in token) for token in tokens]
    ranked = sorted(digits, reverse=True)
    return (
        math.log1p(len(digits)),
        float(min(ranked[0], 20)),
        float(min(ranked[1], 20)) if len(ranked) > 1 else 0.0,
        math.log1p(sum(digits)),
        sum(digits) / len(digits),
        max(map(_magnitude, tokens)),
        math.log1p(sum("." in token for token in tokens)),
        math.log1p(sum(len(token) == 4 and token[:2] in ("19", "20") for token in tokens)),
        math.log1p(sum(token[-1] == "0" for token in tokens)),
    )


def _magnitude(token: str) -> float:
    """Return log10(1 + value) of a number; separators other than a decimal point are dropped, huge ones saturate."""
    whole = token.partition(".")[0].replace(",", "").partition(":")[0].partition("/")[0]
    return min(math.log10(1 + int(whole[:20])) + max(len(whole) - 20, 0), 30.0)


def _quoted_chars(text: str) -> int:
    """Return the longest run between two plain double quotes; a linear stand-in for parsing quotations."""
    parts = text.split('"')
    return max((len(part) for part in parts[1:-1:2]), default=0)


def _word_features(tokens: Sequence[str], text: str) -> tuple[list[float], list[float], list[str]]:
    """Return the shape of the words, how often each lexicon group speaks, and the numbers among them."""
    group_counts = [0.0] * len(GROUP_NAMES)
    # All at once is quicker than remembering words; and what was remembered of others would show in the time.
    joined = "\n".join(tokens)
    numbers = [token for token in tokens if token[0].isdecimal()] if has_digit(joined) else []
    known_numbers = set(numbers)
    words = [token for token in tokens if token not in known_numbers] if numbers else tokens
    lowered = "\n".join(words).lower() if numbers else joined.lower()
    plain = lowered.split("\n") if words else []
    if len(plain) != len(words):
        plain = [word.lower() for word in words]
    for word in plain:
        if word in WORD_GROUPS:
            for column in WORD_GROUPS[word]:
                group_counts[column] += 1.0
    entities = 0
    if lowered != joined:
        names = [word != low and len(word) > 1 for word, low in zip(words, plain, strict=True)]
        # What stands first is written large in any sentence.
        entities = sum(names) - (bool(words) and words[0] is tokens[0] and names[0])
    num_plain = max(len(plain), 1)
    lengths = list(map(len, plain))
    shape = [
        sum(lengths) / num_plain,
        math.log1p(max(lengths, default=0)),
        len(set(plain)) / num_plain,
        math.log1p(entities),
        _capital_share(text[:1024]),
        0.0 if text.isascii() else sum(c > "\x7f" for c in text) / len(text),
    ]
    return shape, group_counts, numbers


def _capital_share(text: str) -> float:
    if text.isascii():
        return (len(text) - len(text.encode().translate(None, _CAPITALS))) / max(len(text), 1)
    return sum(map(str.isupper, text)) / len(text)


def _punctuation(text: str) -> list[int]:
    """Count how often each kind of mark occurs, in the order of ``_PUNCTUATION``."""
    counts = [0] * len(_PUNCTUATION)
    if text.isascii():
        for mark in text.encode().translate(None, _NO_MARKS):
            counts[_MARK_COLUMN[chr(mark)]] += 1
        return counts
    for mark, count in Counter(_MARK.findall(text)).items():
        counts[_MARK_COLUMN[mark]] += count
    return counts


def _question_depth(group_counts: Sequence[float], punctuation: Sequence[int]) -> float:
    """Count things asked on top of each other: questions, conditions, further steps, nested brackets."""
    clauses = sum([group_counts[column] for column in _CLAUSES])
    return math.log1p(clauses + punctuation[_QUESTION_MARKS] + punctuation[_BRACKETS])


def text_features(request: RouterRequest, own_chars: int, text: str, tokens: Sequence[str]) -> list[float]:
    """Return the features of :data:`TEXT_FEATURES`, in order.

    Parameters
    ----------
    request : the request; its other turns give the conversation's features
    own_chars : length of its last user turn
    text : that turn, clipped
    tokens : ``words(text)``
    """
    shape, groups, numbers = _word_features(tokens, text)
    punctuation = _punctuation(text)
    total_chars = sum([len(content) for _, content in request.turns])
    system_chars = sum([len(content) for role, content in request.turns if role in ("system", "developer")])
    return [
        math.log1p(own_chars),
        math.log1p(len(tokens)),
        *shape,
        *_number_features(numbers),
        math.log1p(_quoted_chars(text)),
        _question_depth(groups, punctuation),
        math.log1p(len(request.turns)),
        math.log1p(max(total_chars - own_chars - system_chars, 0)),
        math.log1p(system_chars),
        *map(math.log1p, punctuation),
        *map(math.log1p, groups),
    ]


def history_features(history: Mapping[int, tuple[float, float]], num_tiers: int) -> list[float]:
    """Return log-odds of past success per tier, shrunk to 0 ("nothing known") where little or nothing was seen.

    Parameters
    ----------
    history : tier (1-based) -> (number right, number seen) for this tenant or session
    num_tiers : length of the result
    """
    if not history:
        return [0.0] * num_tiers
    odds = []
    for tier in range(1, num_tiers + 1):
        right, seen = history.get(tier, (0.0, 0.0))
        right = min(max(right, 0.0), max(seen, 0.0))
        odds.append(math.log((right + HISTORY_PRIOR / 2) / (max(seen, 0.0) - right + HISTORY_PRIOR / 2)))
    return odds


def feature_names(num_tiers: int, *, reads_tools: bool = False) -> tuple[str, ...]:
    """Return the names of all dense features: of the text, then of the history, then of tools where these are read."""
    plain = TEXT_FEATURES + tuple(f"history_tier_{tier}" for tier in range(1, num_tiers + 1))
    return plain + TOOL_FEATURES if reads_tools else plain
