"""Decodes what we receive: one JSON chunk of a stream, or one whole answer, as typed facts.

Servers differ in small ways; each reader below names whose way it accepts. Whatever has the wrong type is a
:class:`MalformedChunk`, never an ``AttributeError`` three calls later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import orjson

from backends.protocol import FinishReason, Thought, TokenLogprob, ToolCallDelta, Usage

UNKNOWN_TOKEN_ID = -1
"""``TokenLogprob.token_id`` where a server names tokens by text only."""

# More than any context holds, and what the log's columns take: a server that counts more is wrong, its answer is not.
_MOST_TOKENS = 2**31 - 1

_REASONS: Mapping[str, FinishReason] = {
    "stop": FinishReason.STOP,
    "eos": FinishReason.STOP,
    "eos_token": FinishReason.STOP,
    "stop_sequence": FinishReason.STOP,
    "end_turn": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "max_tokens": FinishReason.LENGTH,
    "tool_calls": FinishReason.TOOL_CALLS,
    "function_call": FinishReason.TOOL_CALLS,
    "content_filter": FinishReason.CONTENT_FILTER,
}


class MalformedChunk(Exception):
    """The server sent something that is not a chunk; the message shows its beginning."""


class ErrorChunk(Exception):
    """The server sent an error object inside a stream that began with status 200."""

    def __init__(self, body: Any) -> None:
        super().__init__("error in stream")
        self.body = body


@dataclass(frozen=True, slots=True)
class AnswerChunk:
    """Holds what one chunk adds.

    ``reason`` is set by the chunk that ends the answer, ``usage`` by the one that counts it.

    ``has_bad_usage`` says that its counts are none: they are ignored, since the answer is not worse for them.

    ``unknown_reason`` is a finish reason nobody documented: treated as a failure, so that a truncated answer is never
    shown as a whole one.

    ``stop_string`` is what the server says that it stopped at.
    """

    text: str = ""
    reasoning: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    tool_calls: tuple[ToolCallDelta, ...] = ()
    reason: FinishReason | None = None
    unknown_reason: str | None = None
    usage: Usage | None = None
    has_bad_usage: bool = False
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    stop_string: str | None = None
    signed: tuple[Thought, ...] = ()

    @property
    def has_content(self) -> bool:
        return bool(self.text or self.reasoning or self.logprobs or self.tool_calls or self.signed)

    @property
    def num_chars(self) -> int:
        """Return the characters of all that it shows."""
        calls = self.tool_calls
        num_call_chars = sum([len(piece.arguments) + len(piece.name) for piece in calls]) if calls else 0
        return len(self.text) + len(self.reasoning) + num_call_chars


def read_chunk(data: bytes) -> AnswerChunk:
    """Read one chunk of a chat or text completion, streamed or whole.

    Raises
    ------
    MalformedChunk : not JSON, or not a chunk
    ErrorChunk : an error object
    """
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise MalformedChunk(f"expected JSON, got {_beginning(data)}") from error
    if not isinstance(body, dict):
        raise MalformedChunk(f"expected a JSON object, got {_beginning(data)}")
    # vLLM and llama.cpp: {"error": {...}}; some proxies send null in every good chunk.
    if body.get("error") is not None or body.get("object") == "error":
        raise ErrorChunk(body)
    try:
        return _read(body)
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise MalformedChunk(f"expected a completion chunk, got {_beginning(data)}") from error


def _read(body: dict[str, Any]) -> AnswerChunk:
    choices = body.get("choices")
    usage = body.get("usage")
    if choices is None and usage is None and "object" not in body:
        raise ValueError("neither choices nor usage")
    read_usage_, has_bad_usage = _usage(usage)
    if not choices:
        return AnswerChunk(usage=read_usage_, has_bad_usage=has_bad_usage)
    choice = choices[0]
    reason, unknown = _reason(choice.get("finish_reason"))
    source = choice.get("delta") or choice.get("message") or choice
    return AnswerChunk(
        text=_text(source.get("content")) + _text(source.get("text")),
        # DeepSeek, llama.cpp, SGLang: reasoning_content; newer vLLM and OpenRouter: reasoning.
        reasoning=_text(source.get("reasoning_content")) or _text(source.get("reasoning")),
        logprobs=read_logprobs(choice.get("logprobs")),
        tool_calls=_tool_calls(source.get("tool_calls")),
        reason=reason,
        unknown_reason=unknown,
        usage=read_usage_,
        has_bad_usage=has_bad_usage,
        prompt_logprobs=_prompt_logprobs(choice.get("prompt_logprobs") or body.get("prompt_logprobs")),
        stop_string=_stop_string(choice),
        signed=_signed(source.get("thinking_blocks")),
    )


def _signed(blocks: Any) -> tuple[Thought, ...]:
    """Read LiteLLM's ``thinking_blocks``; their texts come as reasoning too, and count there.

    Where several come at once, as in an answer that is not streamed, nothing says which text each signs: none is kept.
    """
    found = []
    for block in blocks or ():
        if block.get("type") == "redacted_thinking":
            found.append(Thought("", _text(block.get("data")), is_redacted=True))
        elif signature := _text(block.get("signature")):
            found.append(Thought("", signature))
    return tuple(found) if len(found) == 1 else ()


def _stop_string(choice: Any) -> str | None:
    """Return what vLLM calls ``stop_reason`` and SGLang ``matched_stop``; of a token that stopped they give the id."""
    found = choice.get("stop_reason") or choice.get("matched_stop")
    return found if isinstance(found, str) else None


def _tool_calls(value: Any) -> tuple[ToolCallDelta, ...]:
    """Read pieces of calls; those of a whole answer are counted by their place."""
    if not value:
        return ()
    pieces = []
    for place, each in enumerate(value):
        index, function = each.get("index"), each.get("function") or {}
        arguments = function.get("arguments")
        # Some servers send the object itself.
        if isinstance(arguments, dict):
            arguments = orjson.dumps(arguments).decode()
        pieces.append(
            ToolCallDelta(
                place if index is None else _count(index),
                _text(each.get("id")),
                _text(function.get("name")),
                _text(arguments),
            )
        )
    return tuple(pieces)


def _text(value: Any) -> str:
    return "" if value is None else _token(value)


def _token(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("text is not a string")
    return value


def _token_id(value: Any) -> int:
    if value is None:
        return UNKNOWN_TOKEN_ID
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError("a token's id is not an integer")
    return value


def _reason(value: Any) -> tuple[FinishReason | None, str | None]:
    if value is None or value == "":
        return None, None
    known = _REASONS.get(value)
    return (known, None) if known is not None else (FinishReason.ERROR, str(value)[:100])


def _count(value: Any) -> int:
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST_TOKENS:
        raise ValueError("not a count")
    return value


def _usage(body: Any) -> tuple[Usage | None, bool]:
    """Return (counts, whether there were some that cannot be read)."""
    if body is None:
        return None, False
    try:
        return read_usage(body), False
    except (TypeError, ValueError, AttributeError):
        return None, True


def read_usage(body: Any) -> Usage:
    """Read OpenAI's ``usage`` object; missing details count as 0."""
    completion = body.get("completion_tokens_details") or {}
    num_prompt, num_completion = _count(body.get("prompt_tokens")), _count(body.get("completion_tokens"))
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_completion,
        # Some servers count them beside the whole; a bill that subtracts them must not go below nothing.
        cached_tokens=min(_num_cached(body), num_prompt),
        reasoning_tokens=min(_count(completion.get("reasoning_tokens")), num_completion),
        accepted_prediction_tokens=_count(completion.get("accepted_prediction_tokens")),
        rejected_prediction_tokens=_count(completion.get("rejected_prediction_tokens")),
    )


def _num_cached(body: Any) -> int:
    """Return the cached tokens by OpenAI's name, else by those of DeepSeek, Moonshot and of Anthropic's proxies."""
    found = (body.get("prompt_tokens_details") or {}).get("cached_tokens")
    for name in ("prompt_cache_hit_tokens", "cached_tokens", "cache_read_input_tokens"):
        found = body.get(name) if found is None else found
    return _count(found)


def read_logprobs(body: Any) -> tuple[TokenLogprob, ...]:
    """Read either shape: ``content`` of chat completions, or the parallel lists of text completions."""
    if body is None:
        return ()
    if body.get("content") is not None:
        return tuple(_chat_logprob(entry) for entry in body["content"])
    if body.get("tokens") is None:
        return ()
    tokens, values = body["tokens"], body["token_logprobs"]
    tops = body.get("top_logprobs") or [None] * len(tokens)
    return tuple(
        TokenLogprob(_token(token), UNKNOWN_TOKEN_ID, _logprob(value), _pairs(top))
        for token, value, top in zip(tokens, values, tops, strict=True)
        if value is not None  # the first token of an echoed prompt has none
    )


def _chat_logprob(entry: Any) -> TokenLogprob:
    top = tuple(
        (_token(each["token"]), _token_id(each.get("id")), _logprob(each["logprob"]))
        for each in entry.get("top_logprobs") or ()
    )
    return TokenLogprob(_token(entry["token"]), _token_id(entry.get("id")), _logprob(entry["logprob"]), top)


def _pairs(top: Any) -> tuple[tuple[str, int, float], ...]:
    if not top:
        return ()
    return tuple((token, UNKNOWN_TOKEN_ID, _logprob(value)) for token, value in top.items())


def _logprob(value: Any) -> float:
    number = float(value)
    if not isfinite(number):
        raise ValueError("a log-probability is not finite")
    return number


def _prompt_logprobs(body: Any) -> tuple[TokenLogprob | None, ...] | None:
    """Read vLLM's ``prompt_logprobs``: per position None or a mapping of token id, the prompt's own token first."""
    if body is None:
        return None
    return tuple(_prompt_logprob(entry) for entry in body)


def _prompt_logprob(entry: Any) -> TokenLogprob | None:
    if entry is None:
        return None
    found = [(_text(each.get("decoded_token")), int(key), _logprob(each["logprob"])) for key, each in entry.items()]
    token, identity, logprob = found[0]
    return TokenLogprob(token, identity, logprob, tuple(sorted(found, key=lambda item: -item[2])))


def _beginning(data: bytes) -> str:
    return repr(data[:80].decode("utf-8", "replace")) + ("…" if len(data) > 80 else "")
