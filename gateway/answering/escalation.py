"""Holds a tier's answer until its own confidence is known, and lets a higher tier answer in its place where it doubts.

What is held has not been sent, so nothing is ever taken back: an answer that is not streamed is held whole, a stream
for as many tokens as the policy says. Once a stream is let go it belongs to its tier; no other can take over. A doubted
answer is the prediction of the tier that takes its place, and stays at hand until that tier has answered (or, in a
stream that is not held again, begun to): if it fails, the doubted answer is sent after all.

Who is asked next is :func:`policies.escalation.escalation_flow`'s to say; this pumps it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from backends.errors import BackendError
from backends.protocol import Finished
from classifier.confidence import AnswerSignals
from gateway.answering.exchange import Exchange
from gateway.answering.tier_calls import Begun, Item, ask, begin
from gateway.api.choice import Answer
from gateway.errors import AnswerFailed
from gateway.models.catalog import Catalog
from policies.escalation import Attempt, Verdict, escalation_flow
from policies.pricing import to_nano_usd
from policies.types import Tier

_log = logging.getLogger("suffice.escalation")

DOUBTED = "doubted"
"""The code of a try whose answer another's took the place of."""


async def begin_surely(exchange: Exchange, catalog: Catalog) -> Begun:
    """Begin an answer under the policy's escalation; what comes back is to be sent as it is.

    Raises
    ------
    BackendError
        Every tier tried failed before its first token.
    AnswerFailed
        An answer broke off while it was held, and no other was at hand.
    """
    assert exchange.decision is not None, "decide first"
    if not exchange.decision.way_up or _hold_back(exchange) == 0:
        return await begin(exchange, catalog)
    return await _Climb(exchange, catalog).run()


def _hold_back(exchange: Exchange) -> int | None:
    """Tokens to hold at most; None holds the whole answer."""
    assert exchange.policy is not None, "decide first"
    return exchange.policy.escalation.hold_back_tokens if exchange.request.stream else None


@dataclass(slots=True)
class _Held:
    """An answer at hand, with what the exchange knew of it; its tier goes on writing it until it is closed or sent."""

    tier: Tier
    answers: list[Answer]
    abandoned: dict[int, Finished]
    times_s: tuple[float | None, float | None]
    place: int  # of its try among the exchange's attempts
    items: Sequence[Item]
    rest: AsyncGenerator[Item, None]


class _Climb:
    """One request on its way up."""

    def __init__(self, exchange: Exchange, catalog: Catalog) -> None:
        self._exchange = exchange
        self._catalog = catalog
        self._hold_back = _hold_back(exchange)
        self._doubted: _Held | None = None

    async def run(self) -> Begun:
        exchange = self._exchange
        assert exchange.decision is not None
        assert exchange.policy is not None
        exchange.is_watched = True
        try:
            begun = await begin(exchange, self._catalog)
            assert exchange.tier is not None, "a tier that began is known"
            most = exchange.policy.escalation.max_escalations
            flow = escalation_flow(exchange.tier.index, exchange.decision.way_up, most)
            return await self._pump(flow, next(flow), begun)
        except BaseException:
            # Cancelled, or nothing to show: what is still at hand is freed and billed.
            if self._doubted is not None:
                await self._replace_doubted()
            raise

    async def _pump(self, flow: Generator[Attempt, Verdict, int], attempt: Attempt, begun: Begun) -> Begun:
        held: _Held | None = await self._hold(begun, attempt)
        while True:
            verdict = self._judge(held, attempt) if held is not None else Verdict.FAILED
            if held is not None:
                await self._replace_doubted()
            try:
                attempt = flow.send(verdict)
            except StopIteration:
                return self._release(held)
            if held is not None:
                self._doubted = held
            held = await self._step_up(attempt)

    async def _step_up(self, attempt: Attempt) -> _Held | None:
        """Ask the next tier, with the doubted answer as its prediction; None if it fails before anything was sent."""
        exchange, doubted = self._exchange, self._doubted
        assert doubted is not None, "nobody goes up without a doubt"
        exchange.predictions = tuple(_prediction(exchange, answer) for answer in doubted.answers)
        exchange.tier = exchange.first_token_s = exchange.last_token_s = None
        exchange.is_watched = attempt.rung is not None
        target = self._catalog.ladder[attempt.tier - 1]
        try:
            return await self._hold(await ask(exchange, self._catalog, target), attempt)
        except (BackendError, AnswerFailed) as error:
            _log.warning("request %s: tier %d failed on a doubted answer: %s", exchange.request_id, target.index, error)
            if isinstance(error, AnswerFailed):
                exchange.spent.append(exchange.answers_bill(target))
            return None

    async def _hold(self, begun: Begun, attempt: Attempt) -> _Held:
        """Take in as much of an answer as it is to be judged by, or as nothing else than holding it would save."""
        exchange = self._exchange
        tier, place = exchange.tier, len(exchange.attempts) - 1
        assert tier is not None, "a tier that began is known"
        items = [] if begun.first is None else [begun.first]
        is_last = attempt.rung is None or "logprobs" not in self._catalog.backend(tier).capabilities
        if not (is_last and exchange.request.stream):
            try:
                while not self._is_enough() and (item := await anext(begun.rest, None)) is not None:
                    items.append(item)
            except BaseException:
                await begun.rest.aclose()
                raise
        times_s = (exchange.first_token_s, exchange.last_token_s)
        return _Held(tier, exchange.answers, exchange.abandoned, times_s, place, items, begun.rest)

    def _is_enough(self) -> bool:
        if self._hold_back is None:
            return False
        return all(
            answer.finished is not None or len(answer.scored or ()) >= self._hold_back
            for answer in self._exchange.answers
        )

    def _judge(self, held: _Held, attempt: Attempt) -> Verdict:
        """The least confident of the choices decides; a tier that gives no log-probabilities is believed."""
        backend = self._catalog.backend(held.tier)
        if attempt.rung is None or "logprobs" not in backend.capabilities:
            return Verdict.TRUSTED
        calibration, attempts = self._exchange.calibration, self._exchange.attempts
        confidence = min(
            calibration.p_right(held.tier.index, AnswerSignals.of(answer.scored or ())) for answer in held.answers
        )
        attempts[held.place] = replace(attempts[held.place], confidence=confidence)
        return Verdict.DOUBTED if confidence < attempt.rung.least_confidence else Verdict.TRUSTED

    async def _replace_doubted(self) -> None:
        """Another answer stands in the doubted one's place: it ends here, and goes on the bill."""
        doubted, self._doubted = self._doubted, None
        if doubted is None:
            return
        await doubted.rest.aclose()
        exchange = self._exchange
        present = exchange.answers, exchange.abandoned
        exchange.answers, exchange.abandoned = doubted.answers, doubted.abandoned
        bill = exchange.answers_bill(doubted.tier)
        exchange.answers, exchange.abandoned = present
        exchange.spent.append(bill)
        exchange.is_escalated = True
        exchange.attempts[doubted.place] = replace(
            exchange.attempts[doubted.place], error=DOUBTED, cost_nano_usd=to_nano_usd(bill.cost_usd)
        )

    def _release(self, held: _Held | None) -> Begun:
        """The answer that is sent: the one just judged, or the doubted one where nobody could do better."""
        held = held or self._doubted
        assert held is not None, "without an answer there was an error"
        exchange = self._exchange
        exchange.tier, exchange.answers, exchange.abandoned = held.tier, held.answers, held.abandoned
        exchange.asked_tier = held.tier
        exchange.first_token_s, exchange.last_token_s = held.times_s
        if exchange.request.stream:
            # What was held is sent now; that is when its reader has the first token.
            exchange.first_token_s = exchange.last_token_s = exchange.clock()
        self._doubted = None
        return Begun(None, _replay(held.items, held.rest))


def _prediction(exchange: Exchange, answer: Answer) -> str:
    """What a doubted choice said, without the prompt it was asked to repeat."""
    text = answer.text
    if not exchange.request.echo:
        return text
    prompt = exchange.request.prompts[answer.index // exchange.request.n]
    return text.removeprefix(prompt) if isinstance(prompt, str) else ""


async def _replay(items: Sequence[Item], rest: AsyncGenerator[Item, None]) -> AsyncGenerator[Item, None]:
    """What was held, then what is still to come."""
    async with aclosing(rest):
        for item in items:
            yield item
        async for item in rest:
            yield item
