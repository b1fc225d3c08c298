"""One request between its admission and its row: everything that becomes known on the way, bound as it does."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from backends.protocol import Finished, FinishReason, Usage
from classifier.confidence import AnswerConfidence
from classifier.types import Sufficiency
from gateway.access.authenticator import Caller
from gateway.access.rate_limiter import Grant
from gateway.answering.bill import Bill, add_earlier, make_bill
from gateway.api.choice import Answer
from gateway.api.request import InferenceRequest
from gateway.store.records import Attempt
from policies.policy import Policy
from policies.types import ReasonCode, RequestFacts, RoutingDecision, Tier

Clock = Callable[[], float]

UNCALIBRATED = AnswerConfidence()


@dataclass(slots=True)
class Exchange:
    """Times are of ``clock``, in seconds; ``created_at`` is the wall clock's.

    ``entered_s`` is set while a place is held; ``asked_tier`` is the one being tried. ``tier`` is set with the first
    event of an answer: from then on no other tier can take over, unless the answer is held.
    ``settled`` is set when the one ending was taken: whoever comes second has nothing left to do. ``grant`` is what is
    held for a request of a limited key.

    ``calibration`` says what a tier's own log-probabilities are worth. ``is_watched`` asks the next tier for them;
    ``predictions`` (one a choice) is what a doubted tier had answered; ``spent`` are the bills of answers that are not
    sent, and ``is_escalated`` says that the one that is took a doubted one's place.
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
    entered_s: float | None = None
    asked_s: float | None = None
    policy: Policy | None = None
    router_version: str = ""
    sufficiency: Sufficiency | None = None
    facts: RequestFacts | None = None
    decision: RoutingDecision | None = None
    attempts: list[Attempt] = field(default_factory=list)
    asked_tier: Tier | None = None
    tier: Tier | None = None
    answers: list[Answer] = field(default_factory=list)
    abandoned: dict[int, Finished] = field(default_factory=dict)
    first_token_s: float | None = None
    last_token_s: float | None = None
    settled: bool = False
    settled_bill: Bill | None = None
    calibration: AnswerConfidence = UNCALIBRATED
    is_watched: bool = False
    predictions: tuple[str, ...] = ()
    spent: list[Bill] = field(default_factory=list)
    is_escalated: bool = False
    grant: Grant | None = None

    def note_abandoned(self, index: int) -> Callable[[Finished], None]:
        """A listener for what a cut-off generation used; it belongs to the tier asked now, whoever is asked later."""
        abandoned = self.abandoned

        def note(finished: Finished) -> None:
            abandoned[index] = finished

        return note

    def note_tokens(self) -> None:
        """Tokens have come."""
        self.last_token_s = self.clock()
        if self.first_token_s is None:
            self.first_token_s = self.last_token_s

    @property
    def overhead_s(self) -> float:
        """The gateway's own time before a tier was asked; waiting for a place is not its own."""
        return max(0.0, (self.asked_s or self.clock()) - self.accepted_s - self.waited_s)

    @property
    def reason(self) -> str:
        """Why this tier answered, as ``x-suffice-reason`` says it."""
        if self.decision is None:
            return ""
        if self.is_escalated:
            return ReasonCode.ESCALATED.value
        fell_back = self.tier is not None and self.tier.index != self.decision.tier
        return (ReasonCode.FALLBACK if fell_back else self.decision.reason).value

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.accepted_s

    @property
    def itl_s(self) -> float | None:
        """Mean gap between tokens over all choices; None with fewer than two."""
        num_gaps = sum(answer.num_tokens for answer in self.answers) - 1
        if num_gaps < 1 or self.first_token_s is None or self.last_token_s is None:
            return None
        return (self.last_token_s - self.first_token_s) / num_gaps

    def bill(self) -> Bill:
        """What was used and what it costs; settled with the first call, which comes after the last event."""
        if self.settled_bill is None:
            own = Bill() if self.tier is None else self.answers_bill(self.tier)
            self.settled_bill = add_earlier(own, self.spent)
        return self.settled_bill

    def answers_bill(self, tier: Tier) -> Bill:
        """What the present answers used and cost at the tier that gives them."""
        return make_bill(tier, [self.ending(answer) for answer in self.answers], self.request.n)

    def ending(self, answer: Answer) -> Finished:
        """How one choice ended, or what is known of it if it was cut off."""
        if answer.finished is not None:
            return answer.finished
        if (abandoned := self.abandoned.get(answer.index)) is not None:
            return abandoned
        # The backend cannot tell: what was seen is the least it can have been.
        return Finished(FinishReason.CANCELLED, Usage(completion_tokens=answer.num_tokens))
