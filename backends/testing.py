"""Fakes a backend, publicly and typed: it echoes, on script, without a network or a model.

It keeps the whole protocol (stop strings, ``max_tokens``, logprobs, usage, cancellation, errors), so tests of anything
above a backend can rely on it, and the gateway's own overhead can be measured with nothing else in the way. The fake
*server* for tests of the remote backend is :mod:`tests.backends.provider.server`.
"""

from __future__ import annotations

import asyncio
import re
import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import takewhile
from math import sqrt
from operator import eq
from typing import Final, get_args

from backends.errors import BackendError, BackendOverloaded, BackendUnavailable, ContextLengthExceeded
from backends.protocol import (
    Capability,
    EmbedResult,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    Health,
    Load,
    SamplingParams,
    ScoreResult,
    Timings,
    TokenDelta,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    Usage,
)

# Like a BPE vocabulary, a space belongs to the word after it. Every character is in exactly one token.
_TOKEN = re.compile(r"\s?\w+|\s?[^\w\s]+|\s+")

# Who asks for it may go on with another's answer: a test of failures rarely means that.
_ALL: frozenset[Capability] = frozenset(get_args(Capability)) - {"continue"}
_EMBED_DIM = 16


def split_tokens(text: str) -> list[str]:
    """Split ``text`` into the fake's tokens; joined, they are the text again."""
    return _TOKEN.findall(text)


def token_id(token: str) -> int:
    """Return the fake's id of a token: stable across processes, not invertible."""
    return zlib.crc32(token.encode("utf-8", "surrogatepass")) & 0xFFFF


@dataclass(frozen=True, slots=True)
class Script:
    """Says what one generation does.

    ``text`` None echoes the last message. ``tool_calls`` come after the text, and the answer ends with them. Delays are
    in seconds; a ``token_delay_s`` of 0 gives the event loop one turn per delta, None gives it none. ``fail_before`` is
    raised before the first delta; ``fail_after`` and ``hang_after`` count completion tokens already sent.
    ``prompt_tokens`` overrides the count in ``Usage``.
    """

    text: str | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    first_delay_s: float = 0.0
    token_delay_s: float | None = 0.0
    tokens_per_delta: int = 1
    fail_before: BackendError | None = None
    fail_after: int | None = None
    hang_after: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    compute_s: float = 0.0


ScriptSource = Script | Sequence[Script] | Callable[[GenerateRequest], Script]


class EchoBackend:
    """Fakes a backend that answers with its prompt, or with what its script says.

    Parameters
    ----------
    model_id : the served model's name
    script : one script for every request; a sequence, played in order with the last one repeated; or a function of the
        request
    max_running : more concurrent generations than this are refused with :class:`BackendOverloaded`
    sleep, clock : injected time, in seconds

    Attributes
    ----------
    requests : every request given to ``generate``, in order
    num_running, num_finished, num_cancelled, num_failed : generations by ending; when idle the last three sum to
        the number admitted

    Examples
    --------
    >>> backend = EchoBackend("tier-1", Script(text="4", fail_after=0))
    """

    def __init__(
        self,
        model_id: str = "echo",
        script: ScriptSource = Script(),
        *,
        context_length: int | None = 8192,
        capabilities: frozenset[Capability] = _ALL,
        max_running: int | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model_id: Final = model_id
        self._script = script
        self.context_length: Final = context_length
        self.capabilities: Final = capabilities
        self._max_running = max_running
        self._sleep = sleep
        self._clock = clock
        self._closed = asyncio.Event()
        self.requests: list[GenerateRequest] = []
        self.num_running = 0
        self.num_finished = 0
        self.num_cancelled = 0
        self.num_failed = 0

    async def start(self) -> None:
        """Do nothing: there is nothing to load."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        """Yield the scripted answer as deltas, then one ending.

        Raises
        ------
        BackendUnavailable : the backend is closed
        BackendOverloaded : ``max_running`` generations are running
        ContextLengthExceeded : prompt and ``max_tokens`` do not fit ``context_length``
        BackendError : whatever ``Script.fail_before`` holds
        """
        script = self._next_script(request)
        num_prompt = self._admit(request, script)
        self.requests.append(request)
        self.num_running += 1
        ending: FinishReason | None = None
        sent = 0
        try:
            if script.first_delay_s > 0:
                await self._sleep(script.first_delay_s)
            if script.fail_before is not None:
                ending = FinishReason.ERROR
                raise script.fail_before
            async with aclosing(self._play(request, script, num_prompt)) as events:
                async for event in events:
                    if isinstance(event, Finished):
                        ending = event.reason
                    else:
                        sent += event.num_tokens
                    yield event
        finally:
            self.num_running -= 1
            self._count(ending)
            if ending is None and request.on_abandoned is not None:
                request.on_abandoned(Finished(FinishReason.CANCELLED, Usage(num_prompt, sent)))

    def _next_script(self, request: GenerateRequest) -> Script:
        if isinstance(self._script, Script):
            return self._script
        if callable(self._script):
            return self._script(request)
        return self._script[min(len(self.requests), len(self._script) - 1)]

    def _admit(self, request: GenerateRequest, script: Script) -> int:
        if self._closed.is_set():
            raise BackendUnavailable(f"Model {self.model_id!r} is closed.")
        if self._max_running is not None and self.num_running >= self._max_running:
            raise BackendOverloaded(f"Model {self.model_id!r} runs {self.num_running} requests.", retry_after_s=1.0)
        num_prompt = count_prompt_tokens(request) if script.prompt_tokens is None else script.prompt_tokens
        if self.context_length is not None:
            room = self.context_length - num_prompt
            if room < max(1, request.sampling.max_tokens or 1):
                raise ContextLengthExceeded(num_prompt, self.context_length, request.sampling.max_tokens)
        return num_prompt

    async def _play(self, request: GenerateRequest, script: Script, num_prompt: int) -> AsyncGenerator[Event, None]:
        started = self._clock()
        if request.echo:
            yield TokenDelta(text=prompt_text(request))
        plan = script_answer(request, script)
        first_s, sent = 0.0, 0
        # Checked before each delta, so that 0 hangs or fails before anything was said.
        for delta in plan.deltas:
            if script.hang_after is not None and sent >= script.hang_after:
                await self._closed.wait()
            if (script.fail_after is not None and sent >= script.fail_after) or self._closed.is_set():
                break
            sent += delta.num_tokens
            first_s = first_s or self._clock() - started
            yield delta
            if script.token_delay_s is not None:
                await self._sleep(script.token_delay_s)
        if script.hang_after is not None and sent >= script.hang_after:
            await self._closed.wait()
        yield self._ending(request, script, plan, num_prompt, sent, first_s, self._clock() - started)

    def _ending(
        self,
        request: GenerateRequest,
        script: Script,
        plan: ScriptedAnswer,
        num_prompt: int,
        sent: int,
        first_s: float,
        total_s: float,
    ) -> Finished:
        reason, error = plan.reason, None
        if self._closed.is_set():
            reason = FinishReason.CANCELLED
        elif script.fail_after is not None and sent >= script.fail_after:
            reason, error = FinishReason.ERROR, f"scripted failure after {sent} tokens"
        reasoning = min(sent, plan.num_reasoning)
        itl_s = (total_s - first_s) / (sent - 1) if sent > 1 else 0.0
        wants_prompt = request.sampling.prompt_logprobs is not None
        return Finished(
            reason=reason,
            usage=replace(
                Usage(num_prompt, sent, cached_tokens=script.cached_tokens, reasoning_tokens=reasoning),
                **_prediction_counts(request.prediction, plan.text),
            ),
            timings=Timings(ttft_s=first_s, itl_s=itl_s, total_s=total_s),
            compute_s=script.compute_s,
            compute_measured=script.compute_s > 0,
            error=error,
            prompt_logprobs=_prompt_logprobs(request) if wants_prompt else None,
            stop_string=plan.stop_string if reason is FinishReason.STOP else None,
        )

    def _count(self, ending: FinishReason | None) -> None:
        if ending is None or ending is FinishReason.CANCELLED:
            self.num_cancelled += 1
        elif ending is FinishReason.ERROR:
            self.num_failed += 1
        else:
            self.num_finished += 1

    async def count_tokens(self, request: GenerateRequest, *, limit: int | None = None) -> int | None:
        """Return the prompt's length in the fake's tokens."""
        return count_prompt_tokens(request)

    async def score(self, prompt: GenerateRequest, answer: str) -> ScoreResult:
        """Score each token of ``answer`` by a fixed function of its text."""
        entries = [_logprob(token, 0) for token in split_tokens(answer)]
        return ScoreResult(
            token_ids=tuple(entry.token_id for entry in entries),
            logprobs=tuple(entry.logprob for entry in entries),
            ranks=tuple(entry.token_id % 3 for entry in entries),
            usage=Usage(prompt_tokens=count_prompt_tokens(prompt) + len(entries)),
        )

    async def embed(self, texts: Sequence[str]) -> EmbedResult:
        """Return unit vectors that depend on the bag of tokens."""
        num_tokens = sum(len(split_tokens(text)) for text in texts)
        return EmbedResult(tuple(_embed(text) for text in texts), Usage(prompt_tokens=num_tokens))

    async def health(self) -> Health:
        """Make one token by the same path as any request."""
        started = self._clock()
        probe = GenerateRequest("health", prompt="ping", sampling=SamplingParams(max_tokens=1))
        try:
            events = [event async for event in self.generate(probe)]
        except BackendError as error:
            return Health(False, self._clock() - started, str(error))
        ending = events[-1]
        assert isinstance(ending, Finished)
        ok = ending.reason in (FinishReason.STOP, FinishReason.LENGTH)
        return Health(ok, self._clock() - started, ending.error or "")

    def load(self) -> Load:
        return Load(running=self.num_running)

    async def close(self) -> None:
        """End what runs with ``cancelled`` and refuse what comes."""
        self._closed.set()


@dataclass(frozen=True, slots=True)
class ScriptedAnswer:
    """Holds the deltas an undisturbed generation sends, and how it ends."""

    deltas: tuple[TokenDelta, ...]
    reason: FinishReason
    num_reasoning: int
    stop_string: str | None = None

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)


def script_answer(request: GenerateRequest, script: Script) -> ScriptedAnswer:
    """Apply stop strings, ``max_tokens``, ``ignore_eos`` and logprobs to what the script would say."""
    sampling = request.sampling
    answer = script.text if script.text is not None else last_text(request)
    begun = "" if request.continued is None else request.continued.content
    answer = answer.removeprefix(begun)
    whole = begun + answer
    found = [(at, stop) for stop in sampling.stop if (at := whole.find(stop)) >= 0]
    end, stop_string = min(found, default=(len(whole), None))
    cut = max(0, end - len(begun))
    reasoning = split_tokens(script.reasoning) if request.thinking is not False else []
    tokens = split_tokens(answer[:cut])
    if sampling.ignore_eos and sampling.max_tokens is not None and cut == len(answer):
        wanted = sampling.max_tokens - len(reasoning)
        tokens = (tokens * (wanted // max(1, len(tokens)) + 1))[: max(0, wanted)] if tokens else []
    limit = len(reasoning) + len(tokens) if sampling.max_tokens is None else sampling.max_tokens
    is_cut_short = len(reasoning) + len(tokens) > limit or sampling.ignore_eos
    reasoning = reasoning[:limit]
    tokens = tokens[: limit - len(reasoning)]
    deltas = [*_deltas(reasoning, "reasoning", script, sampling), *_deltas(tokens, "text", script, sampling)]
    reason = FinishReason.LENGTH if is_cut_short else FinishReason.STOP
    if script.tool_calls and reason is FinishReason.STOP:
        deltas += [delta for index, call in enumerate(script.tool_calls) for delta in _call_deltas(index, call)]
        reason = FinishReason.TOOL_CALLS
    return ScriptedAnswer(tuple(deltas), reason, len(reasoning), stop_string if reason is FinishReason.STOP else None)


def _call_deltas(index: int, call: ToolCall) -> list[TokenDelta]:
    """Return a call in pieces: its beginning, then its arguments token by token."""
    pieces = [ToolCallDelta(index, call.call_id, call.name)]
    pieces += [ToolCallDelta(index, arguments=token) for token in split_tokens(call.arguments)]
    return [TokenDelta(num_tokens=1, tool_calls=(piece,)) for piece in pieces]


def _deltas(tokens: list[str], where: str, script: Script, sampling: SamplingParams) -> list[TokenDelta]:
    size = script.tokens_per_delta
    groups = [tokens[at : at + size] for at in range(0, len(tokens), size)]
    deltas = []
    for group in groups:
        entries = () if sampling.logprobs is None else tuple(_logprob(token, sampling.logprobs) for token in group)
        delta = TokenDelta(num_tokens=len(group), logprobs=entries)
        words = "".join(group)
        deltas.append(replace(delta, text=words) if where == "text" else replace(delta, reasoning=words))
    return deltas


def _prediction_counts(prediction: str | None, answer: str) -> dict[str, int]:
    """Count accepted and rejected tokens: a predicted token is accepted while all before it were."""
    predicted = split_tokens(prediction or "")
    agrees = map(eq, predicted, split_tokens(answer))
    accepted = sum(1 for _ in takewhile(bool, agrees))
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": len(predicted) - accepted}


def last_text(request: GenerateRequest) -> str:
    """Return the text a request ends with: what the fake repeats."""
    if request.messages is not None:
        return request.messages[-1].content if request.messages else ""
    return prompt_text(request)


def prompt_text(request: GenerateRequest) -> str:
    """Return the whole prompt as text; token ids are written as numbers."""
    if request.messages is not None:
        return "\n".join(message.content for message in request.messages)
    if request.prompt_token_ids is not None:
        return " ".join(map(str, request.prompt_token_ids))
    return request.prompt or ""


def count_prompt_tokens(request: GenerateRequest) -> int:
    """Return the prompt's length: given ids as they are, else the fake's tokens, at least one."""
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    begun = "" if request.continued is None else request.continued.content
    if request.messages is not None:
        return max(
            1, sum(len(split_tokens(message.content)) for message in request.messages) + len(split_tokens(begun))
        )
    return max(1, len(split_tokens((request.prompt or "") + begun)))


def _logprob(token: str, num_top: int) -> TokenLogprob:
    # The chosen token keeps at least e^-1 of the mass, so alternatives below are consistent with it.
    identity = token_id(token)
    logprob = -0.01 * (1 + identity % 100)
    top = [(token, identity, logprob)]
    top += [(f"{token}~{rank}", (identity + rank) & 0xFFFF, logprob - 5.0 * rank) for rank in range(1, num_top)]
    return TokenLogprob(token, identity, logprob, tuple(top[:num_top]))


def _prompt_logprobs(request: GenerateRequest) -> tuple[TokenLogprob | None, ...]:
    num_top = request.sampling.prompt_logprobs or 0
    tokens = split_tokens(prompt_text(request))
    return (None, *(_logprob(token, num_top) for token in tokens[1:]))


def _embed(text: str) -> tuple[float, ...]:
    values = [1e-3] * _EMBED_DIM
    for token in split_tokens(text):
        values[token_id(token) % _EMBED_DIM] += 1.0
    norm = sqrt(sum(value * value for value in values))
    return tuple(value / norm for value in values)
