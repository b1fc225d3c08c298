"""Encodes answers: what every protocol's encoder does, and what those of chat and plain completions share.

A stream's frames differ in a few characters, so everything around those is encoded once per stream. The parts of a
frame, in order: what it is (id, object, created, model), one choice, and ``"usage":null`` where usage was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import orjson

from backends.protocol import (
    Finished,
    FinishReason,
    Thought,
    TokenDelta,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    Usage,
    join_calls,
)
from gateway.api import sse
from gateway.api.request import InferenceRequest


@dataclass(slots=True)
class AnswerChoice:
    """One choice. ``finished`` is None while it runs; what was sent is what ``texts`` and ``reasonings`` join to.

    ``thoughts`` is what of the reasoning was signed, ``num_signed`` the number of its pieces. ``wants_logprobs`` says
    that its caller asked for log-probabilities: an answer that was all thought has none, and an empty list says so.
    ``num_billed`` are those of its tokens that a tier wrote which failed. ``scored`` are the log-probabilities of the
    answer's own tokens, kept where its tier's confidence is asked for.
    """

    index: int
    texts: list[str] = field(default_factory=list)
    reasonings: list[str] = field(default_factory=list)
    call_pieces: list[ToolCallDelta] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_tokens: int = 0
    num_billed: int = 0
    finished: Finished | None = None
    scored: list[float] | None = None
    wants_logprobs: bool = False
    thoughts: list[Thought] = field(default_factory=list)
    num_signed: int = 0

    def sign(self, signed: Sequence[Thought]) -> None:
        """Keep what signs the reasoning since the last signature."""
        for each in signed:
            if not each.is_redacted:
                each = Thought("".join(self.reasonings[self.num_signed :]), each.signature)
                self.num_signed = len(self.reasonings)
            self.thoughts.append(each)

    def score(self, delta: TokenDelta, *, is_wanted: bool) -> TokenDelta:
        """Keep what a delta says of its tokens' probability; the delta as the caller sees it.

        Parameters
        ----------
        is_wanted : the caller asked for log-probabilities too
        """
        assert self.scored is not None, "nobody asked for its confidence"
        self.scored += [each.logprob for each in delta.logprobs]
        return delta if is_wanted else replace(delta, logprobs=())

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def shown(self) -> str:
        """The text and the calls, as one text for the log."""
        if not self.call_pieces:
            return self.text
        calls = [f"calls {call.name}: {call.arguments}" for call in self.tool_calls]
        return "\n".join([self.text, *calls] if self.texts else calls)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls so far."""
        return join_calls(self.call_pieces) if self.call_pieces else ()

    @property
    def reasoning(self) -> str:
        return "".join(self.reasonings)

    @property
    def finish_reason(self) -> FinishReason:
        assert self.finished is not None, "an answer that runs has no ending"
        return self.finished.reason


# OpenAI writes this for "not among the likeliest"; JSON has no minus infinity.
_LEAST_LOGPROB = -9999.0


@dataclass(slots=True)
class ResponseHead:
    """Holds what every frame of one response repeats.

    ``num_prompt_tokens`` is as the routing took it, an estimate where no tier had to count; None where nobody could.
    """

    request_id: str
    created_s: int
    model: str
    fingerprint: str
    num_prompt_tokens: int | None = None


@dataclass(slots=True)
class AnswerEnd:
    """What is known of an answer at its end: every choice, the counts, what it was answered by and what it cost."""

    choices: Sequence[AnswerChoice]
    usage: Usage
    note: Mapping[str, Any]


class AnswerEncoder(Protocol):
    """Encodes one response of one protocol.

    A stream takes ``add`` for each piece of the answer, then ``end``; where it fails after its first byte,
    ``error_event`` is its end. A response that is not streamed takes ``whole`` once. What ``end`` and ``whole`` return
    is sent only after the commit.

    ``ping`` keeps a silent stream alive, before its first event too: what the protocol's clients skip, or nothing.
    """

    ping: ClassVar[bytes]

    def __init__(self, head: ResponseHead, request: InferenceRequest) -> None: ...

    def add(self, choice: AnswerChoice, delta: TokenDelta) -> bytes:
        """The frames of some new text, reasoning or pieces of calls; empty when there is nothing to show."""

    def end(self, end: AnswerEnd) -> bytes:
        """The last frames."""

    def whole(self, end: AnswerEnd) -> bytes:
        """The whole response at once."""

    def error_event(self, error: Mapping[str, Any]) -> bytes:
        """The frames that end a broken stream, from the error object that its caller would have got before it."""


class CompletionsEncoder:
    """Encodes completions: chat and plain ones are subclasses that say how each piece looks.

    Each choice of a stream is opened before its first delta. ``holds_back``: a stream's choice is sent in one piece
    when it has ended, because what belongs at its beginning (the probabilities of an echoed prompt) is only known then.
    """

    id_prefix: ClassVar[str]
    object_name: ClassVar[str]
    chunk_object_name: ClassVar[str]
    ping: ClassVar[bytes] = sse.PING

    def __init__(self, head: ResponseHead, request: InferenceRequest) -> None:
        self._head = head
        self._include_usage = request.include_usage
        self._holds_back = request.stream and request.echo and request.sampling.prompt_logprobs is not None
        self._opened: set[int] = set()
        self._before = b""
        self._after = b'],"usage":null}\n\n' if self._include_usage else b"]}\n\n"

    def opening(self, index: int) -> bytes:
        """The frames before a choice's first delta."""
        raise NotImplementedError

    def delta(self, index: int, delta: TokenDelta) -> bytes:
        """The frame of some new text; empty when there is nothing to show."""
        raise NotImplementedError

    def ending(self, index: int, reason: FinishReason) -> bytes:
        """The frame that ends a choice."""
        raise NotImplementedError

    def held(self, answer: AnswerChoice) -> bytes:
        """The frame of a finished choice that was held back."""
        raise NotImplementedError

    def choice(self, answer: AnswerChoice) -> dict[str, Any]:
        """A finished choice of a response that is not streamed."""
        raise NotImplementedError

    def add(self, choice: AnswerChoice, delta: TokenDelta) -> bytes:
        if self._holds_back:
            return b""
        index = choice.index
        if index in self._opened:
            return self.delta(index, delta)
        return self._open(index) + self.delta(index, delta)

    def end(self, end: AnswerEnd) -> bytes:
        frames = [self._end_choice(choice) for choice in end.choices]
        if self._include_usage:
            frames.append(self._usage_frame(end))
        else:
            frames.append(sse.comment(orjson.dumps(end.note)))
        return b"".join(frames) + sse.DONE

    def whole(self, end: AnswerEnd) -> bytes:
        body = self._fields(self.object_name)
        body["choices"] = [self.choice(choice) for choice in end.choices]
        body["usage"], body["suffice"] = usage_json(end.usage), end.note
        return orjson.dumps(body)

    def error_event(self, error: Mapping[str, Any]) -> bytes:
        return sse.error(error)

    def _open(self, index: int) -> bytes:
        if not self._opened:
            # What every frame repeats.
            fields = orjson.dumps(self._fields(self.chunk_object_name))[:-1]
            self._before = b"data: " + fields + b',"choices":['
        self._opened.add(index)
        return self.opening(index)

    def _end_choice(self, choice: AnswerChoice) -> bytes:
        opening = b"" if choice.index in self._opened else self._open(choice.index)
        held = self.held(choice) if self._holds_back else b""
        return opening + held + self.ending(choice.index, choice.finish_reason)

    def _usage_frame(self, end: AnswerEnd) -> bytes:
        """The frame after all choices that carries the counts and what the request was answered by."""
        body = self._fields(self.chunk_object_name)
        return sse.event(orjson.dumps(body | {"choices": [], "usage": usage_json(end.usage), "suffice": end.note}))

    def _fields(self, object_name: str) -> dict[str, Any]:
        head = self._head
        return {
            "id": f"{self.id_prefix}-{head.request_id}",
            "object": object_name,
            "created": head.created_s,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
        }


def usage_json(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_prediction_tokens,
            "rejected_prediction_tokens": usage.rejected_prediction_tokens,
        },
    }


def finite(logprob: float) -> float:
    """A log-probability that JSON can carry."""
    return logprob if logprob > _LEAST_LOGPROB else _LEAST_LOGPROB


def token_bytes(token: str) -> list[int]:
    """UTF-8 of a token's text, as OpenAI lists it."""
    return list(token.encode("utf-8", "replace"))


def logprob_json(entry: TokenLogprob) -> dict[str, Any]:
    """One token of a chat answer's ``logprobs.content``."""
    return {
        "token": entry.token,
        "logprob": finite(entry.logprob),
        "bytes": token_bytes(entry.token),
        "top_logprobs": [
            {"token": token, "logprob": finite(logprob), "bytes": token_bytes(token)} for token, _, logprob in entry.top
        ],
    }
