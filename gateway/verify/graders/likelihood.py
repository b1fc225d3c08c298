"""Grades by likelihood: the cheap answer's under the top tier, against that under the tier that wrote it.

One pass that reads, in place of a generation that writes. Likelihood alone favours short and plain texts, so it is
contrasted with the cheap tier's own: text that both find hard is hard, text that only the better model finds unlikely
is suspect.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from backends.errors import ContextLengthExceeded, RequestRejected, UnsupportedByBackend
from backends.protocol import ScoreResult
from gateway.outcomes.answer_grading import visible_text
from gateway.verify.answer_pair import AnswerPair, Grade, Spend, TierParty
from gateway.verify.check_costs import priced

# A token that is impossible to a model says no more than one that is very unlikely.
_LEAST_LOGPROB = -20.0


class LikelihoodGrader:
    """Mean log-probability under the top tier less that under the cheap tier, in nats a token; about 0 is good."""

    name = "likelihood"
    needs_top_answer = False
    reads_calls = False

    async def grade(self, pair: AnswerPair, spend: Spend) -> Grade | None:
        answer = visible_text(pair.cheap_answer)
        if not answer:
            return None
        top = await self._score(pair, pair.top, answer, spend)
        if top is None or not top.logprobs:
            return None
        cheap = await self._score(pair, pair.cheap, answer, spend)
        return contrast(top.logprobs, top.ranks, None if cheap is None else cheap.logprobs)

    async def _score(self, pair: AnswerPair, party: TierParty, answer: str, spend: Spend) -> ScoreResult | None:
        if "score" not in party.backend.capabilities:
            return None
        # What is read is the answer as it was shown, after a prompt without thinking.
        prompt = dataclasses.replace(pair.request, thinking=False) if pair.request.messages else pair.request
        try:
            result = await party.backend.score(prompt, answer)
        except (UnsupportedByBackend, ContextLengthExceeded, RequestRejected):
            return None
        spend(priced(party.tier, result.usage, result.compute_s))
        return result


def contrast(top: Sequence[float], ranks: Sequence[int], cheap: Sequence[float] | None) -> Grade:
    """Return the grade of one answer from its tokens' log-probabilities.

    Parameters
    ----------
    top, ranks : of every token under the top tier, rank 0 the likeliest
    cheap : under the tier that wrote it; None where it cannot say

    Returns
    -------
    ``score``: the contrast (without ``cheap`` the plain mean); ``top_mean``, ``top_least``: mean and least
    log-probability under the top tier; ``agreed``: share of tokens the top tier would have chosen itself;
    ``log_num_tokens``
    """
    top_logprobs = [max(each, _LEAST_LOGPROB) for each in top]
    top_mean = sum(top_logprobs) / len(top_logprobs)
    details = {
        "top_mean": top_mean,
        "top_least": min(top_logprobs),
        "agreed": sum(rank == 0 for rank in ranks) / len(ranks),
        "log_num_tokens": math.log(len(top_logprobs)),
    }
    if not cheap:
        return Grade(top_mean, details)
    cheap_logprobs = [max(each, _LEAST_LOGPROB) for each in cheap]
    cheap_mean = sum(cheap_logprobs) / len(cheap_logprobs)
    return Grade(top_mean - cheap_mean, details | {"cheap_mean": cheap_mean, "cheap_least": min(cheap_logprobs)})
