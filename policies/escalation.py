"""Decides when a tier's own answer is faulty or of low confidence, and who is asked then.

What it does
    An answer is held until its tier's own confidence in it is known, and whether its calls of tools are sound. Where
    the confidence is below what the policy asks for, or a fault is certain, a higher tier answers in its place, with
    the doubted answer as its prediction.

Why
    A router sees the prompt alone. The tier has seen its own answer, and its token probabilities say more about that
    answer than the prompt does; that a call does not parse is known without asking anyone. Asking before anything is
    sent costs nothing that has to be taken back.

Known problems
    Held answers come later: the first token of a stream waits for ``hold_back_tokens``, or for the end; with
    ``hold_calls`` for the first word of text, or for the last call. A tier that is sure and wrong is not noticed.
    P(right) of the higher tier comes from the router, which does not know that the lower one was unsure, and so is a
    little too high.

Example
    ``[policy.escalation] mode = "next"`` with ``least_confidence = { simple = 0.8 }``.

Options
    See :class:`Escalation`.

The flow is a generator that yields attempts and is sent verdicts, as :func:`policies.fallback.fallback_flow` is.

References
----------
Chen, Zaharia, Zou 2023, "FrugalGPT", section 3, for cascades by a score of the answer. Jitkrittum et al. 2023, "When
Does Confidence-Based Cascade Deferral Suffice?", section 4, for where a tier's own confidence misleads.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from policies.errors import InvalidPolicy


class EscalationMode(StrEnum):
    """Says who answers in place of a tier of low confidence.

    ``off``: nobody; answers are not held. ``next``: the next higher tier. ``top``: the highest permitted tier.
    """

    OFF = "off"
    NEXT = "next"
    TOP = "top"


@dataclass(frozen=True, slots=True)
class Escalation:
    """States whether faulty and low-confidence answers go up within the request.

    Parameters
    ----------
    mode : `off`, `next` (the next higher tier answers) or `top` (the highest permitted one does)
    least_confidence : tier number -> least confidence at which its answer is sent, 0..1; a tier without one is judged
        by what going up would gain: in mode `benefit` by the value of quality against the price, in mode `floor` by
        the quality floor
    max_escalations : how often one request may go up
    hold_back_tokens : tokens of a stream that are held before its tier is judged by them; 0 leaves streams alone
    low_confidence : whether an answer that its own tier doubts goes up
    faults : whether an answer goes up whose calls of tools do not parse, name no tool, break its schema or are missing,
        or whose text is not of the form asked for
    hold_calls : whether a stream of a request with tools is held until its text begins or its calls are complete

    Raises
    ------
    InvalidPolicy
        A field outside its range; names it.
    """

    mode: EscalationMode = EscalationMode.OFF
    least_confidence: Mapping[int, float] = field(default_factory=dict)
    max_escalations: int = 1
    hold_back_tokens: int = 0
    low_confidence: bool = True
    faults: bool = True
    hold_calls: bool = False

    def __post_init__(self) -> None:
        for tier, least in self.least_confidence.items():
            if not (math.isfinite(least) and 0.0 <= least <= 1.0):
                raise InvalidPolicy(f"least_confidence.{tier}", least, "a probability from 0 to 1")
        if not 1 <= self.max_escalations <= 100:
            raise InvalidPolicy("max_escalations", self.max_escalations, "a count from 1 to 100")
        if not 0 <= self.hold_back_tokens <= 100_000:
            raise InvalidPolicy("hold_back_tokens", self.hold_back_tokens, "a count from 0 to 100000")


@dataclass(frozen=True, slots=True)
class Rung:
    """One step up: below ``least_confidence``, ``target`` answers in place of ``tier``."""

    tier: int
    target: int
    least_confidence: float


class EscalationVerdict(StrEnum):
    """Says how one held attempt ended. ``failed`` is for attempts after the first: the held answer is still there."""

    TRUSTED = "trusted"
    DOUBTED = "doubted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class EscalationAttempt:
    """One tier to be asked, the ``number``-th; with no ``rung`` its answer is sent whatever its confidence."""

    tier: int
    number: int
    rung: Rung | None


def targets(tiers: Sequence[int], mode: EscalationMode) -> dict[int, int]:
    """Return who answers in each tier's place, among ``tiers`` (rising); the highest has nobody."""
    if mode is EscalationMode.OFF:
        return {}
    return {
        tier: tiers[place + 1] if mode is EscalationMode.NEXT else tiers[-1] for place, tier in enumerate(tiers[:-1])
    }


def escalation_flow(
    first: int, way: Sequence[Rung], max_escalations: int
) -> Generator[EscalationAttempt, EscalationVerdict, None]:
    """Yield attempts until one is trusted or nobody is left to ask.

    Parameters
    ----------
    first : the tier that answers first
    way : a rung for every tier whose answer may be of low confidence
    """
    by_tier = {rung.tier: rung for rung in way}
    tier = first
    for number in range(max_escalations + 1):
        rung = by_tier.get(tier) if number < max_escalations else None
        verdict = yield EscalationAttempt(tier, number, rung)
        if verdict is EscalationVerdict.TRUSTED or rung is None:
            return
        tier = rung.target
