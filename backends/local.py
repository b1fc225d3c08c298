"""A tier served by the engine in this process: text on one side, token ids on the other."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from math import sqrt
from typing import Any

import torch

from backends.config import LocalModelConfig
from backends.errors import (
    BackendError,
    BackendFailure,
    BackendOverloaded,
    BackendUnavailable,
    ContextLengthExceeded,
    ModelLoadError,
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
    Priority,
    ScoreResult,
    Timings,
    TokenDelta,
    TokenLogprob,
    Usage,
)
from backends.weights import Checkpoint, Progress, WeightPool
from engine import errors as engine_errors
from engine import request as engine_request
from engine.config import EngineConfig
from engine.draft import Drafter, ModelDrafter, NGramDrafter
from engine.engine import Engine, Result
from engine.kv_cache import KVCache
from engine.sequence import Sequence as EngineSequence
from engine.sink import AsyncSink
from engine.speculator import Speculator
from engine.stop import StopAutomaton
from engine.text import TextStream

# Encoding runs at about 1 MB/s; longer prompts leave the event loop to others meanwhile.
_LONG_TEXT = 16_384
# A health check that waits longer than this on an engine with work to do and no step ended says so.
_STALLED_S = 60.0
# Of what an answer may have, the part that reasoning may take before it is closed, so that an answer follows.
_THINKING_SHARE = 0.75

_COPIED = tuple(f.name for f in dataclasses.fields(engine_request.SamplingParams))
_PRIORITY = {Priority.LIVE: engine_request.Priority.LIVE, Priority.BACKGROUND: engine_request.Priority.BACKGROUND}
_REASON = {
    engine_request.FinishReason.STOP: FinishReason.STOP,
    engine_request.FinishReason.LENGTH: FinishReason.LENGTH,
    engine_request.FinishReason.CANCELLED: FinishReason.CANCELLED,
    engine_request.FinishReason.ERROR: FinishReason.ERROR,
}


class LocalBackend:
    """A :class:`backends.protocol.Backend` over one engine.

    Parameters
    ----------
    model_id : the served model's name
    config : path, sizes, thinking, speculation
    weights : shared with other tiers, so that a checkpoint is loaded once; None makes one of its own
    drafter_path : path of the drafting model where ``config.drafter`` names another tier; None takes ``config.drafter``
        as a path
    on_progress : called from a worker thread with a path and the share of it that is loaded
    """

    def __init__(
        self,
        model_id: str,
        config: LocalModelConfig,
        *,
        weights: WeightPool | None = None,
        drafter_path: str | None = None,
        on_progress: Progress | None = None,
    ) -> None:
        self._model_id = model_id
        self._config = config
        self._owns_weights = weights is None
        self._weights = weights or WeightPool(threads=config.threads or 1)
        self._drafter_path = drafter_path or config.drafter
        self._on_progress = on_progress
        self._checkpoints: list[Checkpoint] = []
        self._engine: Engine | None = None
        self._starting = asyncio.Lock()
        self._closed = False

    # What it is

    @property
    def model_id(self) -> str:
        return self._model_id

    @property
    def context_length(self) -> int | None:
        """Tokens of prompt and answer together; None until started."""
        return None if self._engine is None else self._engine.context_length

    @property
    def capabilities(self) -> frozenset[Capability]:
        names: set[Capability] = {"generate", "score", "embed", "tokenize", "logprobs", "prompt_token_ids"}
        if self._checkpoints and self._checkpoints[0].tokenizer.think_tags is not None:
            names.add("thinking")
        return frozenset(names)

    @property
    def engine(self) -> Engine:
        """The engine, for measurements; raises ``BackendUnavailable`` until started."""
        if self._closed:
            raise BackendUnavailable(f"Model {self._model_id!r} is closed.")
        if self._engine is None:
            raise BackendUnavailable(f"Model {self._model_id!r} is still loading.", retry_after_s=5.0)
        return self._engine

    # Starting and closing

    async def start(self) -> None:
        """Load weights in a worker thread and make one token. Idempotent.

        Raises
        ------
        ModelLoadError
            The checkpoint, its drafter or its KV cache cannot be loaded; says which file or how many bytes.
        """
        async with self._starting:
            if self._engine is None and not self._closed:
                self._engine = await asyncio.to_thread(self._load)
                await self._engine.run(
                    engine_request.Request("warm-up", (0,), engine_request.SamplingParams(max_tokens=2))
                )

    def _load(self) -> Engine:
        config = self._config
        device = pick_device(config.device)
        acquire = partial(self._weights.acquire, dtype=config.dtype, device=device, progress=self._on_progress)
        target = acquire(config.path)
        self._checkpoints.append(target)
        engine_config = EngineConfig(
            kv_cache_bytes=config.kv_cache_bytes,
            context_length=config.context_length,
            max_num_seqs=config.max_num_seqs,
            max_batch_tokens=max(config.max_batch_tokens, config.max_num_seqs),
            max_draft_tokens=config.speculation.max_draft_tokens,
            threads=config.threads or 1,
        )
        try:
            drafter = self._make_drafter(target, engine_config, acquire)
            return Engine(
                target.model,
                engine_config,
                eos_token_ids=target.tokenizer.eos_token_ids,
                loop=self._weights.loop_for(device),
                speculator=None
                if drafter is None
                else Speculator(drafter, max_draft_tokens=engine_config.max_draft_tokens),
                name=self._model_id,
            )
        except (engine_errors.LoadError, ValueError) as error:
            raise ModelLoadError(f"{self._model_id} cannot be served: {error}") from error

    def _make_drafter(
        self, target: Checkpoint, config: EngineConfig, acquire: Callable[[str], Checkpoint]
    ) -> Drafter | None:
        mode = self._config.speculation.mode
        if mode == "off":
            return None
        if mode == "ngram":
            return NGramDrafter()
        assert self._drafter_path is not None
        draft = acquire(self._drafter_path)
        self._checkpoints.append(draft)
        if draft.tokenizer.fingerprint != target.tokenizer.fingerprint:
            raise ModelLoadError(
                f"{self._drafter_path} cannot draft for {self._config.path}: their tokenizers give tokens different "
                "ids. Use a drafter of the same family, or speculation.mode = 'ngram'."
            )
        context_length = min(config.context_length or target.model.config.context_length, _context_of(draft))
        num_blocks = -(-context_length // config.block_size) * min(config.max_num_seqs, 8)
        kv = KVCache(
            draft.model.config, num_blocks, config.block_size, dtype=draft.model.dtype, device=draft.model.device
        )
        return ModelDrafter(draft.model, kv, vocab_size=target.model.config.vocab_size)

    async def close(self) -> None:
        """End what runs, free weights that nobody else uses. Idempotent."""
        self._closed = True
        async with self._starting:
            engine, self._engine = self._engine, None
            if engine is not None:
                await asyncio.to_thread(engine.close)
            for checkpoint in self._checkpoints:
                self._weights.release(checkpoint)
            self._checkpoints.clear()
            if self._owns_weights:
                await asyncio.to_thread(self._weights.close)

    # Serving

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        """Yield deltas as they are made, then the ending.

        Raises
        ------
        BackendError
            Before the first delta, whatever went wrong.
        """
        engine = self.engine
        prompt_ids = await self._encode(request)
        try:
            call = self._prepare(engine, request, prompt_ids)
            sequence = engine.submit(call.request, call.sink)
        except engine_errors.EngineError as error:
            raise self._translate(error) from error
        ended = False
        try:
            if request.echo:
                yield TokenDelta(text=self._tokenizer.decode(prompt_ids) if request.prompt is None else request.prompt)
            async for event in call.events(self):
                ended = isinstance(event, Finished)
                yield event
        finally:
            if not ended and not call.failed:
                engine.cancel(sequence)
                await self._say_what_was_used(request, call, sequence)

    async def _say_what_was_used(self, request: GenerateRequest, call: _Call, sequence: EngineSequence) -> None:
        """Tell who abandoned a request its bill, once the step in progress is over."""
        if request.on_abandoned is None:
            return
        ending = None
        try:
            async with asyncio.timeout(1.0):
                ending = await call.drain()
        except (TimeoutError, asyncio.CancelledError):
            # Cancelled again while waiting: say what is known; the step in progress may add a token.
            pass
        if ending is None:
            ending = engine_request.Ending(
                engine_request.FinishReason.CANCELLED,
                num_prompt_tokens=sequence.num_prompt,
                num_output_tokens=sequence.num_output,
                num_cached_tokens=sequence.num_cached,
                compute_s=sequence.compute_s,
            )
        request.on_abandoned(dataclasses.replace(call.finished(self, ending), reason=FinishReason.CANCELLED))

    def _prepare(self, engine: Engine, request: GenerateRequest, prompt_ids: list[int]) -> _Call:
        sampling = request.sampling
        tokenizer = self._tokenizer
        eos = () if sampling.ignore_eos else engine.eos_token_ids
        thinking_open = request.messages is not None and tokenizer.is_thinking_open(prompt_ids)
        automaton = StopAutomaton(sampling.stop) if sampling.stop else None

        def text_stream() -> TextStream:
            return TextStream(
                tokenizer.bytes,
                stop=automaton,
                stop_ids=frozenset((*eos, *sampling.stop_token_ids)),
                tags=tokenizer.think_tags if request.messages is not None else None,
                thinking=thinking_open,
            )

        engine_side = engine_request.Request(
            request.request_id,
            tuple(prompt_ids),
            engine_request.SamplingParams(**{name: getattr(sampling, name) for name in _COPIED}),
            _PRIORITY[request.priority],
            score_from=1 if sampling.prompt_logprobs is not None and len(prompt_ids) > 1 else None,
            thinking=self._thinking_limit(engine, request, len(prompt_ids)) if thinking_open else None,
            speculate=request.extra.get("speculate", True) is not False,
            cache_salt=str(request.extra.get("cache_salt", "")),
            stop_check=text_stream() if automaton is not None else None,
        )
        return _Call(engine_side, AsyncSink(), text_stream())

    def _thinking_limit(self, engine: Engine, request: GenerateRequest, num_prompt: int) -> engine_request.Thinking:
        """The budget a request asks for, else a share of the answer's room; then the closing tag is written for it."""
        tags = self._tokenizer.think_tags
        assert tags is not None
        room = engine.context_length - num_prompt
        if request.sampling.max_tokens is not None:
            room = min(room, request.sampling.max_tokens)
        budget = request.extra.get("thinking_budget")
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 0):
            raise RequestRejected(
                f"thinking_budget is {budget!r}; expected a number of tokens, 0 or more.",
                status=400,
                param="thinking_budget",
            )
        limit = int(room * _THINKING_SHARE) if budget is None else budget
        close_ids = tuple(self._tokenizer.encode("\n</think>\n\n", add_special_tokens=False))
        return engine_request.Thinking(tags.close_id, close_ids, max(limit, 1))

    async def count_tokens(self, request: GenerateRequest) -> int | None:
        """Prompt length in tokens after the chat template."""
        self.engine  # noqa: B018 - raises until started
        return len(await self._encode(request))

    async def score(self, prompt: GenerateRequest, answer: str) -> ScoreResult:
        """Read ``answer`` after ``prompt`` in one prefill; a chat prompt does not think unless it asks to."""
        engine = self.engine
        if prompt.thinking is None:
            prompt = dataclasses.replace(prompt, thinking=False)
        prompt_ids = await self._encode(prompt)
        answer_ids = self._tokenizer.encode_plain(answer)
        if not answer_ids:
            return ScoreResult((), (), (), Usage(prompt_tokens=len(prompt_ids)))
        result = await self._run(
            engine,
            engine_request.Request(
                prompt.request_id,
                (*prompt_ids, *answer_ids),
                engine_request.SamplingParams(max_tokens=0),
                _PRIORITY[prompt.priority],
                score_from=len(prompt_ids),
            ),
        )
        ending = result.ending
        return ScoreResult(
            token_ids=tuple(answer_ids),
            logprobs=tuple(scored.logprob for scored in ending.prompt_logprobs),
            ranks=tuple(scored.rank for scored in ending.prompt_logprobs),
            usage=Usage(ending.num_prompt_tokens, cached_tokens=ending.num_cached_tokens),
            compute_s=ending.compute_s,
        )

    async def embed(self, texts: Sequence[str]) -> EmbedResult:
        """Mean of the last hidden states over each text's tokens, scaled to unit length."""
        engine = self.engine
        nothing = engine_request.SamplingParams(max_tokens=0)
        requests = [
            engine_request.Request("embed", tuple(self._encode_text(text)), nothing, pooled=True) for text in texts
        ]
        results = await asyncio.gather(*(self._run(engine, request) for request in requests))
        vectors = [_unit(result.ending.pooled or ()) for result in results]
        return EmbedResult(tuple(vectors), Usage(prompt_tokens=sum(r.ending.num_prompt_tokens for r in results)))

    async def health(self) -> Health:
        """Make one token by the path of any request."""
        began_s = time.perf_counter()
        probe = engine_request.Request("health", (0,), engine_request.SamplingParams(temperature=0.0, max_tokens=1))
        try:
            async with asyncio.timeout(_STALLED_S):
                result = await self._run(self.engine, probe)
        except (BackendError, TimeoutError) as error:
            detail = str(error) or f"no token in {_STALLED_S:.0f} s; {self._state()}"
            return Health(False, time.perf_counter() - began_s, detail)
        return Health(len(result.token_ids) == 1, time.perf_counter() - began_s)

    def _state(self) -> str:
        if self._engine is None:
            return "not loaded"
        stats = self._engine.stats()
        return (
            f"{stats.num_running} running, {stats.num_waiting} waiting, step {stats.num_steps} ended "
            f"{stats.last_step_s:.1f} s ago"
        )

    def load(self) -> Load:
        if self._engine is None:
            return Load()
        stats = self._engine.stats()
        return Load(
            running=stats.num_running,
            waiting=stats.num_waiting,
            kv_free_fraction=stats.kv_free_fraction,
            predicted_wait_s=stats.predicted_wait_s,
            acceptance_rate=stats.acceptance_rate,
        )

    # Between text and tokens

    @property
    def _tokenizer(self) -> Any:
        return self._checkpoints[0].tokenizer

    async def _encode(self, request: GenerateRequest) -> list[int]:
        if request.prompt_token_ids is not None:
            return list(request.prompt_token_ids)
        length = len(request.prompt or "") + sum(len(m.content) for m in request.messages or ())
        if length > _LONG_TEXT:
            return await asyncio.to_thread(self._encode_request, request)
        return self._encode_request(request)

    def _encode_request(self, request: GenerateRequest) -> list[int]:
        tokenizer = self._tokenizer
        try:
            if request.messages is None:
                if request.prompt is None:
                    raise RequestRejected("Give messages, prompt or prompt_token_ids.", status=400, param="messages")
                return list(tokenizer.encode(request.prompt))
            messages = [
                {"role": "system" if m.role == "developer" else m.role, "content": m.content}
                | ({} if m.name is None else {"name": m.name})
                for m in request.messages
            ]
            thinking = self._config.thinking if request.thinking is None else request.thinking
            return list(tokenizer.encode_chat(messages, thinking=thinking if tokenizer.has_thinking_switch else None))
        except engine_errors.EngineError as error:
            raise self._translate(error) from error

    def _encode_text(self, text: str) -> list[int]:
        try:
            return list(self._tokenizer.encode(text))
        except engine_errors.EngineError as error:
            raise self._translate(error, param="input") from error

    async def _run(self, engine: Engine, request: engine_request.Request) -> Result:
        try:
            return await engine.run(request)
        except engine_errors.EngineError as error:
            raise self._translate(error) from error

    def _translate(self, error: Exception, param: str | None = None) -> BackendError:
        """The engine's errors in this room's words; most specific first."""
        text = f"{self._model_id}: {error}"
        match error:
            case engine_errors.RequestTooLong():
                return ContextLengthExceeded(error.num_prompt_tokens, error.limit, error.max_tokens)
            case engine_errors.InvalidRequest():
                return RequestRejected(str(error), status=400, param=error.param)
            case engine_errors.EngineOverloaded():
                return BackendOverloaded(text, retry_after_s=max(error.retry_after_s, 1.0))
            case engine_errors.EngineClosed():
                return BackendUnavailable(text)
            case engine_errors.NoChatTemplate():
                return UnsupportedByBackend("messages", self._model_id)
            case engine_errors.TokenizerError():
                return RequestRejected(str(error), status=400, param=param or "messages")
            case engine_errors.NothingAllowed():
                return RequestRejected(str(error), status=400, param="logit_bias")
            case _:
                return BackendFailure(text)


class _Call:
    """One generation between the engine's events and the protocol's."""

    def __init__(self, request: engine_request.Request, sink: AsyncSink, text: TextStream) -> None:
        self.request = request
        self.sink = sink
        self.failed = False
        self._text = text
        self._num_pending = 0
        self._logprobs: list[TokenLogprob] = []

    async def events(self, backend: LocalBackend) -> AsyncIterator[Event]:
        """Deltas, then the ending; raises if the first thing to happen is an error."""
        began = False
        while True:
            event = await self.sink.get()
            if isinstance(event, engine_request.Ending):
                break
            self._take(event, backend)
            delta = self._delta()
            if delta is not None:
                began = True
                yield delta
        if event.error is not None and not began and not isinstance(event.error, engine_errors.EngineClosed):
            self.failed = True
            raise backend._translate(event.error) from event.error
        self._text.finish()
        delta = self._delta(last=True)
        if delta is not None:
            yield delta
        yield self.finished(backend, event)

    async def drain(self) -> engine_request.Ending:
        """The ending, whatever comes before it."""
        while True:
            event = await self.sink.get()
            if isinstance(event, engine_request.Ending):
                return event

    def _take(self, chunk: engine_request.Chunk, backend: LocalBackend) -> None:
        wants = self.request.sampling.logprobs is not None
        for index, token_id in enumerate(chunk.token_ids):
            self._num_pending += 1
            self._text.push(token_id)
            if wants and self._text.in_answer and not self._text.is_silent(token_id):
                self._logprobs.append(_logprob(backend, chunk.logprobs[index]))

    def _delta(self, *, last: bool = False) -> TokenDelta | None:
        """What can be shown now; tokens without visible text are counted with the next that has some."""
        reasoning, text = self._text.take()
        if not (reasoning or text or (last and self._num_pending)):
            return None
        delta = TokenDelta(text, reasoning, self._num_pending, tuple(self._logprobs))
        self._num_pending = 0
        self._logprobs = []
        return delta

    def finished(self, backend: LocalBackend, ending: engine_request.Ending) -> Finished:
        closed = isinstance(ending.error, engine_errors.EngineClosed)
        prompt_logprobs = None
        if self.request.sampling.prompt_logprobs is not None:
            prompt_logprobs = (None, *(_logprob(backend, scored) for scored in ending.prompt_logprobs))
        return Finished(
            reason=FinishReason.CANCELLED if closed else _REASON[ending.reason],
            usage=Usage(
                prompt_tokens=ending.num_prompt_tokens,
                completion_tokens=ending.num_output_tokens,
                cached_tokens=ending.num_cached_tokens,
                reasoning_tokens=min(self._text.num_reasoning_tokens, ending.num_output_tokens),
                draft_tokens=ending.num_draft_tokens,
                accepted_draft_tokens=ending.num_accepted_tokens,
            ),
            timings=Timings(ending.queue_s, ending.ttft_s, ending.itl_s, ending.total_s),
            compute_s=ending.compute_s,
            compute_measured=True,
            error=None if ending.error is None else str(backend._translate(ending.error)),
            prompt_logprobs=prompt_logprobs,
        )


def _logprob(backend: LocalBackend, scored: engine_request.TokenLogprob) -> TokenLogprob:
    text_of = backend._tokenizer.bytes.text_of
    return TokenLogprob(
        text_of(scored.token_id),
        scored.token_id,
        scored.logprob,
        tuple((text_of(token), token, logprob) for token, logprob in scored.top),
    )


def _unit(vector: Sequence[float]) -> tuple[float, ...]:
    length = sqrt(sum(x * x for x in vector)) or 1.0
    return tuple(x / length for x in vector)


def _context_of(checkpoint: Checkpoint) -> int:
    return checkpoint.model.config.context_length


def pick_device(name: str) -> str:
    """``auto`` is the first GPU, else the CPU."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
