"""Draws the answers that are to be checked, and makes the job that is committed with the answer's own row."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import timedelta

from backends.protocol import FinishReason, ToolCall
from classifier.types import Sufficiency
from gateway.api.request import InferenceRequest, is_text, media_in
from gateway.config.sections import Retention
from gateway.ids import uuid7
from gateway.outcomes.answer_validator import Fault
from gateway.store.records import RequestRecord, VerificationJob
from gateway.verify.request_codec import pack_answer, pack_prompt, pack_sampling
from policies.ladder import Ladder, is_in_regions
from policies.policy import Policy
from policies.pricing import price_usd
from policies.sampling import (
    FAULTY,
    DrawnCheck,
    InclusionProbabilities,
    SampledAnswer,
    draw_check,
    inclusion_probabilities,
)
from policies.types import EVERYTHING, Overrides, ReasonCode, RoutingDecision, Tier

_WHOLE = frozenset({FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS})
# Of a prompt and of an answer, for prices that only say which tier is how much dearer.
_TYPICAL_TOKENS = 256
_NONE_BARRED: frozenset[int] = frozenset()
# Decisions that went up because a tier was quarantined, or the prompt was novel to the router.
_DOUBTED = frozenset({ReasonCode.QUARANTINED, ReasonCode.NOVEL})


class CheckSampler:
    """Draws checks by the active policy.

    Parameters
    ----------
    ladder : the active tiers
    retention : with ``none`` nothing of a prompt may be kept, so nothing is drawn
    rng : the dice
    enabled : whether anything is drawn at all

    Attributes
    ----------
    throttle : 0..1, lowers every chance alike while checks are behind; set by whoever sees the queue
    """

    def __init__(self, ladder: Ladder, retention: Retention, rng: random.Random, *, enabled: bool = True) -> None:
        self._ladder = ladder
        self._prices = {tier.index: float(price_usd(tier, _TYPICAL_TOKENS, _TYPICAL_TOKENS)) for tier in ladder}
        self._is_on = enabled and retention != "none" and len(ladder) > 1
        self._keeps_media = retention == "full"
        self._rng = rng
        self.throttle = 1.0

    def inclusion_probabilities(
        self,
        request: InferenceRequest,
        policy: Policy,
        decision: RoutingDecision,
        tier: Tier,
        estimate: Sufficiency | None,
        reason: FinishReason,
        *,
        factor: float = 1.0,
        downward_share: float = 0.0,
        unable: frozenset[int] = _NONE_BARRED,
    ) -> InclusionProbabilities | None:
        """Return how likely an answer is to be drawn; None where it cannot be checked or says nothing of the routing.

        ``tier`` is the one that answered, ``reason`` how the answer ended. ``factor`` multiplies the upward
        probability; ``downward_share`` is the share of top-tier answers that are also sent below (downward sampling).
        ``unable`` are the tiers that cannot take the request.

        Checked are whole single answers, with their calls of tools. An answer of a tier that the request itself named
        is left out: its quality was the caller's choice. So is a prompt with media where texts are not kept.
        """
        if not self._is_on or reason not in _WHOLE or request.num_choices != 1:
            return None
        others = request.other_parts
        if others and not self._keeps_media and media_in(others):
            return None
        why = decision.reason
        if why is ReasonCode.PINNED or request.echo or not is_text(request.prompts[0]):
            return None
        prices = self._prices
        if policy.allowed_tiers or policy.allowed_regions:
            prices = {each.index: prices[each.index] for each in self._ladder if policy.permits(each)}
        answered = SampledAnswer(
            tier.index,
            _confidence(estimate, tier.index),
            is_explored=decision.explored,
            downward_share=1.0 if why in _DOUBTED else downward_share if tier.index == max(prices, default=0) else 0.0,
        )
        return inclusion_probabilities(
            policy.sampling,
            policy.sampling_share,
            answered,
            prices,
            factor=factor,
            throttle=self.throttle,
            barred=self._barred(request.preferences.overrides) | unable,
        )

    def draw_check(self, chosen: InclusionProbabilities | None) -> DrawnCheck | None:
        """Throw the dice for one answer."""
        return None if chosen is None else draw_check(chosen, self._rng)

    def job(
        self,
        request: InferenceRequest,
        policy: Policy,
        answer: tuple[str, Sequence[ToolCall]],
        record: RequestRecord,
        drawn: DrawnCheck,
        fault: Fault | None = None,
    ) -> VerificationJob:
        """Return the work to be done for a drawn answer (its text and calls); none is left where its fault is known."""
        assert record.final_tier is not None, "only answers are drawn"
        is_known = fault is not None and drawn.stratum == FAULTY
        return VerificationJob(
            verification_id=uuid7(),
            request_id=record.request_id,
            created_at=record.created_at,
            direction=drawn.direction,
            tier=record.final_tier,
            against_tier=drawn.against_tier,
            inclusion_probability=drawn.probability,
            stratum=drawn.stratum,
            prompt="" if is_known else pack_prompt(request),
            answer="" if is_known else pack_answer(*answer),
            sampling={} if is_known else pack_sampling(request.sampling, request.thinking),
            tenant=record.tenant,
            domain=record.domain,
            policy_name=record.policy_name,
            policy_version=record.policy_version,
            router_version=record.router_version,
            regions=permitted_regions(policy, request),
            known_fault=str(fault) if is_known else "",
            turn_id=record.turn_id,
            ended_at=record.created_at + timedelta(seconds=record.total_s),
        )

    def _barred(self, overrides: Overrides) -> frozenset[int]:
        """Return the tiers that the request's regions or its key keep its prompt from."""
        regions, permissions = overrides.regions, overrides.permissions
        if not regions and permissions is EVERYTHING:
            return _NONE_BARRED
        return frozenset(
            [each.index for each in self._ladder if not (is_in_regions(each, regions) and permissions.permits(each))]
        )


def permitted_regions(policy: Policy, request: InferenceRequest) -> tuple[str, ...] | None:
    """Return where the prompt may go, by policy, request and key; None for anywhere."""
    overrides = request.preferences.overrides
    limits = [
        each for each in (overrides.regions, overrides.permissions.allowed_regions, policy.allowed_regions) if each
    ]
    return tuple([each for each in limits[0] if all(each in limit for limit in limits)]) if limits else None


def _confidence(estimate: Sufficiency | None, tier: int) -> float | None:
    """P(as good as the top tier) of the tier that answered, which after a fallback is not the one decided for."""
    if estimate is None:
        return None
    return next((each.p_as_good for each in estimate.tiers if each.tier == tier), None)
