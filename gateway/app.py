"""The application: what is loaded at start, which path leads where, what is closed at the end."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from backends.protocol import Backend
from classifier.types import Router
from gateway.access.admission import Admission
from gateway.access.authenticator import Authenticator
from gateway.access.bulkhead import make_bulkheads
from gateway.access.rate_limiter_factory import make_rate_limiter
from gateway.access.spending_lease import LEASE_RENEWALS, SpendingLease, make_spending_lease
from gateway.admin.api import admin_routes
from gateway.admin.openapi import document
from gateway.answering.recorder import AnswerRecorder
from gateway.answering.redis_steps import RedisSteps
from gateway.answering.request_router import RequestRouter
from gateway.answering.response_keeper import ResponseKeeper
from gateway.answering.sessions import Sessions
from gateway.api.chat_codec import ChatDecoder, ChatEncoder
from gateway.api.completion_codec import CompletionDecoder, CompletionEncoder
from gateway.api.generation_body import BodyLimits
from gateway.api.messages_decoder import CountBody, MessagesDecoder
from gateway.api.messages_encoder import MessagesEncoder
from gateway.api.reasoning_seal import ReasoningSeal
from gateway.api.responses_decoder import ResponsesDecoder
from gateway.control.control_plane import ControlPlane
from gateway.control.leader_jobs import assign_leader_jobs
from gateway.control.metrics import ControlMetrics, SpendingMetrics
from gateway.control.quality_monitor import QualityMonitor
from gateway.control.router_set import RouterSet
from gateway.control.spending_watch import SpendingWatch
from gateway.edge.error_format import request_format
from gateway.edge.gate import RequestGate
from gateway.edge.refusal_watch import RefusalWatch
from gateway.endpoints.embeddings import EmbeddingEndpoint
from gateway.endpoints.feedback import FeedbackEndpoint
from gateway.endpoints.generation import GenerationEndpoint
from gateway.endpoints.pages import Pages, error_response, guarded
from gateway.endpoints.responses import ResponsePages, ResponsesEndpoint
from gateway.endpoints.token_counts import TokenCountEndpoint
from gateway.errors import Draining, MethodNotAllowed, RouteNotFound
from gateway.ids import uuid7
from gateway.learn.retrain_schedule import RetrainSchedule
from gateway.models import loader
from gateway.models.catalog import Catalog
from gateway.models.readiness import Readiness
from gateway.observe.metrics import Gauges, Metrics
from gateway.observe.refusal_log import RefusalLog
from gateway.observe.request_log import RequestLog
from gateway.store.feedback import FeedbackBook
from gateway.store.responses import ResponseBook
from gateway.store.store import Store
from gateway.verify.check_sampler import CheckSampler
from gateway.verify.worker import VerificationWorker
from gateway.verify.worker_factory import make_worker

if TYPE_CHECKING:
    from gateway.config.settings import Settings

_log = logging.getLogger("suffice.app")

# After the drain's own time the cancelled requests still commit their rows.
_LAST_ROWS_S = 10.0


def create_app(
    settings: Settings,
    *,
    backends: Mapping[str, Backend] | None = None,
    store: Store | None = None,
    router: Router | None = None,
    rng: random.Random | None = None,
    progress: loader.Progress | None = None,
) -> Starlette:
    """The gateway as an ASGI application.

    Everything heavy happens in its lifespan, so making it is cheap and imports no model library. What is given here is
    used instead of what the settings describe; the application opens and closes it all the same.

    Parameters
    ----------
    settings : checked configuration
    backends : served model's name -> backend
    store : the log, not yet open
    router : estimates sufficiency
    rng : randomness of exploration and of sampling for verification
    progress : told which model is loading and which is ready
    """

    @asynccontextmanager
    async def lifespan(app: _Application) -> AsyncIterator[None]:
        parts = _Parts(settings, backends, store, router, rng or random.Random())
        try:
            await parts.open(progress or _log_progress)
            routes = app.router.routes[:] = parts.routes()
            if not settings.server.cors_origins:
                direct = [each for each in routes if isinstance(each.endpoint, GenerationEndpoint)]
                app.direct |= {("POST", each.path): each.endpoint for each in direct}
            app.paths, app.refusals = {each.endpoint: each.path for each in routes}, parts.refusals
            app.state.parts = parts
            yield
        finally:
            await parts.close()

    return _Application(
        lifespan=lifespan,
        middleware=_middleware(settings.server.cors_origins),
        exception_handlers={HTTPException: _http_error, Exception: _unexpected},
    )


class _Application(Starlette):
    """Starlette, with a way past its layers for the busiest paths, whose endpoints answer for all their errors.

    Attributes
    ----------
    direct : (method, path) -> endpoint
    paths : endpoint -> path, as routes have it
    refusals : told of what every other path refuses; None before the start
    """

    direct: dict[tuple[str, str], ASGIApp]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.direct = {}
        self.paths: Mapping[Any, str] = {}
        self.refusals: RefusalLog | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self.direct.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if endpoint is None and self.refusals is not None and scope["type"] == "http":
            send = RefusalWatch(send, scope, self.paths, self.refusals)
        try:
            await (endpoint or super().__call__)(scope, receive, send)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise
            # The server gives up waiting, at the end of a drain, and has nothing to learn from the task: it would log
            # an error with a traceback for each. Whoever has heard nothing yet hears that.
            with suppress(RuntimeError):
                await error_response(Draining(), uuid7(), request_format(scope))(scope, receive, send)


class _Parts:
    """Holds what lives as long as the application."""

    def __init__(
        self,
        settings: Settings,
        backends: Mapping[str, Backend] | None,
        store: Store | None,
        router: Router | None,
        rng: random.Random,
    ) -> None:
        self._settings = settings
        self._router = router
        self._rng = rng
        self.backends: dict[str, Backend] = dict(backends or {})
        self.store = store or Store(settings.database)
        self.control: ControlPlane | None = None
        self.monitor: QualityMonitor | None = None
        self.retraining: RetrainSchedule | None = None
        self._routers: RouterSet | None = None
        self.rates = make_rate_limiter(settings, self.store)
        self.verifier: VerificationWorker | None = None
        self.lease: SpendingLease | None = None
        self.steps: RedisSteps | None = None
        self.spending = SpendingWatch(self.store, LEASE_RENEWALS * settings.control.lease_s)
        self.metrics = Metrics()
        self.refusals = RefusalLog(settings.log, self.metrics.reject)
        self.admission = Admission(
            settings.server.max_concurrency, settings.server.queue_limit, settings.server.max_queue_s
        )

    async def open(self, progress: loader.Progress) -> None:
        """Open the log first: it is what most often cannot be, and it is quick to say so."""
        settings = self._settings
        await self.store.open(as_server=True)
        await self.store.put_config(settings.config_hash, settings.shown(), datetime.now(UTC))
        if self._router is None:
            self._router = loader.load_router(settings)
        if not self.backends:
            self.backends = loader.make_backends(settings)
        await loader.start_backends(self.backends, progress)
        self._assemble()
        assert self.control is not None, "assembled just now"
        await self.spending.look_at_start()
        if self.lease is not None:
            self.lease.start()
        await self.request_router.routers.warm_up()
        await self.control.start()
        if self.verifier is not None:
            self.verifier.start(works=settings.verification.worker)

    def _assemble(self) -> None:
        settings = self._settings
        ladder = loader.fit_ladder(settings.ladder, self.backends)
        policies = loader.complete_policies(settings.policies, self._router)
        self.admission.divide(make_bulkheads(self.backends))
        self.catalog = Catalog(
            ladder,
            policies[settings.policy.name],
            policies,
            self.backends,
            shares_prefix_cache=settings.server.share_prefix_cache,
            embedding_prices_usd={name: each.price_per_token_usd for name, each in settings.embeddings.items()},
            aliases=settings.aliases,
        )
        self.lease = make_spending_lease(settings, ladder, self.store, "server")
        sampler = CheckSampler(ladder, settings.log.prompts, self._rng, enabled=settings.verification.enabled)
        routers = self._routers = RouterSet(
            self._router,
            timeout_s=settings.router.timeout_s,
            canary_checks=settings.control.rollout_checks,
        )
        ttl_s = settings.server.conversation_ttl_s
        if settings.redis.url is not None:
            self.steps = RedisSteps(settings.redis.url, ttl_s)
        sessions = Sessions(
            self.store, self.store.digest, ttl_s, is_alone=self.store.dialect == "sqlite", shared=self.steps
        )
        request_log = RequestLog(settings.log)
        self.request_router = RequestRouter(self.catalog, routers, sessions, self._rng)
        self.recorder = AnswerRecorder(
            settings.config_hash,
            settings.log.prompts,
            self.store,
            self.catalog,
            routers,
            sampler,
            sessions,
            self.metrics,
            request_log,
        )
        control = ControlPlane(settings, self.store, self.catalog, routers, self.request_router, self._rng)
        self.control, self.recorder.shadow = control, control.shadow
        self.retraining = RetrainSchedule(settings, self.store, control.writer)
        self.retraining.join(control.leader)
        self.monitor, health = assign_leader_jobs(control, settings, self.store)
        control.leader.every(settings.control.lease_s, "spending", self.spending.look)
        self.metrics.others.append(ControlMetrics(control, health))
        self.metrics.others.append(SpendingMetrics(self.spending, self.lease))
        if settings.verification.enabled:
            self.verifier = make_worker(
                settings, self.catalog, self.store, admission=self.admission, sampler=sampler, lease=self.lease
            )
            self.metrics.others.append(self.verifier.metrics)
        self.metrics.gauges = Gauges(
            loads=lambda: {(str(t.index), t.model): self.catalog.backend(t).load() for t in ladder},
            num_running=lambda: self.admission.num_running,
            num_waiting=lambda: self.admission.num_waiting,
            num_pending_rows=lambda: self.store.committer.num_pending,
        )

    def routes(self) -> list[Route]:
        """The paths, the busiest first: they are tried in order."""
        settings = self._settings
        server = settings.server
        authenticator = Authenticator(settings.auth, server, self.store)
        gate = self.gate = RequestGate(server, authenticator, self.admission, self.rates, self.refusals)
        body_limits = BodyLimits(server, self.catalog.tier_numbers)
        parts = (
            gate,
            self.request_router,
            self.recorder,
            self.metrics,
            f"fp_{settings.config_hash}",
            self.store.committer,
            self.lease,
        )
        chat = GenerationEndpoint("/v1/chat/completions", ChatDecoder(body_limits), ChatEncoder, *parts)
        completions = GenerationEndpoint("/v1/completions", CompletionDecoder(body_limits), CompletionEncoder, *parts)
        response_book = ResponseBook(self.store, settings.log.readable_days)
        secret = self.store.secret
        seal = ReasoningSeal(secret.derive_key("reasoning"), secret.derive_key("reasoning key id"))
        responses = ResponsesEndpoint(
            ResponsesDecoder(body_limits),
            ResponseKeeper(settings.log, response_book, seal, server.max_body_bytes),
            parts,
        )
        response_pages = ResponsePages(gate, response_book)
        messages = GenerationEndpoint("/v1/messages", MessagesDecoder(body_limits), MessagesEncoder, *parts)
        counts = TokenCountEndpoint(MessagesDecoder(body_limits, CountBody), gate, self.request_router, self.metrics)
        embeddings = EmbeddingEndpoint(
            gate, self.catalog, self.recorder, self.metrics, self.store.committer, self.lease
        )
        readiness = Readiness(self.catalog, settings.metrics.readiness_ttl_s, self.store.committer)
        book = FeedbackBook(self.store)
        feedback = FeedbackEndpoint(gate, self.store, book, len(self.catalog.ladder))
        assert self.control is not None, "opened before"
        control = self.control.status
        is_public = settings.metrics.public
        pages = Pages(
            self.catalog, gate, self.store, readiness, self.admission, self.metrics, control, is_public=is_public
        )
        routes = [
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/responses", responses, methods=["POST"]),
            Route("/v1/responses/{response_id}", guarded(response_pages.response), methods=["GET", "DELETE"]),
            Route("/v1/responses/{response_id}/input_items", guarded(response_pages.input_items)),
            Route("/v1/responses/{response_id}/cancel", guarded(response_pages.cancel), methods=["POST"]),
            Route("/v1/messages", messages, methods=["POST"]),
            Route("/v1/messages/count_tokens", counts, methods=["POST"]),
            Route("/v1/embeddings", embeddings, methods=["POST"]),
            Route("/v1/feedback", guarded(feedback), methods=["POST"]),
            Route("/v1/models", guarded(pages.models)),
            Route("/v1/models/{model:path}", guarded(pages.model)),
            Route("/v1/requests/{request_id}", guarded(pages.request)),
            Route("/healthz", guarded(pages.healthz)),
            Route("/readyz", guarded(pages.readyz)),
        ]
        if settings.admin.enabled:
            routes += admin_routes(settings, self.store, self.catalog, self.control, authenticator, self.monitor)
        described = document(settings, body_limits)
        routes.append(Route("/openapi.json", guarded(pages.described(described))))
        routes.append(Route("/docs", guarded(pages.described_for_people(described))))
        if settings.metrics.enabled:
            routes.append(Route("/metrics", guarded(pages.metrics)))
        return routes

    async def close(self) -> None:
        """Let running requests end, then free the models, then the log: each may still need the next."""
        if self.verifier is not None:
            await self.verifier.close()
        await self.admission.drain(_LAST_ROWS_S)
        if self.lease is not None:
            await self.lease.close()
        await self.rates.close()
        if self.steps is not None:
            await self.steps.close()
        if self.control is not None:
            await self.control.close()
        if self.retraining is not None:
            await self.retraining.close()
        if self._routers is not None:
            self._routers.close()
        await loader.close_backends(list(self.backends.values()))
        await self.store.close()


def _middleware(cors_origins: tuple[str, ...]) -> list[Middleware]:
    if not cors_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            # What the API and its administration take; who may administer is asked there.
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    ]


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals in the shape of all others."""
    assert isinstance(error, HTTPException), "registered for nothing else"
    path, shape = request.url.path, request_format(request.scope)
    if error.status_code == 405:
        problem = MethodNotAllowed(f"{request.method} is not allowed on {path[:200]}.")
        response = error_response(problem, uuid7(), shape)
        response.headers["allow"] = (error.headers or {}).get("Allow", "")
        return response
    return error_response(RouteNotFound(f"There is no {request.method} {path[:200]}."), uuid7(), shape)


async def _unexpected(request: Request, error: Exception) -> Response:
    return error_response(error, uuid7(), request_format(request.scope))


def _log_progress(model: str, state: str) -> None:
    _log.info("%s: %s", model, state)
