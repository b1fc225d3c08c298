"""Grades calls of tools: do both answers make the same ones? Decisive wherever a call was made."""

from __future__ import annotations

from collections.abc import Sequence

from backends.protocol import ToolCall
from gateway.outcomes.call_grading import compare_calls
from gateway.verify.answer_pair import AnswerPair, Grade, Spend


class ToolCallGrader:
    """1 for the same calls, 0 for different ones or where only one side calls; no opinion where neither does."""

    name = "tool_calls"
    needs_top_answer = True
    reads_calls = True

    async def grade(self, pair: AnswerPair, spend: Spend) -> Grade | None:
        return None if pair.top_answer is None else compare(pair.cheap_calls, pair.top_calls)


def compare(cheap_calls: Sequence[ToolCall], top_calls: Sequence[ToolCall]) -> Grade | None:
    """Return the comparison itself; symmetric in its arguments.

    Returns
    -------
    ``score``: 1 where the calls are the same in normal form; ``exact``: 1 where they are as written; ``same_kind``: 0
    where only one side calls
    """
    found = compare_calls(cheap_calls, top_calls)
    if found is None:
        return None
    return Grade(float(found.normalised), {"exact": float(found.exact), "same_kind": float(found.same_kind)})
