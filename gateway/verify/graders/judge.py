"""The top tier as a judge: asked for one digit, read as a distribution, with both orders of the answers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable

from backends.errors import ContextLengthExceeded, RequestRejected, UnsupportedByBackend
from backends.protocol import (
    Finished,
    GenerateRequest,
    Message,
    Priority,
    SamplingParams,
    TokenDelta,
    TokenLogprob,
)
from gateway.outcomes.answer_grading import visible_text
from gateway.verify.answer_pair import AnswerPair, Grade, Spend
from gateway.verify.check_costs import priced_ending
from gateway.verify.request_codec import question_of

_POINTS = {"1": 0.0, "2": 0.25, "3": 0.5, "4": 0.75, "5": 1.0}
_NUM_ALTERNATIVES = 20
_MAX_CHARS = 12_000

_TWO = """You compare two answers to a question. Judge only whether they are right and helpful, not how long they are.

Question:
{question}

Answer A:
{one}

Answer B:
{other}

How good is answer A next to answer B?
Reply with one digit: 1 much worse, 2 worse, 3 equally good, 4 better, 5 much better.
"""

_ONE = """You grade an answer to a question. Judge only whether it is right and helpful, not how long it is.

Question:
{question}

Answer:
{one}

How good is the answer? Reply with one digit: 1 wrong, 2 poor, 3 fair, 4 good, 5 right and complete.
"""


class JudgeGrader:
    """Expected points of the cheap answer, 0..1, over the probabilities of the digits 1 to 5.

    Two answers are shown in both orders and the points averaged, so that a preference for the first place cancels out.
    Without a second answer the cheap one is graded alone. No opinion where the model shows no probabilities, or none of
    the digits is among its likely words.
    """

    name = "judge"
    needs_top_answer = False
    reads_calls = False

    async def grade(self, pair: AnswerPair, spend: Spend) -> Grade | None:
        if "logprobs" not in pair.top.backend.capabilities:
            return None
        question, cheap = question_of(pair.request)[:_MAX_CHARS], visible_text(pair.cheap_answer)[:_MAX_CHARS]
        if pair.top_answer is None:
            found = [await self._points(pair, _ONE.format(question=question, one=cheap), "alone", spend)]
        else:
            top = visible_text(pair.top_answer)[:_MAX_CHARS]
            ahead = _TWO.format(question=question, one=cheap, other=top)
            behind = _TWO.format(question=question, one=top, other=cheap)
            first, second = await asyncio.gather(
                self._points(pair, ahead, "ahead", spend), self._points(pair, behind, "behind", spend)
            )
            found = [first, None if second is None else 1.0 - second]
        if any(points is None for points in found):
            return None
        points = [each for each in found if each is not None]
        return Grade(sum(points) / len(points), {"order_gap": max(points) - min(points)})

    async def _points(self, pair: AnswerPair, text: str, name: str, spend: Spend) -> float | None:
        request = GenerateRequest(
            f"{pair.request.request_id}-judge-{name}",
            messages=(Message("user", text),),
            sampling=SamplingParams(temperature=0.0, max_tokens=1, logprobs=_NUM_ALTERNATIVES),
            priority=Priority.BACKGROUND,
            thinking=False,
            extra=pair.request.extra,
            on_abandoned=lambda ending: spend(priced_ending(pair.top.tier, ending)),
        )
        logprobs: list[TokenLogprob] = []
        try:
            async for event in pair.top.backend.generate(request):
                if isinstance(event, TokenDelta):
                    logprobs += event.logprobs
                elif isinstance(event, Finished):
                    spend(priced_ending(pair.top.tier, event))
        except (UnsupportedByBackend, ContextLengthExceeded, RequestRejected):
            return None
        return None if not logprobs else expected_points(logprobs[0].top or ())


def expected_points(alternatives: Iterable[tuple[str, int, float]]) -> float | None:
    """Mean points over the digits among a token's (text, id, log-probability) alternatives; None without a digit."""
    weights = [
        (_POINTS[text.strip()], math.exp(logprob)) for text, _, logprob in alternatives if text.strip() in _POINTS
    ]
    total = sum(weight for _, weight in weights)
    return sum(points * weight for points, weight in weights) / total if total > 0.0 else None
