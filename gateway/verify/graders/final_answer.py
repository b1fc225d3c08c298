"""Grades by final answer: both end on the same number, letter or few words. Decisive where a task has one."""

from __future__ import annotations

import json
import re
from typing import Any

from gateway.outcomes.answer_grading import committed_answer, visible_text
from gateway.verify.answer_pair import AnswerPair, Grade, Spend

_FENCE = re.compile(r"\A```\w*\n|\n?```\Z")
_MAX_BRIEF_CHARS = 80
# "July 19" and "August 19" share their number and are two days.
_CALENDAR = re.compile(
    r"\b(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec|mon|tue|wed|thu|fri|sat|sun)[a-z]*\b", re.IGNORECASE
)


class FinalAnswerGrader:
    """1 for equal final answers in normal form, 0 for different ones; no opinion where a text does not end on one.

    Of two empty answers neither is better; an empty one against a text is worse. Two texts that are JSON are compared
    as values, and two brief ones that name different months or days differ, whatever their numbers.
    """

    name = "final_answer"
    needs_top_answer = True
    reads_calls = False

    async def grade(self, pair: AnswerPair, spend: Spend) -> Grade | None:
        return None if pair.top_answer is None else compare(pair.cheap_answer, pair.top_answer)


def compare(cheap_answer: str, top_answer: str) -> Grade | None:
    """Return the comparison itself, without a model; symmetric in its arguments."""
    mine, theirs = visible_text(cheap_answer), visible_text(top_answer)
    if not mine or not theirs:
        return Grade(float(mine == theirs))
    values = _json(mine), _json(theirs)
    if None not in values:
        return Grade(float(values[0] == values[1]))
    one, other = committed_answer(mine), committed_answer(theirs)
    if one is None or other is None:
        return None
    return Grade(float(one == other and not _differ_in_date(mine, theirs)))


def _json(text: str) -> Any:
    """Return the object or array that a text is; None where it is neither."""
    bare = _FENCE.sub("", text).strip()
    if not bare.startswith(("{", "[")):
        return None
    try:
        return json.loads(bare)
    except (ValueError, RecursionError):
        return None


def _differ_in_date(one: str, other: str) -> bool:
    if max(len(one), len(other)) > _MAX_BRIEF_CHARS:
        return False
    names = [{name[:3] for name in _CALENDAR.findall(text.casefold())} for text in (one, other)]
    return all(names) and names[0] != names[1]
