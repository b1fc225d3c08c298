"""Holds a tier's answer until its own confidence is known and its form is checked; lets a higher tier answer in its
place if the one is low or the other wrong.

What is held has not been sent, so nothing is ever taken back: an answer that is not streamed is held whole, a stream
for as many tokens as the policy says, or until its calls of tools are complete. Once a stream is let go it belongs to
its tier, unless it breaks off (:mod:`gateway.answering.resumption`). An answer of low confidence is the prediction of
the tier that takes its place, and stays at hand until that tier has answered (or, in a stream that is not held again,
begun to): if it fails, the earlier answer is sent after all.

Who is asked next is :func:`policies.escalation.escalation_flow`'s to say; this pumps it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from msgspec.structs import replace

from backends.errors import BackendError
from backends.protocol import Finished, FinishReason
from classifier.confidence import AnswerSignals
from gateway.answering.phases import Answer
from gateway.answering.tier_caller import Item, StartedAnswer, call_tier, next_item, start_answer
from gateway.api.answer_encoder import AnswerChoice
from gateway.errors import AnswerFailed
from gateway.models.catalog import Catalog
from gateway.outcomes.answer_validator import AnswerRules
from policies.escalation import EscalationAttempt, EscalationVerdict, escalation_flow
from policies.pricing import to_nano_usd
from policies.types import Tier

_log = logging.getLogger("suffice.escalation")

DOUBTED = "doubted"
"""The code of an attempt whose answer another's took the place of, for its tier's lack of confidence."""

FAULTY = "faulty"
"""The same, for calls or a form that were wrong for certain."""

# What a caller's own limit or a filter cut off is not judged by its form.
_BY_ITSELF = frozenset({FinishReason.STOP, FinishReason.TOOL_CALLS})


async def start_confident_answer(answer: Answer, catalog: Catalog) -> StartedAnswer:
    """Start an answer under the policy's escalation; what comes back is to be sent as it is.

    Raises
    ------
    BackendError
        Every tier tried failed before its first token.
    AnswerFailed
        An answer broke off while it was held, and no other was at hand.
    """
    escalation, request = answer.routed.basis.policy.escalation, answer.request
    rules = AnswerRules.of(request, request.num_choices) if escalation.faults else None
    holds_calls = bool(rules is not None and escalation.hold_calls and request.tools)
    hold_back = escalation.hold_back_tokens if request.stream else None
    if (hold_back == 0 and not holds_calls) or (rules is None and not escalation.low_confidence):
        return await start_answer(answer, catalog)
    return await _Escalation(answer, catalog, hold_back, rules, holds_calls=holds_calls).run()


@dataclass(slots=True)
class _HeldAnswer:
    """An answer at hand, with what was known of it; its tier goes on writing it until it is closed or sent."""

    tier: Tier
    choices: list[AnswerChoice]
    abandoned: dict[int, Finished]
    times_s: tuple[float | None, float | None]
    attempt_index: int  # among the answer's attempts
    items: Sequence[Item]
    rest: AsyncGenerator[Item, None]
    error: str = DOUBTED  # its attempt's code, should another take its place


class _Escalation:
    """One request on its way up.

    Parameters
    ----------
    hold_back : how many tokens are held at most; None holds the whole answer
    rules : what the form of an answer must be; None where it is not looked at
    holds_calls : a stream is held while neither its text has begun nor its calls are complete
    """

    def __init__(
        self, answer: Answer, catalog: Catalog, hold_back: int | None, rules: AnswerRules | None, *, holds_calls: bool
    ) -> None:
        self._answer = answer
        self._catalog = catalog
        self._hold_back = hold_back
        self._rules = rules
        self._holds_calls = holds_calls
        # Of a stream that is held for its calls alone, nothing is known yet.
        self._reads_confidence = answer.routed.basis.policy.escalation.low_confidence and hold_back != 0
        self._doubted: _HeldAnswer | None = None

    async def run(self) -> StartedAnswer:
        answer = self._answer
        answer.is_scored = self._reads_confidence
        try:
            started = await start_answer(answer, self._catalog)
            most = answer.routed.basis.policy.escalation.max_escalations
            flow = escalation_flow(started.tier.index, answer.routed.decision.escalation_path, most)
            return await self._pump(flow, next(flow), started)
        except BaseException:
            # Cancelled, or nothing to show: what is still at hand is freed and billed.
            if self._doubted is not None:
                await self._replace_doubted()
            raise

    async def _pump(
        self,
        flow: Generator[EscalationAttempt, EscalationVerdict, None],
        attempt: EscalationAttempt,
        started: StartedAnswer,
    ) -> StartedAnswer:
        held: _HeldAnswer | None = await self._hold(started, attempt)
        try:
            while True:
                verdict = self._judge(held, attempt) if held is not None else EscalationVerdict.FAILED
                if held is not None:
                    await self._replace_doubted()
                try:
                    attempt = flow.send(verdict)
                except StopIteration:
                    return self._release(held)
                if held is not None:
                    self._doubted = held
                held = await self._step_up(attempt)
        except BaseException:
            # Cancelled while the one before it was being closed: nobody else knows of this one.
            if held is not None and held is not self._doubted:
                await held.rest.aclose()
            raise

    async def _step_up(self, attempt: EscalationAttempt) -> _HeldAnswer | None:
        """Ask the next tier, with the doubted answer as its prediction; None if it fails before anything was sent."""
        answer, doubted = self._answer, self._doubted
        assert doubted is not None, "nobody goes up without a doubt"
        answer.predictions = tuple(_prediction(answer, choice) for choice in doubted.choices)
        answer.tier = answer.first_token_s = answer.last_token_s = None
        answer.is_scored = attempt.rung is not None and self._reads_confidence
        target = self._catalog.ladder[attempt.tier - 1]
        try:
            return await self._hold(await call_tier(answer, self._catalog, target), attempt)
        except (BackendError, AnswerFailed) as error:
            request_id = answer.routed.admitted.request_id
            _log.warning("request %s: tier %d failed on a doubted answer: %s", request_id, target.index, error)
            if isinstance(error, AnswerFailed):
                answer.earlier_bills.append(answer.bill_at(target))
            return None

    async def _hold(self, started: StartedAnswer, attempt: EscalationAttempt) -> _HeldAnswer:
        """Take in as much of an answer as it is to be judged by, or as nothing else than holding it would save."""
        answer, tier = self._answer, started.tier
        items = [] if started.first is None else [started.first]
        is_judged = attempt.rung is not None and (self._rules is not None or self._knows_confidence(tier))
        if is_judged or not answer.request.stream:
            try:
                while not self._is_enough() and (item := await next_item(started.rest)) is not None:
                    items.append(item)
            except BaseException:
                await started.rest.aclose()
                raise
        times_s = (answer.first_token_s, answer.last_token_s)
        last = len(answer.attempts) - 1
        return _HeldAnswer(tier, answer.choices, answer.abandoned, times_s, last, items, started.rest)

    def _is_enough(self) -> bool:
        return all(choice.finished is not None or self._is_past(choice) for choice in self._answer.choices)

    def _is_past(self, choice: AnswerChoice) -> bool:
        """Return whether a stream's choice has said as much as is held of it."""
        if self._hold_back is None or (self._holds_calls and not choice.texts):
            return False
        return (choice.num_tokens if choice.scored is None else len(choice.scored)) >= self._hold_back

    def _knows_confidence(self, tier: Tier) -> bool:
        return self._reads_confidence and "logprobs" in self._catalog.backend(tier).capabilities

    def _is_faulty(self, held: _HeldAnswer) -> bool:
        rules = self._rules
        if rules is None:
            return False
        whole = [each for each in held.choices if each.finished is not None and each.finish_reason in _BY_ITSELF]
        return any(rules.fault(each.text, each.tool_calls) is not None for each in whole)

    def _judge(self, held: _HeldAnswer, attempt: EscalationAttempt) -> EscalationVerdict:
        """Judge by the worst of the choices; a tier without log-probabilities is believed, where the form is right."""
        if attempt.rung is None:
            return EscalationVerdict.TRUSTED
        if self._is_faulty(held):
            held.error = FAULTY
            return EscalationVerdict.DOUBTED
        if not self._knows_confidence(held.tier):
            return EscalationVerdict.TRUSTED
        calibration, attempts = self._answer.routed.confidence, self._answer.attempts
        confidence = min(
            calibration.p_right(held.tier.index, AnswerSignals.of(choice.scored or ())) for choice in held.choices
        )
        attempts[held.attempt_index] = replace(attempts[held.attempt_index], confidence=confidence)
        return EscalationVerdict.DOUBTED if confidence < attempt.rung.least_confidence else EscalationVerdict.TRUSTED

    async def _replace_doubted(self) -> None:
        """End the doubted answer, in whose place another stands, and put it on the bill."""
        doubted, self._doubted = self._doubted, None
        if doubted is None:
            return
        try:
            await doubted.rest.aclose()
        finally:
            self._bill_doubted(doubted)

    def _bill_doubted(self, doubted: _HeldAnswer) -> None:
        answer = self._answer
        present = answer.choices, answer.abandoned
        answer.choices, answer.abandoned = doubted.choices, doubted.abandoned
        bill = answer.bill_at(doubted.tier)
        answer.choices, answer.abandoned = present
        answer.earlier_bills.append(bill)
        answer.is_escalated = True
        answer.attempts[doubted.attempt_index] = replace(
            answer.attempts[doubted.attempt_index], error=doubted.error, cost_nano_usd=to_nano_usd(bill.cost_usd)
        )

    def _release(self, held: _HeldAnswer | None) -> StartedAnswer:
        """Return the answer that is sent: the one just judged, or the doubted one where nobody could do better."""
        held = held or self._doubted
        assert held is not None, "without an answer there was an error"
        answer = self._answer
        answer.tier = answer.asked_tier = held.tier
        answer.choices, answer.abandoned = held.choices, held.abandoned
        answer.first_token_s, answer.last_token_s = held.times_s
        if answer.request.stream:
            # What was held is sent now; that is when its reader has the first token.
            answer.first_token_s = answer.last_token_s = answer.routed.admitted.clock()
        self._doubted = None
        return StartedAnswer(held.tier, None, _replay(held.items, held.rest))


def _prediction(answer: Answer, choice: AnswerChoice) -> str:
    """Return what a doubted choice said, without the prompt it was asked to repeat."""
    text = choice.text
    if not answer.request.echo:
        return text
    prompt = answer.request.prompts[choice.index // answer.request.n]
    return text.removeprefix(prompt) if isinstance(prompt, str) else ""


async def _replay(items: Sequence[Item], rest: AsyncGenerator[Item, None]) -> AsyncGenerator[Item, None]:
    """Yield what was held, then what is still to come."""
    async with aclosing(rest):
        for item in items:
            yield item
        async for item in rest:
            yield item
