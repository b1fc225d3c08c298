"""Encodes answers: what chat and plain completions share.

A stream's frames differ in a few characters, so everything around those is encoded once per stream. The parts of a
frame, in order: what it is (id, object, created, model), one choice, and ``"usage":null`` where usage was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import orjson

from backends.protocol import FinishReason, TokenDelta, TokenLogprob, Usage
from gateway.api import sse
from gateway.api.choice import AnswerChoice

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
    each piece of text or reasoning with its log-probabilities, ``ending``; last ``usage_frame``. Calls of tools will be
    deltas of their own kind. A response that is not streamed takes ``choice`` for each and ``body`` once.

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
