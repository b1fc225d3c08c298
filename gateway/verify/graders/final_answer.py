"""Do both answers end on the same number, letter or few words? Decisive where a task has a final answer."""

from __future__ import annotations

from gateway.outcomes.grading import committed_answer, visible
from gateway.verify.pair import Grade, Pair, Spend


class FinalAnswerGrader:
    """1 for equal final answers in normal form, 0 for different ones; no opinion where a text does not end on one.

    Of two empty answers neither is better; an empty one against a text is worse.
    """

    name = "final_answer"
    needs_top_answer = True

    async def grade(self, pair: Pair, spend: Spend) -> Grade | None:
        return None if pair.top_answer is None else compare(pair.cheap_answer, pair.top_answer)


def compare(cheap_answer: str, top_answer: str) -> Grade | None:
    """The comparison itself, without a model; symmetric in its arguments."""
    mine, theirs = visible(cheap_answer), visible(top_answer)
    if not mine or not theirs:
        return Grade(float(mine == theirs))
    one, other = committed_answer(mine), committed_answer(theirs)
    if one is None or other is None:
        return None
    return Grade(float(one == other))
