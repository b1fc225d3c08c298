"""The real gateway, opened without a network: its service, log, control plane, monitor, worker and retraining.

What would be done by tasks of the server as time passes is done here when the simulation says so.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from backends.protocol import Finished, FinishReason, SamplingParams, Usage
from backends.testing import EchoBackend
from gateway.access.authenticator import Caller
from gateway.answering.phases import AdmittedRequest, Answer
from gateway.api.answer_encoder import AnswerChoice
from gateway.api.conversation import read_conversation
from gateway.api.request import InferenceRequest, RoutingPreferences, TextPart, Turn
from gateway.app import create_app
from gateway.control.quality_monitor import QualityMonitor
from gateway.control.rollout_driver import RolloutDriver
from gateway.ids import uuid7
from gateway.learn.retrain import RetrainOutcome, RetrainRequest, retrain
from gateway.learn.run_store import RunStore
from gateway.simulate.scenario import Conditions
from gateway.simulate.simulated_checker import KnownChecker
from gateway.simulate.simulated_clock import SimulatedClock
from gateway.simulate.traffic_generator import SimulatedRequest
from gateway.store.control_records import Lease
from gateway.store.feedback import FeedbackBook, GoldLabel
from gateway.store.leases import LeaseStore
from gateway.store.monitoring import MonitorReader
from gateway.store.records import Attempt
from gateway.store.verifications import VerificationQueue
from gateway.verify.live_load import LiveLoad
from gateway.verify.metrics import VerificationMetrics
from gateway.verify.worker import VerificationWorker
from policies.types import Overrides, Tier

if TYPE_CHECKING:
    from gateway.config.settings import Settings

_LEASE_S = 24 * 3600.0
# Tokens of a typical answer of the built-in ladder: at once, and thinking.
_ANSWER_TOKENS, _THINKING_TOKENS = 6, 140
_TOKEN_CHARS = 4


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """Holds the result of one request."""

    asked: SimulatedRequest
    tier: int
    cost_usd: Decimal
    router_version: str
    reason: str


class SimulatedGateway:
    """Open parts, and the hands that move them.

    Attributes
    ----------
    conditions : the world as it is
    truth : of every request so far, by id
    """

    def __init__(self, settings: Settings, parts: Any, clock: SimulatedClock, seed: int) -> None:
        self.clock = clock
        self.conditions = Conditions()
        self.truth: dict[str, SimulatedRequest] = {}
        self._settings = settings
        self._parts = parts
        self._plain_ladder = parts.catalog.ladder
        self.top = len(self._plain_ladder)
        self.began_at = clock()
        store = parts.store
        reader = MonitorReader(store)
        self._book = FeedbackBook(store)
        self._gold_rng = random.Random(f"gold/{seed}")
        self._leases = LeaseStore(store)
        self._lease: Lease | None = None
        self.runs = RunStore(store, clock)
        parts.control.writer.changes.clock = clock
        self.monitor = QualityMonitor(parts.control, reader, settings.monitor, clock)
        self.driver = RolloutDriver(parts.control, reader, settings.control, settings.monitor, clock)
        checker = KnownChecker(parts.catalog, self.truth.__getitem__, lambda: self.conditions.judge, seed)
        self.queue = VerificationQueue(store)
        self.worker = VerificationWorker(
            settings.verification,
            self.queue,
            self._book,
            checker,  # type: ignore[arg-type]
            LiveLoad(None, (), 0),
            VerificationMetrics(),
            sampler=parts.recorder.sampler,
            now=clock,
        )

    @property
    def control(self) -> Any:
        """Return the control plane."""
        return self._parts.control

    @property
    def top_price_usd(self) -> Decimal:
        """Return the price of a request at the top tier now."""
        return self._tier(self.top).price_per_request_usd

    async def serve(self, asked: SimulatedRequest) -> ServedRequest:
        """Route, answer with what the truth says, and commit the row, with its job where one was drawn."""
        moment = self.clock()
        overrides = Overrides(session_id=asked.session_id)
        request = InferenceRequest(
            model="auto",
            prompts=((Turn("user", (TextPart(asked.text),)),),),
            sampling=SamplingParams(max_tokens=512),
            preferences=RoutingPreferences(overrides),
        )
        admitted = AdmittedRequest(
            request_id=uuid7(time_ns=self.clock.time_ns),
            endpoint="/v1/chat/completions",
            request=request,
            caller=Caller(asked.tenant),
            traceparent=None,
            accepted_s=0.0,
            created_at=moment,
            clock=lambda: 0.0,
            conversation=read_conversation(request, {}, asked.tenant),
        )
        self.truth[admitted.request_id] = asked
        routed = await self._parts.request_router.route(admitted)
        tier = self._tier(routed.decision.tier)
        answer = self._answer(Answer(routed, request), tier, asked)
        await self._parts.recorder.settle(answer)
        if self._gold_rng.random() < _GOLD_SHARE:
            await self._tell_truth(admitted.request_id, tier.index, asked)
        return ServedRequest(asked, tier.index, answer.bill().cost_usd, routed.basis.router_version, answer.reason)

    def _tier(self, number: int) -> Tier:
        """Return the tier at the prices of the moment."""
        tier: Tier = self._parts.catalog.ladder[number - 1]
        return tier

    def set_conditions(self, conditions: Conditions) -> None:
        """Change the world; prices become those of the ladder that decisions are made with."""
        if conditions.price_factors != self.conditions.price_factors:
            self._parts.catalog.ladder = tuple(
                replace(tier, price_per_request_usd=tier.price_per_request_usd * factor)
                if (factor := conditions.price_factors.get(tier.index))
                else tier
                for tier in self._plain_ladder
            )
        self.conditions = conditions

    def _answer(self, answer: Answer, tier: Tier, asked: SimulatedRequest) -> Answer:
        """Fill in what a tier says, by the truth."""
        tokens = _ANSWER_TOKENS + (_THINKING_TOKENS if tier.index == self.top else 0)
        usage = Usage(prompt_tokens=len(asked.text) // _TOKEN_CHARS + 1, completion_tokens=tokens)
        choice = AnswerChoice(0, texts=["right" if asked.right[tier.index - 1] else "wrong"])
        choice.num_tokens = tokens
        choice.finished = Finished(FinishReason.STOP, usage)
        answer.asked_tier = answer.tier = tier
        answer.choices = [choice]
        answer.attempts.append(Attempt(tier.index, tier.model, 0.0))
        return answer

    async def _tell_truth(self, request_id: str, tier: int, asked: SimulatedRequest) -> None:
        """A caller says whether the answer was right, as some do."""
        label = GoldLabel(
            gold_id=uuid7(),
            request_id=request_id,
            tier=tier,
            source="feedback",
            label=float(asked.right[tier - 1]),
            created_at=self.clock(),
        )
        await self._book.add_gold([label])

    # ---- what the server's tasks would do

    async def work(self) -> int:
        """Do the checks that wait, as far as the budget goes; how many were done."""
        endings = self.worker.metrics.endings
        tried, unaffordable = 0, endings["unaffordable"]
        await self.worker.look()
        while await self.worker.work_once():
            tried += 1
        return tried - (endings["unaffordable"] - unaffordable)

    async def look(self) -> None:
        """The monitor's look, and the rollout's step, as the leader."""
        lease = await self._led()
        # A server looks every half minute, and spares itself the floors only for some minutes.
        await self.monitor.look(lease, at_once=True)
        await self.driver.step(lease)
        await self.control.refresh()

    async def _led(self) -> Lease:
        held = self._lease
        self._lease = None if held is None else await self._leases.renew(held, _LEASE_S)
        if self._lease is None:
            self._lease = await self._leases.acquire("simulation", "simulation", _LEASE_S)
        assert self._lease is not None, "nobody else simulates in this database"
        return self._lease

    async def retrain_if_asked(self, *, is_weekly: bool) -> RetrainOutcome | None:
        """Retrain when the monitor asked for it, or when a week is over."""
        run = await self.runs.next_requested()
        if run is None and not is_weekly:
            return None
        wish = RetrainRequest("weekly") if run is None else RetrainRequest(run.trigger, run.reason, run.run_id)
        outcome = await retrain(self._settings, wish, now=self.clock)
        await self.control.refresh()
        return outcome


# Callers who say whether an answer was right, of all.
_GOLD_SHARE = 0.02


@asynccontextmanager
async def open_gateway(settings: Settings, clock: SimulatedClock, seed: int) -> AsyncIterator[SimulatedGateway]:
    """The gateway of these settings, with models that are never asked."""
    backends = {tier.model: EchoBackend(tier.model) for tier in settings.ladder}
    app = create_app(settings, backends=backends, rng=random.Random(f"gateway/{seed}"))
    async with app.router.lifespan_context(app):
        yield SimulatedGateway(settings, app.state.parts, clock, seed)
