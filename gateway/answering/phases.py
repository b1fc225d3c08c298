"""The phases of one request: admitted, routed, answered. What a phase knows is there; nothing is "not yet known".

::

    AdmittedRequest ─► RoutedRequest ─► Answer ─► row
    who asks for what   which tier, why   what tiers gave, when, at what cost
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from decimal import Decimal

from backends.protocol import Finished, FinishReason, Message, Usage
from classifier.confidence import AnswerConfidence
from classifier.types import Sufficiency
from gateway.access.authenticator import Caller
from gateway.access.rate_limiter import Reservation
from gateway.access.spending_lease import SpendingHold
from gateway.api.answer_encoder import AnswerChoice
from gateway.api.conversation import Conversation
from gateway.api.request import InferenceRequest
from gateway.store.records import Attempt
from policies.policy import Policy
from policies.pricing import measured_cost_usd, price_usd
from policies.types import ReasonCode, RequestFacts, RoutingDecision, Tier

_NANO_USD = Decimal("0.000000001")


@dataclass(slots=True)
class Bill:
    """Sums over the choices of a request.

    Attributes
    ----------
    usage : as billed, every choice's prompt counted
    shown_usage : as OpenAI shows it, a prompt counted once however many answers it got
    cost_usd : by the price table; 0 where no tier began
    compute_s : device seconds; None when a part of them is not known
    measured_cost_usd : by the device seconds
    queue_s : longest wait inside the engine
    """

    usage: Usage = field(default_factory=Usage)
    shown_usage: Usage = field(default_factory=Usage)
    cost_usd: Decimal = Decimal(0)
    compute_s: float | None = None
    measured_cost_usd: Decimal | None = None
    queue_s: float = 0.0


def make_single_bill(tier: Tier, ending: Finished) -> Bill:
    """Return what a request's only choice used at the tier that answered it."""
    usage = ending.usage
    compute_s = ending.compute_s if ending.compute_measured else None
    return Bill(
        usage,
        usage,
        _whole_nano(price_usd(tier, usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)),
        compute_s,
        None if compute_s is None else _whole_nano(measured_cost_usd(tier, compute_s)),
        ending.timings.queue_s,
    )


def make_bill(tier: Tier, endings: Sequence[Finished], answers_per_prompt: int) -> Bill:
    """Sum what the choices of a request used at the tier that answered it.

    Parameters
    ----------
    tier : with its prices
    endings : one per choice, those of the same prompt side by side
    answers_per_prompt : the request's ``n``
    """
    compute_s = sum(each.compute_s for each in endings) if all(each.compute_measured for each in endings) else None
    usages = [each.usage for each in endings]
    usage = _sum(usages)
    prices = [price_usd(tier, each.prompt_tokens, each.completion_tokens, each.cached_tokens) for each in usages]
    return Bill(
        usage=usage,
        shown_usage=_shown(usage, usages[::answers_per_prompt]),
        cost_usd=_whole_nano(sum(prices, Decimal(0))),
        compute_s=compute_s,
        measured_cost_usd=None if compute_s is None else _whole_nano(measured_cost_usd(tier, compute_s)),
        queue_s=max([each.timings.queue_s for each in endings]),
    )


def add_earlier(bill: Bill, earlier: Sequence[Bill]) -> Bill:
    """The same answer, with what was spent on answers that were not sent added to its costs.

    Token counts stay the sent answer's own: they are what its caller reads them for.
    """
    if not earlier:
        return bill
    every = [*earlier, bill]
    known = all(each.compute_s is not None for each in every)
    return replace(
        bill,
        cost_usd=_whole_nano(sum((each.cost_usd for each in every), Decimal(0))),
        compute_s=sum(each.compute_s or 0.0 for each in every) if known else None,
        measured_cost_usd=_whole_nano(sum((each.measured_cost_usd or Decimal(0) for each in every), Decimal(0)))
        if known
        else None,
        queue_s=sum(each.queue_s for each in every),
    )


def join_parts(parts: Sequence[Bill]) -> Bill:
    """Sum the parts of one answer, each billed as its tier counted it; its caller is shown the prompt once."""
    usage = _sum([each.usage for each in parts])
    return replace(add_earlier(parts[-1], parts[:-1]), usage=usage, shown_usage=_shown(usage, [parts[0].usage]))


def _whole_nano(amount_usd: Decimal) -> Decimal:
    """The amount as the log keeps it, so that what the caller is told and what is stored are the same number."""
    return amount_usd.quantize(_NANO_USD).normalize()


def _sum(usages: Sequence[Usage]) -> Usage:
    return Usage(
        prompt_tokens=sum(each.prompt_tokens for each in usages),
        completion_tokens=sum(each.completion_tokens for each in usages),
        cached_tokens=sum(each.cached_tokens for each in usages),
        reasoning_tokens=sum(each.reasoning_tokens for each in usages),
        draft_tokens=sum(each.draft_tokens for each in usages),
        accepted_draft_tokens=sum(each.accepted_draft_tokens for each in usages),
        accepted_prediction_tokens=sum(each.accepted_prediction_tokens for each in usages),
        rejected_prediction_tokens=sum(each.rejected_prediction_tokens for each in usages),
    )


def _shown(total: Usage, once: Sequence[Usage]) -> Usage:
    return replace(
        total,
        prompt_tokens=sum(each.prompt_tokens for each in once),
        cached_tokens=sum(each.cached_tokens for each in once),
    )


Clock = Callable[[], float]

UNCALIBRATED = AnswerConfidence()


@dataclass(slots=True, eq=False)
class RoutingBasis:
    """Holds what a decision rests on besides the state of the tiers; known even where no tier could be chosen.

    ``turns`` and ``tools`` are what the router read: see :class:`classifier.types.RouterRequest`.
    """

    policy: Policy
    router_version: str
    turns: tuple[tuple[str, str], ...]
    estimate: Sufficiency | None
    domain: str
    tools: tuple[float, ...] = ()


@dataclass(slots=True, eq=False)
class AdmittedRequest:
    """A request that was read and may be answered.

    Times are of ``clock``, in seconds; ``created_at`` is the wall clock's. ``waited_s`` is the wait for a place;
    ``reservation`` what is held of the budgets of its key and policy, where these have any; ``basis`` is kept for the
    row of a request that no tier could be chosen for. ``is_settled`` says that its one ending was taken: whoever comes
    second has nothing left to do.
    """

    request_id: str
    endpoint: str
    request: InferenceRequest
    caller: Caller
    traceparent: str | None
    accepted_s: float
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    clock: Clock = time.perf_counter
    waited_s: float = 0.0
    reservation: Reservation | None = None
    basis: RoutingBasis | None = None
    is_settled: bool = False
    conversation: Conversation = field(default_factory=Conversation)


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """A request with its decision, and what the decision rests on.

    ``confidence`` says what a tier's own log-probabilities are worth as a sign that its answer is right.
    """

    admitted: AdmittedRequest
    basis: RoutingBasis
    facts: RequestFacts
    decision: RoutingDecision
    confidence: AnswerConfidence = UNCALIBRATED


@dataclass(slots=True, eq=False)
class Answer:
    """Collects what tiers give for a routed request, as it comes.

    Attributes
    ----------
    attempts : every tier asked, in order
    asked_s, asked_tier : when the first one was asked; who was asked last
    tier : whose answer this is, from its first event on: no other can take over then, unless the answer is held
        (:mod:`gateway.answering.escalation`) or breaks off (:mod:`gateway.answering.resumption`)
    choices, abandoned : the choices so far, and how generations that were cut off ended
    is_scored : the next tier is asked for log-probabilities, to judge its answer by
    predictions : one a choice, what a tier of low confidence had answered
    earlier_bills : of answers that are not sent
    continued : what of the answer was written when its tier failed: whoever is asked now goes on behind it
    broken_bills : of the parts of the answer that were written by tiers that failed, in order
    is_escalated : the answer took the place of one of low confidence
    hold : covers its calls to priced remote models until its row is durable; None where no tier is one
    """

    routed: RoutedRequest
    request: InferenceRequest
    attempts: list[Attempt] = field(default_factory=list)
    asked_s: float | None = None
    asked_tier: Tier | None = None
    tier: Tier | None = None
    choices: list[AnswerChoice] = field(default_factory=list)
    abandoned: dict[int, Finished] = field(default_factory=dict)
    first_token_s: float | None = None
    last_token_s: float | None = None
    is_scored: bool = False
    predictions: tuple[str, ...] = ()
    earlier_bills: list[Bill] = field(default_factory=list)
    continued: Message | None = None
    broken_bills: list[Bill] = field(default_factory=list)
    is_escalated: bool = False
    settled_bill: Bill | None = None
    hold: SpendingHold | None = None

    def note_abandoned(self, index: int) -> Callable[[Finished], None]:
        """Make a listener for what a cut-off generation used; it belongs to the tier asked now."""
        abandoned = self.abandoned

        def note(finished: Finished) -> None:
            abandoned[index] = finished

        return note

    @property
    def is_unasked(self) -> bool:
        """Return whether no tier was asked, as the first call was not covered."""
        return not self.attempts and self.hold is not None and not self.hold.held_nano_usd

    @property
    def overhead_s(self) -> float:
        """The gateway's own time before a tier was asked; waiting for a place is not its own."""
        admitted = self.routed.admitted
        return max(0.0, (self.asked_s or admitted.clock()) - admitted.accepted_s - admitted.waited_s)

    @property
    def reason(self) -> str:
        """Why this tier answered, as ``x-suffice-reason`` says it."""
        decision = self.routed.decision
        if self.broken_bills:
            return ReasonCode.RESUMED.value
        if self.is_escalated:
            return str(ReasonCode.ESCALATED)
        fell_back = self.tier is not None and self.tier.index != decision.tier
        return str(ReasonCode.FALLBACK if fell_back else decision.reason)

    @property
    def itl_s(self) -> float | None:
        """Mean gap between tokens over all choices; None with fewer than two."""
        choices = self.choices
        num_gaps = (choices[0].num_tokens if len(choices) == 1 else sum([each.num_tokens for each in choices])) - 1
        if num_gaps < 1 or self.first_token_s is None or self.last_token_s is None:
            return None
        return (self.last_token_s - self.first_token_s) / num_gaps

    def bill(self) -> Bill:
        """Return what was used and what it costs; settled with the first call, which comes after the last event."""
        if self.settled_bill is None:
            own = Bill() if self.tier is None else self.bill_at(self.tier)
            if self.broken_bills:
                own = join_parts([*self.broken_bills, own])
            self.settled_bill = add_earlier(own, self.earlier_bills) if self.earlier_bills else own
        return self.settled_bill

    @property
    def num_left(self) -> int | None:
        """Return the tokens that are left of the request's limit; None without one."""
        most = self.request.sampling.max_tokens
        return None if most is None else max(0, most - self.num_written)

    @property
    def num_written(self) -> int:
        """Return the tokens of the one choice so far: as its servers counted them, where that is more than was seen."""
        choice = self.choices[0]
        counted = sum([bill.usage.completion_tokens for bill in self.broken_bills])
        if choice.finished is not None:
            counted += choice.finished.usage.completion_tokens
        return max(choice.num_tokens, counted)

    def bill_at(self, tier: Tier) -> Bill:
        """Return what the present choices used and cost at the tier that gives them."""
        choices = self.choices
        if len(choices) == 1:
            return make_single_bill(tier, choices[0].finished or self.ending(choices[0]))
        return make_bill(tier, [self.ending(choice) for choice in choices], self.request.n)

    def ending(self, choice: AnswerChoice) -> Finished:
        """Return how one choice ended, or what is known of it if it was cut off."""
        if choice.finished is not None:
            return choice.finished
        if (abandoned := self.abandoned.get(choice.index)) is not None:
            return abandoned
        # The backend cannot tell: what was seen is the least it can have been.
        return Finished(FinishReason.CANCELLED, Usage(completion_tokens=choice.num_tokens - choice.num_billed))
