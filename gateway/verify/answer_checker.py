"""One check from its job to its result: who else is asked, which graders look, what they say together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Literal, cast

from backends.errors import BackendFailure
from backends.protocol import Finished, FinishReason, GenerateRequest, TokenDelta, ToolCallDelta, join_calls
from gateway.access.spending_lease import SpendingHold
from gateway.config.sections import GraderName
from gateway.models.catalog import Catalog
from gateway.outcomes.answer_validator import AnswerRules
from gateway.store.records import CALLS_MARK, VALIDATOR, VALIDATOR_VERSION, VerificationJob
from gateway.store.verifications import NOTHING, CheckResult, Spent
from gateway.verify.answer_pair import AnswerPair, Grade, Grader, Spend, TierParty
from gateway.verify.check_costs import priced_ending
from gateway.verify.covered_backend import CoveredBackend
from gateway.verify.errors import NothingToGoBy
from gateway.verify.grader_combination import GraderCombination, flat_scores
from gateway.verify.graders.embedding import EmbeddingGrader
from gateway.verify.graders.final_answer import FinalAnswerGrader
from gateway.verify.graders.judge import JudgeGrader
from gateway.verify.graders.likelihood import LikelihoodGrader
from gateway.verify.graders.overlap import OverlapGrader
from gateway.verify.graders.tool_calls import ToolCallGrader
from gateway.verify.request_codec import pack_answer, unpack_answer, unpack_request
from policies.errors import OutsideRegions
from policies.ladder import is_in_regions
from policies.types import Tier

CheckMethod = Literal["generate", "score"]
"""Whether the other tier writes an answer of its own, or only reads the cheap one."""


class SpendMeter:
    """Adds up what one check costs, also when it is cut off half-way."""

    def __init__(self) -> None:
        self.spent = NOTHING

    def __call__(self, spent: Spent) -> None:
        self.spent += spent


class AnswerChecker:
    """Checks answers; holds no job.

    Parameters
    ----------
    catalog : the tiers and the backends behind them
    graders : in the order in which they are asked
    combination : makes one probability of their scores
    """

    def __init__(self, catalog: Catalog, graders: Sequence[Grader], combination: GraderCombination) -> None:
        self._catalog = catalog
        self._graders = tuple(graders)
        self._combination = combination

    def can_only_read(self, job: VerificationJob) -> bool:
        """Whether a verdict is possible without a second answer: the top tier can score, and that is calibrated."""
        if job.direction == "down" or not self._is_on_ladder(job.against_tier):
            return False
        if job.answer.startswith(CALLS_MARK):
            return False  # what a model reads is text
        able = {each.name for each in self._graders if not each.needs_top_answer}
        if "score" not in self._party(job.against_tier).backend.capabilities:
            able.discard("likelihood")
        return self._combination.model_for(frozenset(able)) is not None

    async def check(
        self, job: VerificationJob, how: CheckMethod, spend: Spend, hold: SpendingHold | None = None
    ) -> CheckResult:
        """Find out whether the cheap answer was good enough.

        Parameters
        ----------
        job : with its texts
        how : ``score`` only where :meth:`can_only_read`
        spend : told the cost of every pass as soon as it is over
        hold : covers calls to priced remote models; None where there are none

        Raises
        ------
        BackendError
            A tier does not answer now, or cannot take the prompt.
        PolicyError
            The prompt must not be sent to where a tier is.
        NothingToGoBy
            No verdict is possible.
        ValueError
            The kept texts cannot be read.
        StoreUnavailable and its kinds
            What a call may cost could not be made durable, so it was not made.
        """
        pair, written = await self._pair(job, how, spend, hold)
        known = _known_by_form(pair, written)
        if known is not None:
            return known
        grades: dict[str, Grade] = {}
        for grader in self._graders:
            if grader.reads_calls is not pair.has_calls or (pair.top_answer is None and grader.needs_top_answer):
                continue
            grade = await grader.grade(pair, spend)
            if grade is not None:
                grades[grader.name] = grade
        found = self._combination.combine(grades)
        if found is None:
            raise NothingToGoBy(tuple(grades))
        p_good, name = found
        return CheckResult(
            p_good=p_good,
            grader=name,
            grader_version=self._combination.version,
            scores=flat_scores(grades),
            other_answer=written,
        )

    async def _pair(
        self, job: VerificationJob, how: CheckMethod, spend: Spend, hold: SpendingHold | None
    ) -> tuple[AnswerPair, str | None]:
        """Return the two answers side by side, and the one that was written for it, if any."""
        request = unpack_request(f"verify-{job.verification_id}", job.prompt, job.sampling)
        request = replace(request, extra={"cache_salt": self._catalog.cache_salt(job.tenant)})
        served, other = self._party(job.tier, hold), self._party(job.against_tier, hold)
        self._check_regions(job, (served.tier, other.tier))
        text, calls = unpack_answer(job.answer)
        if how == "score" and job.direction == "up":
            return AnswerPair(request, text, served, other, cheap_calls=calls), None
        written = await self._write(request, other, spend)
        other_text, other_calls = unpack_answer(written)
        if job.direction == "down":
            return AnswerPair(request, other_text, other, served, text, other_calls, calls), written
        return AnswerPair(request, text, served, other, other_text, calls, other_calls), written

    async def _write(self, request: GenerateRequest, party: TierParty, spend: Spend) -> str:
        """Return the other tier's packed answer to the same request, at background priority."""
        backend = party.backend
        thinking = request.thinking if "thinking" in backend.capabilities else None

        def bill(ending: Finished) -> None:
            spend(priced_ending(party.tier, ending))

        asked = replace(request, thinking=thinking, on_abandoned=bill)
        texts: list[str] = []
        calls: list[ToolCallDelta] = []
        async with aclosing(cast("Any", backend.generate(asked))) as events:
            async for event in events:
                if isinstance(event, TokenDelta):
                    texts.append(event.text)
                    calls += event.tool_calls
                    continue
                bill(event)
                if event.reason in (FinishReason.ERROR, FinishReason.CANCELLED):
                    raise BackendFailure(event.error or f"Model {party.tier.model!r} broke off.")
        return pack_answer("".join(texts), join_calls(calls))

    def _check_regions(self, job: VerificationJob, tiers: Sequence[Tier]) -> None:
        """Refuse to send a prompt beyond the regions it was drawn in, or those that its policy permits by now.

        Raises
        ------
        OutsideRegions
        """
        policy = self._catalog.policies.get(job.policy_name)
        for tier in tiers:
            is_within = job.regions is None or tier.region in job.regions
            if not is_within or (policy is not None and not is_in_regions(tier, policy.allowed_regions)):
                raise OutsideRegions(f"tier {tier.index} is in {tier.region or 'no region'}", fields=("policy",))

    def _is_on_ladder(self, number: int) -> bool:
        return 1 <= number <= len(self._catalog.ladder)

    def _party(self, number: int, hold: SpendingHold | None = None) -> TierParty:
        """Return a tier by its number, its priced calls covered.

        Raises
        ------
        ValueError
            The active ladder has no such tier.
        """
        if not self._is_on_ladder(number):
            raise ValueError(f"tier {number} is no longer on the ladder")
        tier = self._catalog.ladder[number - 1]
        backend = self._catalog.backend(tier)
        if hold is not None and hold.max_attempts(tier):
            backend = CoveredBackend(backend, tier, hold)
        return TierParty(tier, backend)


def _known_by_form(pair: AnswerPair, written: str | None) -> CheckResult | None:
    """Return the verdict where the form of an answer says it: of the two only one is of any use to its caller."""
    rules = AnswerRules.of(pair.request)
    if rules is None or pair.top_answer is None:
        return None
    cheap = rules.fault(pair.cheap_answer, pair.cheap_calls)
    top = rules.fault(pair.top_answer, pair.top_calls)
    if (cheap is None) == (top is None):
        return None
    good = float(cheap is None)
    return CheckResult(
        p_good=good,
        grader=VALIDATOR,
        grader_version=VALIDATOR_VERSION,
        scores={VALIDATOR: good, f"{VALIDATOR}.{cheap or top}": 1.0},
        other_answer=written,
    )


def make_graders(names: Sequence[GraderName]) -> tuple[Grader, ...]:
    """Return the graders that the settings name, and the one that compares calls of tools, which costs nothing."""
    return (ToolCallGrader(), *(_GRADERS[name]() for name in names))


_GRADERS: Mapping[GraderName, Callable[[], Grader]] = {
    "final_answer": FinalAnswerGrader,
    "overlap": OverlapGrader,
    "embedding": EmbeddingGrader,
    "likelihood": LikelihoodGrader,
    "judge": JudgeGrader,
}
