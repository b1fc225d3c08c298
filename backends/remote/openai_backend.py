"""Serves a model that stands behind one or several OpenAI-compatible servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from random import Random
from typing import Any, Final, TypeVar

import httpx
import orjson

from backends.config import RemoteModelConfig
from backends.errors import (
    BackendError,
    BackendFailure,
    BackendRefused,
    BackendUnavailable,
    RequestRejected,
    UnsupportedByBackend,
)
from backends.protocol import (
    Capability,
    EmbedResult,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    Health,
    Load,
    Message,
    SamplingParams,
    ScoreResult,
)
from backends.remote.answer_accumulator import AnswerAccumulator, estimate_prompt_tokens
from backends.remote.attempt_plan import AttemptPlan, PlannedAttempt
from backends.remote.breaker import BreakerState
from backends.remote.failure_table import FOREIGN_ERRORS, blames_replica, from_status, from_transport
from backends.remote.replica_exchange import ReplicaExchange
from backends.remote.replicas import Replica, ReplicaLease, ReplicaSet
from backends.remote.request_encoder import request_body, request_path
from backends.remote.transport import build_client
from backends.remote.unary_codec import (
    embed_body,
    read_embeddings,
    read_score,
    read_token_count,
    score_body,
    tokenize_body,
)
from backends.remote.wait_registry import BackendClosed, WaitRegistry

T = TypeVar("T")

_ID_CHARS = 36
# What a request without max_tokens is taken to weigh when replicas are compared, in output tokens.
_EXPECTED_TOKENS = 256
# A prompt token costs a server about this share of an output token.
_PREFILL_WEIGHT = 0.1
# Log-probabilities of a long prompt, or many embeddings, are large; an endless body is still refused.
_MAX_CALL_BYTES = 64 * 1024 * 1024


class OpenAIBackend:
    """Generate, score and embed at the replica with the least outstanding work.

    Failures before the first token are retried, on another replica where there is one; after it they end the answer
    with ``error``. Answers are always streamed from the server, whatever the caller does with them.

    Parameters
    ----------
    model_id : the served model's name on our side
    config : servers, limits and what they offer
    api_key : sent as a bearer token; kept out of every message and log
    client : an HTTP client of your own; :meth:`close` leaves it open
    clock, sleep, rng : injected time in seconds, and chance

    Notes
    -----
    One event loop. Token counts are the server's; where it sends none, ``Finished.usage_estimated`` is set.
    """

    def __init__(
        self,
        model_id: str,
        config: RemoteModelConfig,
        *,
        api_key: str | None = None,
        client: httpx.AsyncClient | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        rng: Random | None = None,
    ) -> None:
        self.model_id: Final = model_id
        self.context_length: Final = config.context_length
        self.capabilities: Final[frozenset[Capability]] = frozenset(config.capabilities)
        self._config = config
        self._secrets = (api_key,) if api_key else ()
        self._headers = _headers(config, api_key)
        self._client = client
        self._owns_client = client is None
        self._clock = clock
        self._sleep = sleep
        # Seeded by the system: two gateways must not retry in step.
        self._rng = rng or Random()
        self._waits = WaitRegistry()
        self._replicas = ReplicaSet.of(config.urls, config.breaker, config.max_outstanding)
        self._num_cut = 0
        self._num_bad_usage = 0
        # Servers are asked to count until one refuses the question.
        self._asks_usage = True

    @property
    def replicas(self) -> ReplicaSet:
        """Return the servers and what is known of them."""
        return self._replicas

    async def start(self) -> None:
        """Make the client; connections open with the first requests."""
        self._connected()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        """Yield deltas and one ending. See :class:`backends.protocol.Backend`.

        Raises
        ------
        UnsupportedByBackend : the request needs what the servers were not said to offer
        ContextLengthExceeded, RequestRejected : a server refused this request
        BackendOverloaded, BackendUnavailable, BackendTimeout, BackendFailure : every attempt failed; the last error
        """
        answer = AnswerAccumulator(request, self._clock, context_length=self.context_length)
        is_settled = False
        try:
            body = request_body(request, self._config, with_usage=self._asks_usage)
            plan = self._plan()
            step = plan.first(self._clock())
            while True:
                replica = await self._claim(plan, step)
                try:
                    async with aclosing(self._attempt(replica, request, body, answer)) as events:
                        async for event in events:
                            is_settled = isinstance(event, Finished)
                            yield event
                    return
                except BackendError as error:
                    # Raises when nothing is left to try; else what the failed attempt counted is dropped with it.
                    step = plan.after(error, replica, self._clock())
                    answer = answer.restarted()
                    if request.before_retry is not None:
                        await request.before_retry()
        except BackendClosed:
            is_settled = True
            raise self._closed() from None
        except BackendError:
            is_settled = True
            raise
        finally:
            if not is_settled and request.on_abandoned is not None:
                request.on_abandoned(answer.ending(FinishReason.CANCELLED))

    async def _attempt(
        self, replica: Replica, request: GenerateRequest, body: dict[str, Any], answer: AnswerAccumulator
    ) -> AsyncGenerator[Event, None]:
        """Play one attempt: raise before the first delta, end with ``error`` after it."""
        claim = ReplicaLease(replica, self._clock(), _work(request), _request_key(request), request.caller)
        with claim as lease:
            try:
                async with (
                    await self._open(replica, request_path(request), body) as exchange,
                    aclosing(exchange.chunks()) as reads,
                ):
                    async for chunks in reads:
                        for delta in answer.take(chunks):
                            lease.progress(delta.num_tokens)
                            yield delta
                        if answer.is_over:
                            break
                        exchange.expect(answer)
                ending = answer.whole(replica.url)
                lease.succeed()
            except (BackendError, BackendClosed) as error:
                ending = self._broken(lease, answer, error)
        self._num_cut += answer.is_cut
        self._num_bad_usage += answer.has_bad_usage
        # Of an answer that broke, what may be half a stop string is left to whoever goes on with it.
        if ending.error is None:
            for delta in answer.rest():
                yield delta
        yield ending

    def _broken(self, lease: ReplicaLease, answer: AnswerAccumulator, error: BackendError | BackendClosed) -> Finished:
        """Return the ending of an attempt that broke, or raise what broke it while it may still be retried."""
        if answer.is_complete and not answer.is_unreadable:
            # The answer is whole; only its token counts were lost.
            lease.succeed()
            return answer.ending()
        if isinstance(error, BackendClosed):
            if answer.has_begun:
                return answer.ending(FinishReason.CANCELLED, str(self._closed()))
            raise error
        self._judge(lease, error)
        if not answer.has_begun:
            raise error
        return answer.ending(FinishReason.ERROR, str(error))

    async def count_tokens(self, request: GenerateRequest, *, limit: int | None = None) -> int | None:
        """Ask the server, where it can tokenize (vLLM's ``/tokenize``); None where it cannot, or does not answer."""
        if request.prompt_token_ids is not None:
            return len(request.prompt_token_ids)
        if "tokenize" not in self._config.capabilities:
            return None
        try:
            body = tokenize_body(request, self._config)
            return await self._call("../tokenize", body, read_token_count, 1.0, is_model_run=False)
        except BackendError:
            return None

    async def score(self, prompt: GenerateRequest, answer: str) -> ScoreResult:
        """Read ``answer`` after ``prompt`` in one prefill, where the server offers it."""
        path, body = score_body(prompt, answer, self._config)
        work = _PREFILL_WEIGHT * estimate_prompt_tokens(prompt)
        return await self._call(path, body, lambda data: read_score(data, prompt, answer, self._config), work)

    async def embed(self, texts: Sequence[str]) -> EmbedResult:
        """Embed by ``/v1/embeddings``."""
        if "embed" not in self._config.capabilities:
            raise UnsupportedByBackend("embed", self._config.model)
        body = embed_body(texts, self._config)
        return await self._call("/embeddings", body, lambda data: read_embeddings(data, len(texts)), 1.0)

    async def health(self) -> Health:
        """Ask every replica as ``health_check`` says; healthy when one of them answers.

        Listing models costs nothing, and says nothing of a breaker. A replica that makes a token, past its breaker,
        closes it, so a server that came back is used at once.
        """
        if self._waits.is_closed:
            return Health(False, 0.0, str(self._closed()))
        began_s = self._clock()
        ask = self._probe if self._config.health_check == "token" else self._list_models
        found = await asyncio.gather(*(ask(replica) for replica in self._replicas.replicas))
        broken = [detail for detail in found if detail is not None]
        return Health(len(broken) < len(found), self._clock() - began_s, "; ".join(broken))

    async def _list_models(self, replica: Replica) -> str | None:
        """Return what is wrong with a replica, None when it lists its models, or answers that it cannot."""
        if replica.breaker.state(self._clock()) is BreakerState.OPEN:
            return f"{replica.url}: its breaker is open"
        request = self._connected().build_request("GET", f"{replica.url}/models", headers=dict(self._headers))
        try:
            sending = self._connected().send(request, stream=True)
            response = await self._waits.bounded(sending, self._config.timeouts.health_s)
            await response.aclose()
        except TimeoutError:
            return f"{replica.url}: no answer in {self._config.timeouts.health_s} s"
        except BackendClosed:
            return str(self._closed())
        except FOREIGN_ERRORS as error:
            return str(from_transport(error, replica.url))
        # Not every server has the list; that it says so is an answer.
        if response.status_code in (200, 404, 405):
            return None
        return str(from_status(response.status_code, {}, b"", replica.url))

    async def _probe(self, replica: Replica) -> str | None:
        """Return what is wrong with a replica, None when it made a token."""
        sampling = SamplingParams(temperature=0.0, max_tokens=1)
        chat = GenerateRequest("health", messages=(Message("user", "ping"),), sampling=sampling)
        # A base model without a chat template refuses the first.
        for probe in (chat, replace(chat, messages=None, prompt="ping")):
            try:
                await self._waits.bounded(self._one_token(replica, probe), self._config.timeouts.health_s)
                replica.resting_until = self._clock()
                return None
            except RequestRejected as error:
                detail = str(error)
            except TimeoutError:
                return f"{replica.url}: no token in {self._config.timeouts.health_s} s"
            except (BackendError, BackendClosed) as error:
                return str(error) or str(self._closed())
        return detail

    async def _one_token(self, replica: Replica, probe: GenerateRequest) -> None:
        body = request_body(probe, self._config, with_usage=self._asks_usage)
        answer = AnswerAccumulator(probe, self._clock)
        async with aclosing(self._attempt(replica, probe, body, answer)) as events:
            async for event in events:
                if isinstance(event, Finished) and event.reason is FinishReason.ERROR:
                    raise BackendFailure(event.error or f"{replica.url}: the probe failed")

    def load(self) -> Load:
        return Load(
            running=self._replicas.num_outstanding,
            num_cut=self._num_cut,
            num_bad_usage=self._num_bad_usage,
            max_running=self._config.max_outstanding * len(self._config.urls),
            num_replicas=len(self._config.urls),
        )

    async def close(self) -> None:
        """End what runs with ``cancelled``, close connections. Idempotent."""
        self._waits.close()
        if self._client is not None and self._owns_client:
            await self._client.aclose()

    async def _call(
        self, path: str, body: dict[str, Any], read: Callable[[bytes], T], work: float, *, is_model_run: bool = True
    ) -> T:
        """Post and read one whole answer, with the same retries as a generation."""
        plan = self._plan()
        step = plan.first(self._clock())
        try:
            while True:
                replica = await self._claim(plan, step)
                try:
                    return await self._call_once(replica, path, body, read, work, plan, is_model_run)
                except BackendError as error:
                    step = plan.after(error, replica, self._clock())
        except BackendClosed:
            raise self._closed() from None

    async def _call_once(
        self,
        replica: Replica,
        path: str,
        body: dict[str, Any],
        read: Callable[[bytes], T],
        work: float,
        request_key: object,
        is_model_run: bool,
    ) -> T:
        with ReplicaLease(replica, self._clock(), work, request_key) as lease:
            try:
                async with await self._open(replica, path, body) as exchange:
                    result = read(await exchange.read_all(_MAX_CALL_BYTES))
            except BackendError as error:
                self._judge(lease, error)
                raise
            # A server whose model fails may still count tokens.
            if is_model_run:
                lease.succeed()
            return result

    async def _open(self, replica: Replica, path: str, body: dict[str, Any]) -> ReplicaExchange:
        """Return an exchange whose answer has begun with status 200."""
        exchange = self._exchange(replica, path, body)
        try:
            await exchange.send()
        except RequestRejected as error:
            if "stream_options" not in body or "stream_options" not in str(error):
                raise
            # An older server: ask again without, and never again.
            self._asks_usage = False
            del body["stream_options"]
            exchange = self._exchange(replica, path, body)
            await exchange.send()
        return exchange

    def _exchange(self, replica: Replica, path: str, body: dict[str, Any]) -> ReplicaExchange:
        return ReplicaExchange(
            self._connected(),
            replica.url,
            path,
            orjson.dumps(body),
            headers=self._headers,
            timeouts=self._config.timeouts,
            waits=self._waits,
            secrets=self._secrets,
            clock=self._clock,
        )

    def _plan(self) -> AttemptPlan:
        if self._waits.is_closed:
            raise self._closed()
        max_rest_s = self._config.breaker.max_open_s
        return AttemptPlan(self._replicas, self._config.retry, self._rng, self.model_id, max_rest_s)

    async def _claim(self, plan: AttemptPlan, step: PlannedAttempt) -> Replica:
        if step.wait_s > 0:
            await self._waits.bounded(self._sleep(step.wait_s), step.wait_s + 1.0)
        return plan.claim(step, self._clock())

    def _judge(self, lease: ReplicaLease, error: BackendError) -> None:
        if blames_replica(error):
            lease.fail(self._clock())
        elif isinstance(error, BackendRefused):
            lease.refuse()
        elif not error.retryable:
            # It refused this request, as a working server does.
            lease.succeed()

    def _connected(self) -> httpx.AsyncClient:
        if self._client is None:
            self._client = build_client(self._config)
        return self._client

    def _closed(self) -> BackendUnavailable:
        return BackendUnavailable(f"Model {self.model_id!r} is closed.")


def _headers(config: RemoteModelConfig, api_key: str | None) -> Mapping[str, str]:
    headers = {"content-type": "application/json", "accept-encoding": "identity", **config.extra_headers}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    return headers


def _request_key(request: GenerateRequest) -> str:
    # The choices of one request have its id and a number: they are one request, too.
    return request.request_id[:_ID_CHARS]


def _work(request: GenerateRequest) -> float:
    num_tokens = min(request.sampling.max_tokens or _EXPECTED_TOKENS, _EXPECTED_TOKENS)
    return num_tokens + _PREFILL_WEIGHT * estimate_prompt_tokens(request)
