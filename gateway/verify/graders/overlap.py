"""Grades by shared wording: ROUGE-L, the longest common subsequence of the answers' words."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Sequence

from gateway.outcomes.answer_grading import visible_text
from gateway.verify.answer_pair import AnswerPair, Grade, Spend

_WORD = re.compile(r"\w+")
# Beyond this many words the beginning speaks for the whole; the comparison grows with the square.
_MAX_WORDS = 4096


class OverlapGrader:
    """F1 of the longest common subsequence of words, 0..1. Weak evidence on open text; says so by its weight.

    References
    ----------
    Lin 2004, "ROUGE: A Package for Automatic Evaluation of Summaries", section 3.
    """

    name = "overlap"
    needs_top_answer = True
    reads_calls = False

    async def grade(self, pair: AnswerPair, spend: Spend) -> Grade | None:
        return None if pair.top_answer is None else compare(pair.cheap_answer, pair.top_answer)


def compare(cheap_answer: str, top_answer: str) -> Grade:
    """Return the comparison itself, without a model.

    Returns
    -------
    ``score``: ROUGE-L F1; ``log_length_ratio``: log of cheap words over top words, each plus one
    """
    cheap, top = words(cheap_answer), words(top_answer)
    ratio = math.log((len(cheap) + 1) / (len(top) + 1))
    return Grade(rouge_l(cheap, top), {"log_length_ratio": ratio})


def words(text: str) -> list[str]:
    """Return a text's words, lower case, without thinking."""
    return _WORD.findall(visible_text(text).casefold())[:_MAX_WORDS]


def rouge_l(one: Sequence[Hashable], other: Sequence[Hashable]) -> float:
    """2 LCS / (n + m); 1 for two empty sequences."""
    if not one and not other:
        return 1.0
    return 2 * lcs_length(one, other) / (len(one) + len(other))


def lcs_length(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """Length of the longest common subsequence, a machine word of columns at a time.

    References
    ----------
    Hyyrö 2004, "Bit-Parallel LCS-length Computation Revisited", figure 2.
    """
    places: dict[Hashable, int] = {}
    for place, item in enumerate(one):
        places[item] = places.get(item, 0) | 1 << place
    full = (1 << len(one)) - 1
    row = full
    for item in other:
        matches = row & places.get(item, 0)
        row = ((row + matches) | (row - matches)) & full
    return len(one) - row.bit_count()
