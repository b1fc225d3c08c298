"""Encodes answers: what chat and plain completions share.

A stream's frames differ in a few characters, so everything around those is encoded once per stream. The parts of a
frame, in order: what it is (id, object, created, model), one choice, and ``"usage":null`` where usage was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import orjson

from backends.protocol import (
    Finished,
    FinishReason,
    TokenDelta,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    Usage,
    join_calls,
)
from gateway.api import sse


@dataclass(slots=True)
class AnswerChoice:
    """One choice. ``finished`` is None while it runs; what was sent is what ``texts`` and ``reasonings`` join to.

    ``wants_logprobs`` says that its caller asked for log-probabilities: an answer that was all thought has none, and an
    empty list says so. ``scored`` are the log-probabilities of the answer's own tokens, kept where its tier's
    confidence is asked for.
    """

    index: int
    texts: list[str] = field(default_factory=list)
    reasonings: list[str] = field(default_factory=list)
    call_pieces: list[ToolCallDelta] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_tokens: int = 0
    finished: Finished | None = None
    scored: list[float] | None = None
    wants_logprobs: bool = False

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
    """Holds what every frame of one response repeats."""

    request_id: str
    created_s: int
    model: str
    fingerprint: str


class AnswerEncoder:
    """Formats one response; a protocol's encoder is a subclass that says how each event looks.

    A stream is driven by the events of its answer: ``start_stream`` once; for each choice ``opening``, a ``delta`` for
    each piece of text, reasoning or tool call with its log-probabilities, ``ending``; last ``usage_frame``. A response
    that is not streamed takes ``choice`` for each and ``body`` once.

    ``holds_back``: a stream's choice is sent in one piece when it has ended, because what belongs at its beginning is
    only known then.
    """

    id_prefix: ClassVar[str]
    object_name: ClassVar[str]
    chunk_object_name: ClassVar[str]

    def __init__(self, head: ResponseHead, *, include_usage: bool = False, holds_back: bool = False) -> None:
        self._head = head
        self.holds_back = holds_back
        self._before = b""
        self._after = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def start_stream(self) -> None:
        """Encode what every frame repeats; before the first one."""
        fields = orjson.dumps(self._fields(self.chunk_object_name))[:-1]
        self._before = b"data: " + fields + b',"choices":['

    def _fields(self, object_name: str) -> dict[str, Any]:
        head = self._head
        return {
            "id": f"{self.id_prefix}-{head.request_id}",
            "object": object_name,
            "created": head.created_s,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
        }

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

    def usage_frame(self, usage: Mapping[str, Any], note: Mapping[str, Any]) -> bytes:
        """The frame after all choices that carries the counts and what the request was answered by."""
        body = self._fields(self.chunk_object_name) | {"choices": [], "usage": usage, "suffice": note}
        return sse.event(orjson.dumps(body))

    def body(self, choices: Sequence[Mapping[str, Any]], usage: Mapping[str, Any], note: Mapping[str, Any]) -> bytes:
        """The whole response at once."""
        body = self._fields(self.object_name)
        body["choices"], body["usage"], body["suffice"] = choices, usage, note
        return orjson.dumps(body)


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


class StreamEncoder:
    """Encodes deltas as they come and gives all that wait at once; each choice is opened before its first delta."""

    def __init__(self, encoder: AnswerEncoder) -> None:
        encoder.start_stream()
        self.encoder = encoder
        self.pending: list[bytes] = []
        self._opened: set[int] = set()

    def add(self, choice: AnswerChoice, delta: TokenDelta) -> None:
        """Queue the frame of some new text."""
        if self.encoder.holds_back:
            return
        if choice.index not in self._opened:
            self._open(choice)
        frame = self.encoder.delta(choice.index, delta)
        if frame:
            self.pending.append(frame)

    def end(self, choice: AnswerChoice) -> None:
        """Queue the frame that ends a choice."""
        if choice.index not in self._opened:
            self._open(choice)
        if self.encoder.holds_back:
            self.pending.append(self.encoder.held(choice))
        self.pending.append(self.encoder.ending(choice.index, choice.finish_reason))

    def take(self) -> bytes:
        """All that waits, as one piece."""
        frames, self.pending = self.pending, []
        return frames[0] if len(frames) == 1 else b"".join(frames)

    def _open(self, choice: AnswerChoice) -> None:
        self._opened.add(choice.index)
        self.pending.append(self.encoder.opening(choice.index))
