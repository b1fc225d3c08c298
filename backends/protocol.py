"""The one protocol every tier speaks: text-level requests in, token deltas and exactly one ending out.

The gateway holds a :class:`Backend` per served model and knows nothing else about it. Two families implement it (the
in-process engine and OpenAI-compatible servers); ``backends.testing`` has the public fake. The conformance suite in
``tests.backends.conformance`` states the contract as tests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec
from msgspec import Struct


class FinishReason(StrEnum):
    """Says how a generation ended; every admitted request has exactly one."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CONTENT_FILTER = "content_filter"
    CANCELLED = "cancelled"
    ERROR = "error"


class Priority(StrEnum):
    """Orders requests when a tier is busy."""

    LIVE = "live"
    BACKGROUND = "background"


class Image(Struct, frozen=True, tag="image"):
    """An image by URL or as a ``data:`` URL; ``detail`` is the client's wish for resolution."""

    url: str
    detail: str | None = None


class Audio(Struct, frozen=True, tag="audio"):
    """Sound in base64, as ``wav`` or ``mp3``."""

    data: str
    format: str


class File(Struct, frozen=True, tag="file"):
    """A file as a ``data:`` URL, or as the client has it; mostly a PDF."""

    data: str
    name: str | None = None


Media = Image | Audio | File


class Thought(Struct, frozen=True):
    """A piece of a model's reasoning with its server's signature; of a redacted one that is its encrypted whole."""

    text: str
    signature: str
    is_redacted: bool = False


class ToolCall(Struct, frozen=True):
    """A call that a model made; ``arguments`` is JSON text as the model wrote it."""

    call_id: str
    name: str
    arguments: str


class Tool(Struct, frozen=True):
    """A function the model may call; ``parameters`` is JSON Schema, ``strict`` asks for calls that satisfy it."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = msgspec.field(default_factory=dict)
    strict: bool = False


class ToolChoice(Struct, frozen=True):
    """Whether a call is free, forbidden or required; ``names`` limits it to some tools."""

    mode: Literal["auto", "none", "required"] = "auto"
    names: tuple[str, ...] = ()
    parallel: bool = True


class OutputFormat(Struct, frozen=True):
    """Says what the answer's text must be; ``spec`` is the JSON Schema, regular expression, choices or grammar."""

    kind: Literal["text", "json_object", "json_schema", "regex", "choice", "grammar"] = "text"
    spec: Any = None
    strict: bool = False
    name: str = ""


FREE_CHOICE = ToolChoice()
PLAIN_TEXT = OutputFormat()


class Message(Struct, frozen=True):
    """One chat turn.

    Parameters
    ----------
    content : its text; where the turn holds media too, ``parts`` has both in order
    tool_calls : of an assistant's turn
    tool_call_id : of a tool's turn, the call that it answers
    reasoning : an assistant's own, as a client sent it back
    thoughts : what of it is signed, for servers that check it
    """

    role: str
    content: str
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str = ""
    parts: tuple[str | Media, ...] = ()
    thoughts: tuple[Thought, ...] = ()


class SamplingParams(Struct, frozen=True):
    """Says how the next token is drawn; OpenAI's and vLLM's names and defaults.

    ``max_tokens`` None means "up to the context". ``logprobs`` is the number of alternatives (0 = only the chosen
    token's, None = none). ``prompt_logprobs`` likewise for the prompt. ``logit_bias`` maps token id to an additive
    bias.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = msgspec.field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None


_PLAIN_SAMPLING = SamplingParams()


# Not frozen: each field would be set at four times the price, and every request makes one. Nobody changes it.
@dataclass(slots=True)
class GenerateRequest:
    """One generation. Exactly one of ``messages``, ``prompt`` and ``prompt_token_ids`` is given.

    ``thinking`` None leaves the tier's own default. ``speculate`` None leaves it to the tier. ``n`` is expanded by the
    gateway: a backend makes one answer per request. ``on_abandoned``, where given, is called once, from the event loop,
    when the iterator is closed or cancelled before its ending: with the ending (reason ``cancelled``) that says what
    was used until then, so that the bill of an abandoned request is right. A backend that cannot know need not call it.
    ``prediction`` is text that the answer (reasoning apart) may turn out to be: a backend with that capability answers
    quicker for it, the others leave it; the answer is the same either way.
    ``tools``, ``tool_choice`` and ``output_format`` are only given to a backend that is capable of them.
    ``caller`` labels who asks, and is not sent on: the failures of one caller alone do not close a server to others.
    ``before_retry``, where given, is awaited before a server is asked once more, which may be paid for as well; what it
    raises ends the generation.
    ``continued`` is the assistant's turn as far as somebody else has written it: a backend with the capability
    ``continue`` goes on behind its last character and yields only what is new. ``sampling.max_tokens`` is what is left
    of the limit; a stop string may have begun in it; pieces of a call that it holds go on under their index.
    """

    request_id: str
    messages: tuple[Message, ...] | None = None
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    sampling: SamplingParams = _PLAIN_SAMPLING
    priority: Priority = Priority.LIVE
    thinking: bool | None = None
    echo: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    on_abandoned: Callable[[Finished], None] | None = field(default=None, compare=False, repr=False)
    before_retry: Callable[[], Awaitable[None]] | None = field(default=None, compare=False, repr=False)
    prediction: str | None = None
    caller: str = ""
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = FREE_CHOICE
    output_format: OutputFormat = PLAIN_TEXT
    continued: Message | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its log-probability, and the likeliest alternatives (token text, token id, logprob)."""

    token: str
    token_id: int
    logprob: float
    top: tuple[tuple[str, int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a call: its id and name come once, with the first piece; ``arguments`` continue the JSON text.

    ``index`` counts an answer's calls. What the pieces of a finished call join to is never empty.
    """

    index: int
    call_id: str = ""
    name: str = ""
    arguments: str = ""


def join_calls(pieces: Iterable[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """Return the calls that pieces make, in the order in which they began."""
    calls: dict[int, tuple[str, str, list[str]]] = {}
    for piece in pieces:
        if piece.name:
            calls[piece.index] = (piece.call_id, piece.name, [])
        calls[piece.index][2].append(piece.arguments)
    return tuple([ToolCall(call_id, name, "".join(found)) for call_id, name, found in calls.values()])


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New visible text (never half a character), new reasoning, pieces of tool calls, and the tokens behind them.

    ``signed`` come after the reasoning: each signs what of it came since the one before, unless it is redacted.
    """

    text: str = ""
    reasoning: str = ""
    num_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    tool_calls: tuple[ToolCallDelta, ...] = ()
    signed: tuple[Thought, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one generation. ``completion_tokens`` includes ``reasoning_tokens``, as OpenAI counts.

    Of a prediction's tokens, those in the answer are accepted, the others rejected; neither is counted again.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds measured inside the backend: waiting for a place, first token, mean gap between tokens, whole."""

    queue_s: float = 0.0
    ttft_s: float = 0.0
    itl_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Finished:
    """The one ending of a generation.

    ``compute_s`` is device seconds (GPU, or CPU thread) attributed to the request: its share of every step it took part
    in; 0 with ``compute_measured`` False when the backend cannot know (a remote server). ``usage_estimated`` says that
    a server did not count its tokens, so the counts are ours, by what was seen of the text. ``stop_string`` is the one
    that ended the answer, where that is known.
    """

    reason: FinishReason
    usage: Usage = Usage()
    timings: Timings = Timings()
    compute_s: float = 0.0
    compute_measured: bool = False
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    usage_estimated: bool = False
    stop_string: str | None = None


Event = TokenDelta | Finished


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """Per-token natural-log probabilities of ``answer`` given ``prompt``; ``rank`` 0 means it was the likeliest."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]
    usage: Usage = Usage()
    compute_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EmbedResult:
    """float32 vectors, one per input, unit length."""

    vectors: tuple[tuple[float, ...], ...]
    usage: Usage = Usage()


@dataclass(frozen=True, slots=True)
class Load:
    """Reports a backend's own state now; cheap enough to read per routed request.

    ``num_cut`` and ``num_bad_usage`` only grow: answers of a remote server that went on past what was asked for, and
    those whose token counts could not be.

    ``max_running`` is how many answers are best computed at once: more should wait before the backend, where they can
    be turned away. None where it does not matter. Backends with the same ``computed_by`` take turns on one device, and
    share that number. ``has_kv_memory`` says that ``kv_free_fraction`` may run short. ``num_replicas`` are the servers
    that answer, each by itself.
    """

    running: int = 0
    waiting: int = 0
    kv_free_fraction: float = 1.0
    predicted_wait_s: float | None = None
    acceptance_rate: float | None = None
    num_cut: int = 0
    num_bad_usage: int = 0
    max_running: int | None = None
    computed_by: str | None = None
    has_kv_memory: bool = False
    num_replicas: int = 1


@dataclass(frozen=True, slots=True)
class Health:
    """Result of making one real token or, at a hosted server, of what costs nothing there."""

    ok: bool
    latency_s: float
    detail: str = ""


Capability = Literal[
    "generate", "score", "embed", "tokenize", "thinking", "logprobs", "prompt_token_ids", "prediction", "tools",
    "structured_output", "images", "audio", "files", "continue", "thinking_blocks",
]  # fmt: skip

MEDIA_CAPABILITIES: Mapping[type[Media], Capability] = {Image: "images", Audio: "audio", File: "files"}
"""What a model must be able to read for each kind of media."""


@runtime_checkable
class Backend(Protocol):
    """A served model.

    ``generate`` yields any number of :class:`TokenDelta`, then exactly one :class:`Finished`, also on failure after the
    first delta (reason ``error``). Failures before the first delta raise a :mod:`backends.errors` exception. Closing
    the iterator or cancelling its task at any point frees everything the request held within one step.
    """

    @property
    def model_id(self) -> str: ...

    @property
    def context_length(self) -> int | None: ...

    @property
    def capabilities(self) -> frozenset[Capability]: ...

    async def start(self) -> None:
        """Load weights or open connections. Idempotent."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[Event]: ...

    async def count_tokens(self, request: GenerateRequest, *, limit: int | None = None) -> int | None:
        """Prompt length in tokens after the chat template, None when unknowable.

        Raises
        ------
        ContextLengthExceeded
            It is more than ``limit``, by default the context, and counting on would be work for nothing.
        """

    async def score(self, prompt: GenerateRequest, answer: str) -> ScoreResult: ...

    async def embed(self, texts: Sequence[str]) -> EmbedResult: ...

    async def health(self) -> Health: ...

    def load(self) -> Load: ...

    async def close(self) -> None:
        """Cancel what runs, free everything. Idempotent."""
