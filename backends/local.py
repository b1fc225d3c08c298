"""Serves a tier by the engine in this process: text on one side, token ids on the other."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from math import sqrt
from typing import Final

from backends.config import LocalModelConfig
from backends.errors import (
    BackendError,
    BackendUnavailable,
    ContextLengthExceeded,
    ModelLoadError,
    RequestRejected,
    UnsupportedByBackend,
)
from backends.local_engine.begun_answer import prime
from backends.local_engine.engine_call import EngineCall
from backends.local_engine.engine_factory import ServedEngine, build, close
from backends.local_engine.engine_groups import EngineGroup
from backends.local_engine.errors import translate
from backends.local_engine.model_tools import offers_calls
from backends.local_engine.output_grammar import ConstraintBuilder, param_of, spec_of
from backends.local_engine.prompt_builder import PromptBuilder
from backends.protocol import (
    Capability,
    EmbedResult,
    Event,
    Finished,
    GenerateRequest,
    Health,
    Load,
    ScoreResult,
    TokenDelta,
    Usage,
)
from backends.weights import Progress, WeightPool
from engine import request as engine_request
from engine.engine import Engine, Result
from engine.errors import EngineError
from engine.request import Constraint
from engine.sequence import Sequence as EngineSequence
from engine.sink import AsyncSink

# A health check that waits longer than this says where the engine stands instead.
_STALLED_S = 60.0
# An abandoned request's bill is final one step after its cancellation; a longer wait than this is not worth it.
_BILL_S = 1.0
# A CPU computes no more tokens a second in a larger batch, and every answer in it takes longer: the built-in ladder on
# two cores answered 4.3 requests a second at 4 at once (median 0.6 s), 4.2 at 8 (1.5 s), 4.4 at 32 (4.7 s).
_CPU_PLACES = 8
_NOTHING = engine_request.SamplingParams(max_tokens=0)


class LocalBackend:
    """Implements :class:`backends.protocol.Backend` over one engine, which other models of its weights may use too.

    ``GenerateRequest.extra`` may hold ``speculate`` (False turns drafting off), ``thinking_budget`` (most tokens of
    reasoning) and ``cache_salt`` (only requests with the same salt share prefix-cache blocks).

    Parameters
    ----------
    model_id : the served model's name
    config : path, sizes, thinking, speculation
    weights : shared with other tiers, so that a checkpoint is loaded once; None makes one of its own
    group : the models of the engine, this one among them; None is this one alone, ``config.drafter`` being a path
    on_progress : called from a worker thread with a path and the share of it that is loaded
    """

    def __init__(
        self,
        model_id: str,
        config: LocalModelConfig,
        *,
        weights: WeightPool | None = None,
        group: EngineGroup | None = None,
        on_progress: Progress | None = None,
    ) -> None:
        self.model_id: Final = model_id
        self._config = config
        self._weights = weights or WeightPool()
        self._group = group or EngineGroup.alone(model_id, config, config.drafter)
        self._build = partial(build, self._group, self._weights, on_progress=on_progress)
        self._drafts = config.speculation.mode != "off"
        self._running: set[EngineSequence] = set()
        self._served: ServedEngine | None = None
        self._prompts: PromptBuilder | None = None
        self._constraints: ConstraintBuilder | None = None
        self._starting = asyncio.Lock()
        self._closed = False

    # What it is

    @property
    def context_length(self) -> int | None:
        """Return the tokens of prompt and answer together; None until started."""
        return None if self._served is None else self._served.engine.context_length

    @property
    def capabilities(self) -> frozenset[Capability]:
        names: set[Capability] = {
            "generate",
            "score",
            "embed",
            "tokenize",
            "logprobs",
            "prompt_token_ids",
            "prediction",
            "continue",
        }
        if self._prompts is not None and self._prompts.tokenizer.think_tags is not None:
            names.add("thinking")
        if self._constraints is not None:
            names.add("structured_output")
            if self._prompts is not None and self._prompts.tokenizer.template is not None:
                names.add("tools")
        return frozenset(names)

    @property
    def engine(self) -> Engine:
        """Return the engine, for measurements; raises ``BackendUnavailable`` unless started and not closed."""
        return self._ready()[0]

    def _ready(self) -> tuple[Engine, PromptBuilder]:
        if self._closed:
            raise BackendUnavailable(f"Model {self.model_id!r} is closed.")
        if self._served is None or self._prompts is None:
            raise BackendUnavailable(f"Model {self.model_id!r} is still loading.", retry_after_s=5.0)
        return self._served.engine, self._prompts

    # Starting and closing

    async def start(self) -> None:
        """Load weights in a worker thread and make one token. Idempotent; after a failure it may be tried again.

        Raises
        ------
        ModelLoadError
        """
        async with self._starting:
            if self._served is not None or self._closed:
                return
            served = await asyncio.to_thread(self._weights.engines.acquire, self._group, self._build)
            try:
                await served.engine.run(_probe("warm-up"))
            except EngineError as error:
                await self._let_go()
                raise ModelLoadError(f"{self.model_id} was loaded but made no token: {error}") from error
            tokenizer = served.checkpoints[0].tokenizer
            self._prompts = PromptBuilder(
                self.model_id, tokenizer, thinking=self._config.thinking, tool_format=self._config.tool_format
            )
            if served.grammars is not None:
                self._constraints = ConstraintBuilder(
                    self.model_id, served.grammars, tokenizer, thinking=self._config.thinking
                )
            self._served = served

    async def close(self) -> None:
        """End what runs with ``cancelled``, free weights that nobody else uses. Idempotent."""
        self._closed = True
        async with self._starting:
            served, self._served = self._served, None
            if self._prompts is not None:
                self._prompts.close()
            if self._constraints is not None:
                self._constraints.close()
            if served is not None:
                for sequence in self._running:
                    served.engine.cancel(sequence)
                await self._let_go()

    async def _let_go(self) -> None:
        await asyncio.to_thread(self._weights.engines.release, self._group, partial(close, weights=self._weights))

    # Serving

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        """Yield deltas as they are made, then the ending.

        Raises
        ------
        BackendError
            Before the first delta, whatever went wrong.
        """
        engine, prompts = self._ready()
        prompt_ids, begun_ids = await prompts.encode_whole(request, engine.context_length)
        predicted = await prompts.predicted(request, prompt_ids, engine.context_length)
        constraint = await self._constraint(request, prompts, prompt_ids, begun_ids)
        try:
            call = self._call(engine, prompts, request, prompt_ids, begun_ids, predicted, constraint)
            sequence = engine.submit(call.request, call.sink)
        except EngineError as error:
            raise translate(error, self.model_id, param=_param(request)) from error
        ended = False
        self._running.add(sequence)
        try:
            if request.echo:
                text = prompts.tokenizer.decode(prompt_ids) if request.prompt is None else request.prompt
                yield TokenDelta(text=text)
            async for event in call.events():
                ended = isinstance(event, Finished)
                yield event
        finally:
            self._running.discard(sequence)
            if not ended and not call.failed:
                engine.cancel(sequence)
                await _send_bill(request, call, sequence)

    async def _constraint(
        self, request: GenerateRequest, prompts: PromptBuilder, prompt_ids: tuple[int, ...], begun_ids: tuple[int, ...]
    ) -> Constraint | None:
        """Return the grammar that the answer must satisfy, if it must satisfy one."""
        if offers_calls(request) and request.messages is not None:
            return await self._call_constraint(request, prompts, prompt_ids, begun_ids)
        spec = spec_of(request.output_format)
        if spec is None:
            return None
        if self._constraints is None:
            raise UnsupportedByBackend("structured_output", self.model_id)
        param = param_of(request.output_format)
        return await self._constraints.build(request, prompt_ids, spec, param=param, begun_ids=begun_ids)

    async def _call_constraint(
        self, request: GenerateRequest, prompts: PromptBuilder, prompt_ids: tuple[int, ...], begun_ids: tuple[int, ...]
    ) -> Constraint:
        """Return the grammar of an answer with calls; only strict tools insist on schemas that can be enforced."""
        if self._constraints is None:
            raise UnsupportedByBackend("tools", self.model_id)
        build = partial(self._constraints.build, request, prompt_ids, param="tools", begun_ids=begun_ids)
        try:
            return await build(prompts.tools.grammar(request, with_schemas=True))
        except (RequestRejected, UnsupportedByBackend):
            return await build(prompts.tools.grammar(request, with_schemas=False))

    def _call(
        self,
        engine: Engine,
        prompts: PromptBuilder,
        request: GenerateRequest,
        prompt_ids: tuple[int, ...],
        begun_ids: tuple[int, ...],
        predicted: engine_request.Prediction | None,
        constraint: Constraint | None,
    ) -> EngineCall:
        text = prompts.text_stream(request, prompt_ids, engine.eos_token_ids)
        seam = prime(text, request, begun_ids, self.model_id)
        # The engine looks for stop strings on its own thread, so that it stops with the token that completes one.
        stop_check = None
        if request.sampling.stop:
            stop_check = prompts.text_stream(request, prompt_ids, engine.eos_token_ids)
            prime(stop_check, request, begun_ids, self.model_id)
        inner = prompts.to_engine(request, prompt_ids, context_length=engine.context_length, stop_check=stop_check)
        inner = dataclasses.replace(
            inner,
            prediction=predicted,
            constraint=constraint,
            speculate=inner.speculate and self._drafts,
            model=self.model_id,
        )
        return EngineCall(self.model_id, inner, AsyncSink(), text, prompts.tokenizer.bytes, seam)

    async def count_tokens(self, request: GenerateRequest, *, limit: int | None = None) -> int | None:
        """Return the prompt's length in tokens after the chat template."""
        engine, prompts = self._ready()
        prompt_ids, _ = await prompts.encode_whole(request, engine.context_length if limit is None else limit)
        return len(prompt_ids)

    async def score(self, prompt: GenerateRequest, answer: str) -> ScoreResult:
        """Read ``answer`` after ``prompt`` in one prefill; a chat prompt does not think unless it asks to."""
        engine, prompts = self._ready()
        if prompt.thinking is None:
            prompt = dataclasses.replace(prompt, thinking=False)
        prompt_ids = await prompts.encode(prompt, engine.context_length)
        answer_ids = await prompts.encode_answer(answer, engine.context_length)
        if not answer_ids:
            return ScoreResult((), (), (), Usage(prompt_tokens=len(prompt_ids)))
        ending = (await self._run(engine, prompts.score_request(prompt, prompt_ids, answer_ids))).ending
        return ScoreResult(
            token_ids=answer_ids,
            logprobs=tuple(scored.logprob for scored in ending.prompt_logprobs),
            ranks=tuple(scored.rank for scored in ending.prompt_logprobs),
            usage=Usage(ending.num_prompt_tokens, cached_tokens=ending.num_cached_tokens),
            compute_s=ending.compute_s,
        )

    async def embed(self, texts: Sequence[str]) -> EmbedResult:
        """Return the mean of the last hidden states over each text's tokens, scaled to unit length.

        Raises
        ------
        ContextLengthExceeded
            One text is too long; then none is computed.
        """
        engine, prompts = self._ready()
        inputs = await prompts.encode_inputs(texts, engine.context_length)
        if (longest := max(map(len, inputs))) > engine.context_length:
            raise ContextLengthExceeded(longest, engine.context_length, param="input")
        requests = [engine_request.Request("embed", tuple(ids), _NOTHING, pooled=True) for ids in inputs]
        results = await asyncio.gather(*(self._run(engine, request) for request in requests))
        vectors = [_unit(result.ending.pooled or ()) for result in results]
        return EmbedResult(tuple(vectors), Usage(prompt_tokens=sum(r.ending.num_prompt_tokens for r in results)))

    async def health(self) -> Health:
        """Make one token by the path of any request."""
        began_s = time.perf_counter()
        try:
            async with asyncio.timeout(_STALLED_S):
                result = await self._run(self.engine, _probe("health"))
        except (BackendError, TimeoutError) as error:
            return Health(False, time.perf_counter() - began_s, str(error) or self._state())
        return Health(bool(result.token_ids), time.perf_counter() - began_s)

    def _state(self) -> str:
        if self._served is None:
            return "not loaded"
        stats = self._served.engine.stats()
        return (
            f"no token in {_STALLED_S:.0f} s: {stats.num_running} running, {stats.num_waiting} waiting, "
            f"step {stats.num_steps} ended {stats.last_step_s:.1f} s ago"
        )

    def load(self) -> Load:
        """Return the load, exact and cheap enough to read before every routed request."""
        if self._served is None:
            return Load()
        stats = self._served.engine.stats()
        is_on_cpu = self._served.engine.core.runner.kv.device.type == "cpu"
        most = self._served.engine.config.max_num_seqs
        running, waiting = self._served.engine.count(self.model_id)
        return Load(
            running=running,
            waiting=waiting,
            kv_free_fraction=stats.kv_free_fraction,
            predicted_wait_s=stats.predicted_wait_s,
            acceptance_rate=stats.acceptance_rate if self._drafts else None,
            max_running=self._config.max_outstanding or (min(most, _CPU_PLACES) if is_on_cpu else most),
            # Engines on a CPU take turns on one thread; models of one set of weights share an engine.
            computed_by="cpu" if is_on_cpu else f"engine {self._group.members[0]}",
            has_kv_memory=True,
        )

    async def _run(self, engine: Engine, request: engine_request.Request) -> Result:
        try:
            return await engine.run(dataclasses.replace(request, model=self.model_id))
        except EngineError as error:
            raise translate(error, self.model_id, param="input") from error


async def _send_bill(request: GenerateRequest, call: EngineCall, sequence: EngineSequence) -> None:
    """Tell who abandoned a request what it used, once the step in progress is over."""
    if request.on_abandoned is None:
        return
    ending = None
    try:
        async with asyncio.timeout(_BILL_S):
            ending = await call.drain()
    except (TimeoutError, asyncio.CancelledError):
        # Cancelled again while waiting: what is counted so far must do; the step in progress may add a token.
        pass
    request.on_abandoned(call.abandoned(sequence, ending))


def _probe(name: str) -> engine_request.Request:
    return engine_request.Request(name, (0,), engine_request.SamplingParams(temperature=0.0, max_tokens=1))


def _param(request: GenerateRequest) -> str:
    """Return the field that a prompt came in."""
    return "prompt" if request.messages is None else "messages"


def _unit(vector: Sequence[float]) -> tuple[float, ...]:
    length = sqrt(sum(x * x for x in vector)) or 1.0
    return tuple(x / length for x in vector)
