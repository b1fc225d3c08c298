"""Ends requests: makes the row, draws the check, commits both, and tells metrics, sessions and the shadow router."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from datetime import datetime
from typing import Any, Protocol

from backends.protocol import FinishReason
from gateway.access.authenticator import Caller
from gateway.answering.phases import AdmittedRequest, Answer, Bill
from gateway.answering.request_router import count_prompt_tokens
from gateway.answering.sessions import Sessions
from gateway.api.embedding_decoder import EmbeddingRequest
from gateway.api.request import prompt_text
from gateway.config.sections import Retention
from gateway.control.router_set import RouterSet
from gateway.control.shadow_router import ShadowRequest, ShadowRouter
from gateway.edge.error_table import code_of, row_of
from gateway.models.catalog import Catalog
from gateway.observe.metrics import Metrics
from gateway.observe.request_log import RequestLog
from gateway.outcomes.answer_validator import AnswerRules, Fault
from gateway.store.errors import StoreError
from gateway.store.records import RequestRecord, ResponseRecord, VerificationJob
from gateway.verify.check_sampler import CheckSampler
from policies.sampling import DrawnCheck, InclusionProbabilities
from policies.turn_lock import TurnLock
from policies.types import ReasonCode

_log = logging.getLogger("suffice.service")

_NO_BILL = Bill()
# An answer cut off at its caller's own limit is not its tier's fault.
_BY_ITSELF = frozenset({FinishReason.STOP, FinishReason.TOOL_CALLS})


class RowWriter(Protocol):
    """The part of the store that is needed here; ``digest`` is a keyed hash of a text."""

    async def record(
        self, record: RequestRecord, job: VerificationJob | None = None, response: ResponseRecord | None = None
    ) -> None: ...

    def digest(self, content: str) -> str: ...


class AnswerRecorder:
    """Takes the one ending of every request.

    Parameters
    ----------
    config_hash : of the active settings
    retention : what is kept of prompts and answers
    rows : where they are committed

    Attributes
    ----------
    sampler : draws answers for checks
    shadow : shown every answered request once its row is there
    """

    def __init__(
        self,
        config_hash: str,
        retention: Retention,
        rows: RowWriter,
        catalog: Catalog,
        routers: RouterSet,
        sampler: CheckSampler,
        sessions: Sessions,
        metrics: Metrics,
        request_log: RequestLog,
    ) -> None:
        self.sampler = sampler
        self.shadow: ShadowRouter | None = None
        self._config_hash = config_hash
        self._retention = retention
        self._rows = rows
        self._catalog = catalog
        self._routers = routers
        self._sessions = sessions
        self._metrics = metrics
        self._request_log = request_log

    async def settle(self, answer: Answer, response: ResponseRecord | None = None) -> None:
        """Commit the row of a request that was answered; until this returns no last byte may leave.

        Parameters
        ----------
        response : kept with the row

        Raises
        ------
        StoreError
            The row is not committed, so the answer must not be completed.
        """
        routed, first = answer.routed, answer.choices[0]
        reason = first.finish_reason
        admitted, basis, decision, tier = routed.admitted, routed.basis, routed.decision, answer.tier
        assert not admitted.is_settled, "a request ends once"
        admitted.is_settled = True
        assert tier is not None, "an answer has a tier"
        # What several tries wrote says nothing of any tier.
        fault = None if answer.broken_bills else _fault(answer)
        if fault is not None:
            self._metrics.faulty_answers[str(tier.index), fault.value] += 1
        lock = _kept_lock(answer)
        chances = self.sampler.inclusion_probabilities(
            admitted.request,
            basis.policy,
            decision,
            tier,
            basis.estimate,
            reason,
            factor=self._routers.check_factor(basis.router_version),
            downward_share=self._routers.downward_sampling_share(basis.router_version, admitted.created_at),
            unable=routed.facts.unable,
        )
        record = self._row(admitted, answer, reason, 200, None)
        turn = lock or self._new_turn(record, chances)
        record.turn_id = None if lock is None else lock.turn_id
        if calls := first.tool_calls:
            record.call_digest = self._sessions.call_digest(admitted.conversation, calls[0].call_id)
        job = None
        if chances is not None and answer.broken_bills:
            record.verify_probability = 0.0
        elif chances is not None and (check := _check(record, turn, chances, fault)) is not None:
            job = self.sampler.job(admitted.request, basis.policy, (first.text, calls), record, check, fault)
        started_s = time.perf_counter()
        await self._rows.record(record, job, response)
        if answer.hold is not None:
            answer.hold.settle()
        self._metrics.commit_s.observe(time.perf_counter() - started_s)
        self._catalog.answered_s[tier.model] = time.monotonic()
        if self.shadow is not None and self.shadow.version not in (None, basis.router_version):
            self._show(self.shadow, answer, is_drawn=job is not None)
        await self._sessions.note(admitted.conversation, record, turn)
        self._note(record)

    async def settle_failure(
        self, admitted: AdmittedRequest, answer: Answer | None, error: Exception, *, is_cancelled: bool
    ) -> None:
        """Commit the row of a request that failed, or that nobody waits for any more.

        What the log cannot take here is only reported: the caller is told of the failure in any case.
        """
        if admitted.is_settled:
            return
        admitted.is_settled = True
        # Of an answer that another tier was going on with, whatever ended that, both have worked.
        if answer is not None and (is_cancelled or answer.broken_bills):
            await self._count_prompt(answer)
        row = row_of(error)
        reason = FinishReason.CANCELLED if is_cancelled else FinishReason.ERROR
        record = self._row(admitted, answer, reason, row.status, code_of(error))
        try:
            await self._rows.record(record)
        except StoreError as problem:
            _log.error("the row of request %s is lost: %s", admitted.request_id, problem)
        else:
            if answer is not None and answer.hold is not None:
                answer.hold.settle()
        self._note(record)

    async def settle_embedding(
        self, request_id: str, request: EmbeddingRequest, caller: Caller, created_at: datetime, **known: Any
    ) -> None:
        """Commit the row of a request for vectors; until this returns they must not leave.

        It needed no decision, so the row has no tier and nothing a router said.

        Raises
        ------
        StoreError
        """
        record = RequestRecord(
            request_id=request_id,
            created_at=created_at,
            endpoint="/v1/embeddings",
            model_requested=request.model,
            tenant=caller.tenant,
            key_id=caller.key_id,
            config_hash=self._config_hash,
            **known,
        )
        if self._retention != "none":
            self._keep(record, "\n".join(request.texts), None)
        await self._rows.record(record)
        self._note(record)

    def _row(
        self, admitted: AdmittedRequest, answer: Answer | None, reason: FinishReason, status: int, code: str | None
    ) -> RequestRecord:
        """Make the row of a request that has ended, as far as it came."""
        request, caller, conversation = admitted.request, admitted.caller, admitted.conversation
        ended_s = admitted.clock()
        record = RequestRecord(
            request_id=admitted.request_id,
            created_at=admitted.created_at,
            endpoint=admitted.endpoint,
            model_requested=request.model,
            finish_reason=reason,
            status_code=status,
            error_code=code,
            tenant=caller.tenant,
            key_id=caller.key_id,
            session_id=conversation.name,
            is_side_request=conversation.is_side_request,
            turn=None if conversation.is_side_request else conversation.shape.user_turns,
            step=None if conversation.is_side_request else conversation.shape.steps_in_turn,
            stream=request.stream,
            num_choices=request.num_choices,
            config_hash=self._config_hash,
            overrides=request.preferences.given,
            queue_s=admitted.waited_s,
            total_s=ended_s - admitted.accepted_s,
            overhead_s=max(0.0, ended_s - admitted.accepted_s - admitted.waited_s),
            traceparent=admitted.traceparent,
        )
        if (basis := admitted.basis) is not None:
            record.policy_name, record.policy_version = basis.policy.name, basis.policy.version
            record.router_version = basis.router_version
            if (estimate := basis.estimate) is not None and self._retention != "none":
                record.features, record.sufficiency = estimate.features, estimate.tiers
                record.novelty, record.domain = estimate.novelty, basis.domain
        if answer is not None:
            _add_answer(record, answer)
        if self._retention != "none" or conversation.name is not None:
            # Of a conversation without a name it is a digest of the prompt.
            record.conversation = conversation.keyed_digest
        if self._retention != "none":
            prompt = "\n".join([prompt_text(each) for each in request.prompts])
            self._keep(record, prompt, "\n".join([choice.shown for choice in answer.choices]) if answer else "")
        return record

    def _new_turn(self, record: RequestRecord, chances: InclusionProbabilities | None) -> TurnLock:
        """Draw for a turn, once: the steps that follow its decision share the draw."""
        assert record.final_tier is not None, "an answer has a tier"
        probability = None if chances is None else chances.logged
        drawn = self.sampler.draw_check(chances)
        return TurnLock(record.final_tier, record.request_id, record.confidence, probability, drawn)

    def _keep(self, record: RequestRecord, prompt: str, answer: str | None) -> None:
        """Keep digests and texts, as far as retention allows."""
        record.prompt_digest = self._rows.digest(prompt)
        record.answer_digest = None if answer is None else self._rows.digest(answer)
        if self._retention == "full":
            record.prompt_text, record.answer_text = prompt, answer

    def _show(self, shadow: ShadowRouter, answer: Answer, *, is_drawn: bool) -> None:
        """Hand an answered request to the shadow router; pinned and explored ones and locked steps say nothing new."""
        routed = answer.routed
        admitted, basis, decision = routed.admitted, routed.basis, routed.decision
        if decision.explored or routed.facts.overrides.tier is not None or routed.facts.lock is not None:
            return
        text = ShadowRequest(
            admitted.request_id,
            admitted.created_at,
            basis.policy.name,
            basis.router_version,
            basis.turns,
            routed.facts,
            decision.tier,
            basis.tools,
        )
        shadow.observe(text, is_drawn=is_drawn)

    async def _count_prompt(self, answer: Answer) -> None:
        """Bill the prompt of a cut-off request whose backend could not say what it used."""
        if answer.tier is None and answer.abandoned:
            # Cut off before the first token, but not before the tier had worked for it.
            answer.tier = answer.asked_tier
        if answer.tier is None:
            return
        backend = self._catalog.backend(answer.tier)
        for choice in answer.choices:
            if choice.finished is None and choice.index not in answer.abandoned:
                salt = self._catalog.cache_salt(answer.routed.admitted.caller.tenant)
                admitted = answer.routed.admitted
                num_tokens = await count_prompt_tokens(admitted.request, admitted.request_id, backend, salt) or 0
                ending = answer.ending(choice)
                usage = replace(ending.usage, prompt_tokens=num_tokens)
                answer.abandoned[choice.index] = replace(ending, usage=usage)

    def _note(self, record: RequestRecord) -> None:
        self._metrics.observe(record)
        self._request_log.write(record)


def _fault(answer: Answer) -> Fault | None:
    """Return what is wrong for certain with an answer that ended by itself; with the first such of several choices."""
    rules = AnswerRules.of(answer.request, len(answer.choices))
    if rules is None:
        return None
    whole = [each for each in answer.choices if each.finish_reason in _BY_ITSELF]
    return next((found for each in whole if (found := rules.fault(each.text, each.tool_calls)) is not None), None)


def _check(
    record: RequestRecord, turn: TurnLock, chances: InclusionProbabilities, fault: Fault | None
) -> DrawnCheck | None:
    """Return the check of one answer of a turn; note the probability of it in the row."""
    record.verify_probability = turn.probability
    if fault is not None and (known := chances.of_faulty()) is not chances:
        record.verify_probability = known.logged
        return known.certain()
    return turn.drawn if turn.drawn is not None and chances.permits(turn.drawn) else None


def _kept_lock(answer: Answer) -> TurnLock | None:
    """Return the turn that an answer belongs to; None where its tier was decided, or came about, by this request."""
    lock, decision = answer.routed.facts.lock, answer.routed.decision
    is_kept = decision.reason is ReasonCode.LOCKED and answer.tier is not None and answer.tier.index == decision.tier
    return lock if is_kept else None


def _add_answer(record: RequestRecord, answer: Answer) -> None:
    """Add the decision, who answered, and the bill."""
    routed = answer.routed
    admitted, decision = routed.admitted, routed.decision
    record.decided_tier = decision.tier
    record.ladder = decision.ladder
    record.propensity = decision.propensity
    record.propensities = decision.propensities
    record.reason = str(decision.reason)
    record.explored = decision.explored
    record.confidence = decision.confidence
    record.barred = decision.barred
    record.attempts = tuple(answer.attempts)
    if answer.tier is not None:
        record.final_tier, record.model_served = answer.tier.index, answer.tier.model
    if answer.first_token_s is not None:
        record.ttft_s = answer.first_token_s - admitted.accepted_s
        record.itl_s = answer.itl_s
    record.overhead_s = answer.overhead_s
    bill = answer.bill()
    usage = bill.usage
    record.prompt_tokens = usage.prompt_tokens
    record.completion_tokens = usage.completion_tokens
    record.cached_tokens = usage.cached_tokens
    record.reasoning_tokens = usage.reasoning_tokens
    record.draft_tokens = usage.draft_tokens
    record.accepted_draft_tokens = usage.accepted_draft_tokens
    record.compute_s = bill.compute_s
    record.cost_usd = bill.cost_usd
    record.measured_cost_usd = bill.measured_cost_usd
    record.queue_s = admitted.waited_s + bill.queue_s
