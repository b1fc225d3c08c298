"""Codec of what a check needs of a request and its answer: JSON texts that are kept until it is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import orjson

from backends.protocol import (
    FREE_CHOICE,
    PLAIN_TEXT,
    GenerateRequest,
    Media,
    Message,
    OutputFormat,
    Priority,
    SamplingParams,
    Thought,
    Tool,
    ToolCall,
    ToolChoice,
)
from gateway.api.request import InferenceRequest, Prompt, Turn, messages_of
from gateway.store.records import CALLS_MARK

# Token ids mean nothing to another tier's tokenizer; probabilities are asked for by the graders themselves.
_LEFT_OUT = frozenset({"logit_bias", "stop_token_ids", "logprobs", "prompt_logprobs"})
_DEFAULTS = SamplingParams()
_NAMES = tuple(name for name in SamplingParams.__struct_fields__ if name not in _LEFT_OUT)
_BY_DEFAULT = tuple((name, getattr(_DEFAULTS, name)) for name in _NAMES)


def pack_prompt(request: InferenceRequest) -> str:
    """Return a request's only prompt, and what it asks of the answer, as JSON.

    ``{"messages": [[role, content, name]]}`` or ``{"prompt": text}``; a message of more than text has its parts behind
    its name. Beside them ``tools``, ``tool_choice`` and ``output_format``, where there are any.
    """
    packed = _packed_prompt(request.prompts[0])
    if request.tools:
        packed["tools"] = msgspec.to_builtins(request.tools)
    if request.tool_choice is not FREE_CHOICE:
        packed["tool_choice"] = msgspec.to_builtins(request.tool_choice)
    if request.output_format is not PLAIN_TEXT:
        packed["output_format"] = msgspec.to_builtins(request.output_format)
    return _encoded(packed)


def _packed_prompt(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    packed: list[list[Any]] = []
    for turn in prompt:
        if isinstance(turn, Turn):
            if turn.is_plain:
                packed.append([turn.role, turn.text, turn.name])
            else:
                packed += [_packed_message(each) for each in messages_of((turn,))]
    return {"messages": packed}


def _packed_message(message: Message) -> list[Any]:
    plain = [message.role, message.content, message.name]
    if not (message.tool_calls or message.tool_call_id or message.reasoning or message.parts or message.thoughts):
        return plain
    more: dict[str, Any] = {
        "calls": _packed_calls(message.tool_calls),
        "answers": message.tool_call_id,
        "reasoning": message.reasoning,
        "parts": msgspec.to_builtins(message.parts),
        "thoughts": msgspec.to_builtins(message.thoughts),
    }
    return [*plain, {name: value for name, value in more.items() if value}]


def pack_sampling(sampling: SamplingParams, thinking: bool | None) -> dict[str, Any]:
    """Return what differs from the defaults, and whether thinking was asked for."""
    packed: dict[str, Any] = {}
    # Nearly every request leaves all as it is.
    if sampling != _DEFAULTS:
        packed = {name: value for name, default in _BY_DEFAULT if (value := getattr(sampling, name)) != default}
    return packed if thinking is None else packed | {"thinking": thinking}


def pack_answer(text: str, calls: Sequence[ToolCall]) -> str:
    """Return an answer as one text: its own, or marked JSON where it holds calls (or looks as if it did)."""
    if not calls and not text.startswith(CALLS_MARK):
        return text
    return CALLS_MARK + _encoded({"text": text, "calls": _packed_calls(calls)})


def unpack_answer(packed: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Return text and calls of an answer.

    Raises
    ------
    ValueError
        It is marked, and not what was packed.
    """
    if not packed.startswith(CALLS_MARK):
        return packed, ()
    written = orjson.loads(packed.removeprefix(CALLS_MARK))
    return written["text"], _calls(written["calls"])


def unpack_request(request_id: str, prompt: str, sampling: Mapping[str, Any]) -> GenerateRequest:
    """Return the same request at background priority, for another tier.

    Raises
    ------
    ValueError
        The texts are not what was packed.
    """
    packed = orjson.loads(prompt)
    chosen = {name: value for name, value in sampling.items() if name in _NAMES}
    if "stop" in chosen:
        chosen["stop"] = tuple(chosen["stop"])
    if not isinstance(packed, dict) or not packed.keys() & {"messages", "prompt"}:
        raise ValueError(f"the kept prompt has neither messages nor prompt: {prompt[:80]!r}")
    common: dict[str, Any] = {
        "sampling": SamplingParams(**chosen),
        "priority": Priority.BACKGROUND,
        "thinking": sampling.get("thinking"),
        "tools": msgspec.convert(packed.get("tools", ()), tuple[Tool, ...]),
        "tool_choice": msgspec.convert(packed.get("tool_choice", {}), ToolChoice),
        "output_format": _output_format(packed.get("output_format")),
    }
    if "prompt" in packed:
        return GenerateRequest(request_id, prompt=packed["prompt"], **common)
    return GenerateRequest(request_id, messages=tuple([_message(*each) for each in packed["messages"]]), **common)


def _message(role: str, content: str, name: str | None, more: Mapping[str, Any] | None = None) -> Message:
    if more is None:
        return Message(role, content, name)
    return Message(
        role,
        content,
        name,
        tool_calls=_calls(more.get("calls", ())),
        tool_call_id=more.get("answers"),
        reasoning=more.get("reasoning", ""),
        parts=tuple([each if isinstance(each, str) else _media(each) for each in more.get("parts", ())]),
        thoughts=msgspec.convert(more.get("thoughts", ()), tuple[Thought, ...]),
    )


def _media(packed: Mapping[str, Any]) -> Media:
    # Without a type it was packed when there were only images.
    found: Media = msgspec.convert({"type": "image", **packed}, Media)
    return found


def _output_format(packed: Any) -> OutputFormat:
    if packed is None:
        return PLAIN_TEXT
    found = msgspec.convert(packed, OutputFormat)
    return msgspec.structs.replace(found, spec=tuple(found.spec)) if found.kind == "choice" else found


def _packed_calls(calls: Sequence[ToolCall]) -> list[list[str]]:
    return [[each.call_id, each.name, each.arguments] for each in calls]


def _calls(packed: Sequence[Sequence[str]]) -> tuple[ToolCall, ...]:
    return tuple([ToolCall(*each) for each in packed])


def question_of(request: GenerateRequest) -> str:
    """Return what was asked, as one text: the last user turn, or the prompt."""
    for message in reversed(request.messages or ()):
        if message.role == "user":
            return message.content
    return request.prompt or "\n".join(message.content for message in request.messages or ())


def _encoded(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        return orjson.dumps(_mended(value)).decode()


def _mended(value: Any) -> Any:
    """JSON has no lone surrogates; what a database refuses besides is mended where the row is made."""
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, Mapping):
        return {_mended(name): _mended(each) for name, each in value.items()}
    return [_mended(each) for each in value] if isinstance(value, (list, tuple)) else value
