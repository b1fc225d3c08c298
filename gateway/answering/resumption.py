"""Has another tier go on with an answer that broke off after its first token, from what was sent of it.

What was sent stays as it is: the next tier reads it as its own beginning and writes what follows. The broken part is
paid at its tier's prices, whatever comes after it. Who is asked is :func:`policies.resumption.resumption_order`'s to
say, by a decision that still holds; a kill switch or an outage since the first one is obeyed.

Left to fail as they did: answers with several choices, an echo, log-probabilities or token ids, and those that broke
off while they reasoned.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

from msgspec import structs

from backends.errors import BackendError
from backends.protocol import Finished, FinishReason, Message, TokenDelta
from gateway.answering.phases import Answer
from gateway.answering.request_router import RequestRouter
from gateway.answering.tier_caller import Item, StartedAnswer, call_tier
from gateway.api.answer_encoder import AnswerChoice
from gateway.edge.error_table import row_of
from gateway.errors import AnswerFailed, GatewayError
from gateway.store.errors import StoreError
from gateway.store.records import BROKEN
from policies.errors import PolicyError
from policies.limits import cost_limit_usd
from policies.pricing import expected_bill_usd, to_nano_usd
from policies.resumption import MAX_RESUMPTIONS, OnBreak, resumption_order
from policies.types import Tier

_log = logging.getLogger("suffice.resumption")


async def resume_answer(
    answer: Answer, router: RequestRouter, failure: AnswerFailed, *, is_held: bool = False
) -> StartedAnswer:
    """Start what follows on a broken answer's text.

    Parameters
    ----------
    failure : what ended it
    is_held : nothing of it has been sent yet, so what there is comes first

    Raises
    ------
    AnswerFailed
        The same: nobody may, can or will go on.
    StoreUnavailable and its kinds
        What going on may cost could not be made durable.
    """
    if not _is_resumable(answer):
        raise failure
    choice = answer.choices[0]
    held = TokenDelta(choice.text, choice.reasoning, tool_calls=tuple(choice.call_pieces)) if is_held else None
    if answer.num_left == 0:
        started = _at_its_limit(answer, choice)
    else:
        started = await _ask_on(answer, router, failure)
    if held is None:
        return started
    return StartedAnswer(started.tier, (choice, held), _after(started))


def _is_resumable(answer: Answer) -> bool:
    request, sampling = answer.request, answer.request.sampling
    if answer.routed.basis.policy.on_break is not OnBreak.RESUME or len(answer.broken_bills) >= MAX_RESUMPTIONS:
        return False
    if request.num_choices != 1 or request.echo or sampling.logprobs is not None:
        return False
    prompt, choice = request.prompts[0], answer.choices[0]
    if sampling.prompt_logprobs is not None or (not isinstance(prompt, str) and isinstance(prompt[0], int)):
        return False
    return bool(choice.texts or choice.call_pieces or not choice.reasonings)


def _at_its_limit(answer: Answer, choice: AnswerChoice) -> StartedAnswer:
    """Return the end of an answer that broke off with its last permitted token: it is whole."""
    assert answer.tier is not None, "an answer has a tier"
    assert choice.finished is not None, "it broke off"
    choice.finished = replace(choice.finished, reason=FinishReason.LENGTH, error=None)
    return StartedAnswer(answer.tier, None, _nothing())


async def _ask_on(answer: Answer, router: RequestRouter, failure: AnswerFailed) -> StartedAnswer:
    assert answer.tier is not None, "an answer has a tier"
    broken, catalog, request_id = answer.tier, router.catalog, answer.routed.admitted.request_id
    order = resumption_order(
        broken.index,
        await _permitted(answer, router, broken),
        [each.tier for each in answer.attempts],
        is_replicated=catalog.backend(broken).load().num_replicas > 1,
    )
    tiers = [catalog.ladder[index - 1] for index in order]
    tiers = [tier for tier in tiers if "continue" in catalog.backend(tier).capabilities]
    if not tiers:
        raise failure
    part = _BrokenPart.set_aside(answer, broken)
    try:
        for tier in tiers:
            if not _is_affordable(answer, tier):
                continue
            try:
                started = await call_tier(answer, catalog, tier)
            except BackendError as error:
                code = row_of(error).code
                _log.warning("request %s: tier %d cannot go on: %s: %s", request_id, tier.index, code, error)
                continue
            _log.warning("request %s: tier %d goes on for tier %d: %s", request_id, tier.index, broken.index, failure)
            return started
    except BaseException:
        # Nobody waits any more. Where a tier had worked already, it has its own part on the bill.
        if not answer.abandoned:
            part.put_back(answer)
        raise
    part.put_back(answer)
    raise failure


async def _permitted(answer: Answer, router: RequestRouter, broken: Tier) -> tuple[int, ...]:
    """Return the tiers that may answer now, by the request's decision or, where that no longer holds, another."""
    routed = answer.routed
    if router.is_current(routed):
        return (routed.decision.tier, *routed.decision.ladder, broken.index)
    admitted = routed.admitted
    try:
        decision = (await router.route(admitted)).decision
    except (PolicyError, GatewayError, StoreError) as problem:
        _log.warning("request %s: nobody may go on: %s", admitted.request_id, problem)
        return ()
    finally:
        # The row tells of the decision that the answer began with.
        admitted.basis = routed.basis
    return (decision.tier, *decision.ladder)


def _is_affordable(answer: Answer, tier: Tier) -> bool:
    """Return whether the limit on the request's cost has room for another part."""
    facts, policy = answer.routed.facts, answer.routed.basis.policy
    limit_usd = cost_limit_usd(facts.overrides, policy)
    if limit_usd is None:
        return True
    spent_usd = sum([bill.cost_usd for bill in (*answer.earlier_bills, *answer.broken_bills)])
    return spent_usd + expected_bill_usd(tier, facts, policy) <= limit_usd


@dataclass(slots=True)
class _BrokenPart:
    """Holds what is known of the part that broke off, while somebody is looked for to go on."""

    tier: Tier
    ending: Finished
    num_billed: int
    is_scored: bool

    @classmethod
    def set_aside(cls, answer: Answer, tier: Tier) -> _BrokenPart:
        """Put the part on the bill, and make the answer ready for the next."""
        choice = answer.choices[0]
        assert choice.finished is not None, "it broke off"
        part = cls(tier, choice.finished, choice.num_billed, answer.is_scored)
        bill = answer.bill_at(tier)
        attempts = answer.attempts
        place = max(at for at, each in enumerate(attempts) if each.tier == tier.index and each.error is None)
        attempts[place] = structs.replace(attempts[place], error=BROKEN, cost_nano_usd=to_nano_usd(bill.cost_usd))
        answer.broken_bills.append(bill)
        answer.continued = Message("assistant", choice.text, tool_calls=choice.tool_calls, reasoning=choice.reasoning)
        answer.tier, answer.abandoned, answer.predictions, answer.is_scored = None, {}, (), False
        choice.finished, choice.num_billed, choice.scored = None, choice.num_tokens, None
        return part

    def put_back(self, answer: Answer) -> None:
        """Let the part be the answer's last."""
        choice = answer.choices[0]
        answer.broken_bills.pop()
        answer.tier, answer.is_scored = self.tier, self.is_scored
        choice.finished, choice.num_billed = self.ending, self.num_billed


async def _nothing() -> AsyncGenerator[Item, None]:
    return
    yield


async def _after(started: StartedAnswer) -> AsyncGenerator[Item, None]:
    """Yield what a tier wrote first, then the rest."""
    async with aclosing(started.rest):
        if started.first is not None:
            yield started.first
        async for item in started.rest:
            yield item
