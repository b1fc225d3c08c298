"""One request through the rooms: facts, decision, answer, row. The endpoints parse before it and format after it."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from backends.protocol import FinishReason
from classifier.types import Sufficiency
from gateway.answering.domain import domain_of
from gateway.answering.exchange import Exchange
from gateway.answering.recording import Recorder
from gateway.answering.sessions import Sessions
from gateway.answering.tier_calls import probe_request
from gateway.api.request import prompt_size
from gateway.control.routers import RouterSet, sticky_key
from gateway.control.shadow import RoutedText, Shadow
from gateway.control.state import groups_of
from gateway.edge.error_table import row_of
from gateway.errors import InvalidRequest, UnsupportedOption
from gateway.models.catalog import Catalog
from gateway.observe.metrics import Metrics
from gateway.observe.request_log import RequestLog
from gateway.store.errors import StoreError
from gateway.store.records import RequestRecord, VerificationJob
from gateway.verify.sampler import Sampler
from policies.decide import decide
from policies.limits import permitted_tiers
from policies.policy import Policy
from policies.types import Overrides, RequestFacts, RoutingDecision, TierEstimate

_log = logging.getLogger("suffice.service")

# Bytes of text bound tokens from above; a chat template adds its own few per message.
_TEMPLATE_TOKENS_PER_TURN = 16
_CHARS_PER_TOKEN = 4
_NOT_TIGHTENED: Mapping[int, float] = {}


class RowWriter(Protocol):
    """The part of the store that is needed here."""

    async def record(self, record: RequestRecord, job: VerificationJob | None = None) -> None: ...


class Service:
    """Everything a request needs, made once at start.

    Attributes
    ----------
    kill_switch : all traffic goes to the top tier
    tightened : (policy's name, router's version) -> tier in doubt -> P(as good) it must reach
    tightened_groups : likewise -> tenant or domain in doubt -> tier -> P(as good) it must reach
    shadow : shown every answered request once its row is there
    sampler : draws answers for checks
    unavailable : tiers that cannot be asked now, by number
    """

    def __init__(
        self,
        catalog: Catalog,
        routers: RouterSet,
        recorder: Recorder,
        sampler: Sampler,
        rows: RowWriter,
        sessions: Sessions,
        metrics: Metrics,
        request_log: RequestLog,
        rng: random.Random,
    ) -> None:
        self.catalog = catalog
        self.routers = routers
        self.metrics = metrics
        self.kill_switch = False
        self.tightened: Mapping[tuple[str, str], Mapping[int, float]] = {}
        self.tightened_groups: Mapping[tuple[str, str], Mapping[str, Mapping[int, float]]] = {}
        self.shadow: Shadow | None = None
        self.unavailable: frozenset[int] = frozenset()
        self._recorder = recorder
        self.sampler = sampler
        self._rows = rows
        self._sessions = sessions
        self._request_log = request_log
        self._rng = rng
        contexts = [tier.context_length for tier in catalog.ladder if tier.context_length is not None]
        self._shortest_context = min(contexts) if len(contexts) == len(catalog.ladder) else None

    async def route(self, exchange: Exchange) -> None:
        """Estimate and decide.

        Raises
        ------
        UnknownModel, InvalidRequest, UnsupportedOption, PolicyError
        """
        started_s = exchange.clock()
        policy, overrides = self._rule(exchange)
        key = sticky_key(exchange.caller.tenant, overrides.session_id, exchange.caller.key_id, exchange.request_id)
        slot = self.routers.pick(key)
        # Thresholds belong to the router they were derived with; nothing is awaited between the two readings.
        policy = slot.policies.get(policy.name, policy)
        estimate = await slot.predictor.predict(exchange.request.turns)
        exchange.policy = policy
        exchange.router_version = slot.version
        exchange.sufficiency = estimate
        exchange.facts = await self._facts(exchange, policy, overrides, estimate)
        exchange.decision = decide(exchange.facts, policy, self.catalog.ladder, self._rng)
        if exchange.decision.way_up:
            exchange.calibration = getattr(slot.router, "confidence", exchange.calibration)
        self.metrics.routing_s.observe(exchange.clock() - started_s)

    def _rule(self, exchange: Exchange) -> tuple[Policy, Overrides]:
        """The policy in force and what the request asks of it, the model's name included."""
        preferences, model = exchange.request.preferences, exchange.request.model
        target = self.catalog.resolve(model)
        policy = target.policy if preferences.policy is None else self.catalog.policy(preferences.policy)
        overrides = preferences.overrides
        if target.tier is None:
            return policy, overrides
        if overrides.tier not in (None, target.tier.index):
            raise InvalidRequest(
                f"'model' {model!r} is tier {target.tier.index}, 'suffice.tier' asks for tier {overrides.tier}.",
                param="suffice.tier",
                code="conflicting_limits",
            )
        return policy, replace(overrides, tier=target.tier.index)

    async def _facts(
        self, exchange: Exchange, policy: Policy, overrides: Overrides, estimate: Sufficiency | None
    ) -> RequestFacts:
        request = exchange.request
        size = max(map(prompt_size, request.prompts))
        return RequestFacts(
            num_prompt_tokens=await self._num_prompt_tokens(exchange, policy, overrides, size),
            max_tokens=request.sampling.max_tokens,
            estimates=tuple([TierEstimate(t.tier, t.p_right, t.p_as_good) for t in estimate.tiers]) if estimate else (),
            overrides=overrides,
            session=await self._sessions.get(exchange.caller.tenant, overrides.session_id),
            unavailable=self.unavailable | self._unable(exchange, overrides),
            expected_wait_s=self._waits(policy),
            kill_switch=self.kill_switch,
            novelty=estimate.novelty if estimate else 0.0,
            tightened=self._tightened(policy, exchange, estimate),
            guessed_prompt_tokens=_guess_tokens(size),
            num_answers=request.num_choices,
        )

    def _tightened(self, policy: Policy, exchange: Exchange, estimate: Sufficiency | None) -> Mapping[int, float]:
        """The most that policy, tenant and domain ask of each tier in doubt."""
        # Nearly always there is nothing in doubt, and nothing to look up.
        if not self.tightened and not self.tightened_groups:
            return _NOT_TIGHTENED
        key = (policy.name, exchange.router_version)
        asked = self.tightened.get(key, _NOT_TIGHTENED)
        groups = self.tightened_groups.get(key)
        if not groups:
            return asked
        most = dict(asked)
        for group in groups_of(exchange.caller.tenant, domain_of(estimate.features) if estimate else ""):
            for tier, least in groups.get(group, _NOT_TIGHTENED).items():
                most[tier] = max(most.get(tier, 0.0), least)
        return most

    async def _num_prompt_tokens(
        self, exchange: Exchange, policy: Policy, overrides: Overrides, size: int
    ) -> int | None:
        """A guess where any guess fits every context, else the count of the highest tier that may see the prompt.

        Raises
        ------
        PolicyError
            No tier may.
        """
        request = exchange.request
        if not request.turns:
            return size
        if self._shortest_context is not None:
            # A character is at most 4 bytes of UTF-8, and a token at least one byte.
            template = _TEMPLATE_TOKENS_PER_TURN * (len(request.turns) + 1)
            if 4 * size + template + (request.sampling.max_tokens or 1) <= self._shortest_context:
                return _guess_tokens(size)
        tier = permitted_tiers(overrides, policy, self.catalog.ladder)[-1]
        return await self.catalog.backend(tier).count_tokens(probe_request(exchange))

    def _unable(self, exchange: Exchange, overrides: Overrides) -> frozenset[int]:
        """Tiers whose model lacks what this request needs.

        Raises
        ------
        UnsupportedOption
            The tier asked for lacks it, or every tier does.
        """
        request = exchange.request
        needs: list[tuple[str, str]] = []
        if isinstance(request.prompts[0], tuple) and isinstance(request.prompts[0][0], int):
            needs.append(("prompt_token_ids", "prompt"))
        if request.sampling.logprobs is not None:
            needs.append(("logprobs", "logprobs"))
        unable: frozenset[int] = frozenset()
        for capability, param in needs:
            lacking = {t.index for t in self.catalog.ladder if capability not in self.catalog.backend(t).capabilities}
            if overrides.tier in lacking or len(lacking) == len(self.catalog.ladder):
                raise UnsupportedOption(f"'{param}' in this form is not supported by the model asked for.", param=param)
            unable |= lacking
        return unable

    def _waits(self, policy: Policy) -> dict[int, float]:
        """Expected waiting per tier, read only for a policy that prices or limits it."""
        if policy.max_wait_s is None and not policy.wait_cost_per_s_usd:
            return {}
        loads = {tier.index: self.catalog.backend(tier).load() for tier in self.catalog.ladder}
        return {index: load.predicted_wait_s for index, load in loads.items() if load.predicted_wait_s is not None}

    async def settle(self, exchange: Exchange) -> None:
        """Commit the row of a request that was answered; until this returns no last byte may leave.

        Raises
        ------
        StoreError
            The row is not committed, so the answer must not be completed.
        """
        assert not exchange.settled, "a request ends once"
        exchange.settled = True
        reason = exchange.answers[0].finish_reason
        version = exchange.router_version
        factor, doubt = self.routers.check_factor(version), self.routers.doubt(version, exchange.created_at)
        request, policy, decision, tier = exchange.request, exchange.policy, exchange.decision, exchange.tier
        assert policy is not None, "only routed requests are answered"
        assert decision is not None
        assert tier is not None
        chances = self.sampler.chances(
            request, policy, decision, tier, exchange.sufficiency, reason, factor=factor, doubt=doubt
        )
        drawn = self.sampler.draw(chances)
        record = self._recorder.row(exchange, reason, 200, None, None if chances is None else chances.logged)
        job = None if drawn is None else self.sampler.job(request, policy, exchange.answers[0].text, record, drawn)
        started_s = time.perf_counter()
        await self._rows.record(record, job)
        self.metrics.commit_s.observe(time.perf_counter() - started_s)
        if self.shadow is not None and self.shadow.wants(version):
            self._show(self.shadow, exchange, decision, is_drawn=job is not None)
        self._note(record)

    def _show(self, shadow: Shadow, exchange: Exchange, decision: RoutingDecision, *, is_drawn: bool) -> None:
        """Hand an answered request to the shadow router; pinned and explored ones say nothing new of it."""
        facts, policy = exchange.facts, exchange.policy
        assert facts is not None, "only routed requests are answered"
        assert policy is not None
        if decision.explored or facts.overrides.tier is not None:
            return
        routed = RoutedText(
            exchange.request_id,
            exchange.created_at,
            policy.name,
            exchange.router_version,
            exchange.request.turns,
            facts,
            decision.tier,
        )
        shadow.observe(routed, is_drawn=is_drawn)

    async def settle_failure(self, exchange: Exchange, error: Exception, *, is_cancelled: bool) -> None:
        """Commit the row of a request that failed, or that nobody waits for any more.

        What the log cannot take here is only reported: the caller is told of the failure in any case.
        """
        if exchange.settled:
            return
        exchange.settled = True
        row = row_of(error)
        if is_cancelled:
            await self._count_prompt(exchange)
        reason = FinishReason.CANCELLED if is_cancelled else FinishReason.ERROR
        code = getattr(error, "code", None) or row.code
        record = self._recorder.row(exchange, reason, row.status, code)
        try:
            await self._rows.record(record)
        except StoreError as problem:
            _log.error("the row of request %s is lost: %s", exchange.request_id, problem)
        self._note(record)

    async def settle_embedding(self, record: RequestRecord) -> None:
        """Commit the row of a request for vectors; until this returns they must not leave.

        Raises
        ------
        StoreError
        """
        await self._rows.record(record)
        self._note(record)

    async def _count_prompt(self, exchange: Exchange) -> None:
        """Bill the prompt of a cut-off request whose backend could not say what it used."""
        if exchange.tier is None and exchange.abandoned:
            # Cut off before the first token, but not before the tier had worked for it.
            exchange.tier = exchange.asked_tier
        if exchange.tier is None:
            return
        for answer in exchange.answers:
            if answer.finished is None and answer.index not in exchange.abandoned:
                num_tokens = await self.catalog.backend(exchange.tier).count_tokens(probe_request(exchange)) or 0
                ending = exchange.ending(answer)
                usage = replace(ending.usage, prompt_tokens=num_tokens)
                exchange.abandoned[answer.index] = replace(ending, usage=usage)

    def _note(self, record: RequestRecord) -> None:
        self.metrics.observe(record)
        self._sessions.note(record)
        self._request_log.write(record)


def _guess_tokens(num_chars: int) -> int:
    return num_chars // _CHARS_PER_TOKEN + 1
