"""One request between its admission and its row: everything that becomes known on the way, bound as it does."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal

from backends.protocol import Finished, FinishReason, Usage
from classifier.types import Sufficiency
from gateway.answer import Answer, sum_usage
from gateway.api_request import ApiRequest
from gateway.auth import Caller
from gateway.store.records import Attempt
from policies.policy import Policy
from policies.pricing import measured_cost_usd, price_usd
from policies.types import ReasonCode, RoutingDecision, Tier

Clock = Callable[[], float]


@dataclass(slots=True)
class Exchange:
    """Times are of ``clock``, in seconds; ``created_at`` is the wall clock's.

    ``asked_tier`` is the one being tried. ``tier`` is set with the first event of an answer: from then on no other tier
    can take over. ``settled`` is set when the one ending was taken: whoever comes second has nothing left to do.
    """

    request_id: str
    endpoint: str
    request: ApiRequest
    caller: Caller
    traceparent: str | None
    accepted_s: float
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    clock: Clock = time.perf_counter
    waited_s: float = 0.0
    asked_s: float | None = None
    policy: Policy | None = None
    router_version: str = ""
    sufficiency: Sufficiency | None = None
    decision: RoutingDecision | None = None
    attempts: list[Attempt] = field(default_factory=list)
    asked_tier: Tier | None = None
    tier: Tier | None = None
    answers: list[Answer] = field(default_factory=list)
    abandoned: dict[int, Finished] = field(default_factory=dict)
    first_token_s: float | None = None
    last_token_s: float | None = None
    settled: bool = False

    def note_abandoned(self, index: int) -> Callable[[Finished], None]:
        """A listener for what a cut-off generation used."""

        def note(finished: Finished) -> None:
            self.abandoned[index] = finished

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

    def endings(self) -> list[Finished]:
        """What each generation that was begun says it used, in the order of the choices."""
        return [self.ending(answer) for answer in self.answers] if self.tier is not None else []

    def ending(self, answer: Answer) -> Finished:
        """How one choice ended, or what is known of it if it was cut off."""
        if answer.finished is not None:
            return answer.finished
        if (abandoned := self.abandoned.get(answer.index)) is not None:
            return abandoned
        # The backend cannot tell: what was seen is the least it can have been.
        return Finished(FinishReason.CANCELLED, Usage(completion_tokens=answer.num_tokens))

    def usage(self) -> Usage:
        """Sums over all choices, as billed."""
        return sum_usage(ending.usage for ending in self.endings())

    def shown_usage(self) -> Usage:
        """Sums as OpenAI shows them: a prompt counts once, however many answers it got."""
        endings = self.endings()
        once = endings[:: self.request.n]
        total = sum_usage(ending.usage for ending in endings)
        return Usage(
            prompt_tokens=sum(ending.usage.prompt_tokens for ending in once),
            completion_tokens=total.completion_tokens,
            cached_tokens=sum(ending.usage.cached_tokens for ending in once),
            reasoning_tokens=total.reasoning_tokens,
            draft_tokens=total.draft_tokens,
            accepted_draft_tokens=total.accepted_draft_tokens,
        )

    def cost_usd(self) -> Decimal:
        """Price by the table of the tier that answered; what no tier began costs nothing."""
        if self.tier is None:
            return Decimal(0)
        tier, total = self.tier, Decimal(0)
        for ending in self.endings():
            total += price_usd(tier, ending.usage.prompt_tokens, ending.usage.completion_tokens)
        return total

    def compute_s(self) -> float | None:
        """Device seconds; None when a part of them is not known."""
        endings = self.endings()
        if not endings or not all(ending.compute_measured for ending in endings):
            return None
        return sum(ending.compute_s for ending in endings)

    def measured_cost_usd(self) -> Decimal | None:
        compute_s = self.compute_s()
        if self.tier is None or compute_s is None:
            return None
        return measured_cost_usd(self.tier, compute_s)
