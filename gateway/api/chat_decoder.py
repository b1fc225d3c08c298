"""``/v1/chat/completions``: JSON object in, :class:`InferenceRequest` out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backends.protocol import SamplingParams
from gateway.api import fields
from gateway.api.request import InferenceRequest, TextPart, Turn
from gateway.api.shared_fields import EFFORT, SharedFields
from gateway.errors import InvalidRequest, UnsupportedOption

# OpenAI renamed the system role; models know the old name.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_UNSUPPORTED_ROLES = ("tool", "function")
_MAX_NAME_CHARS = 64


class ChatDecoder:
    """Reads chat bodies under the limits in force."""

    def __init__(self, shared: SharedFields) -> None:
        self._shared = shared
        self._max_messages = shared.limits.max_messages
        self._top_logprobs = fields.integer(0, shared.limits.max_logprobs)

    def __call__(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> InferenceRequest:
        """Check everything the body says.

        Raises
        ------
        InvalidRequest
            Missing, of the wrong type or out of range; ``param`` names the field.
        UnsupportedOption
            Understood, but nothing here can do it yet.
        """
        shared = self._shared
        model = shared.model(body)
        shared.refuse_unsupported(body)
        messages = self._messages(body.get("messages"))
        sampling = shared.sampling(body)
        sampling["logprobs"] = self._logprobs(body)
        stream, include_usage = shared.streaming(body)
        return InferenceRequest(
            model=model,
            prompts=(messages,),
            sampling=SamplingParams(**sampling),
            n=shared.n(body),
            stream=stream,
            include_usage=include_usage,
            thinking=shared.thinking(body),
            preferences=shared.preferences(body, headers),
            prediction=_prediction(body.get("prediction")),
        )

    def schema(self) -> dict[str, Any]:
        """What a body may hold, as JSON Schema."""
        properties = self._shared.properties() | {
            "messages": {"type": "array", "items": _MESSAGE, "minItems": 1, "maxItems": self._max_messages},
            "logprobs": fields.schema_of(fields.boolean),
            "top_logprobs": fields.schema_of(self._top_logprobs),
            "reasoning_effort": fields.schema_of(EFFORT),
            "chat_template_kwargs": {
                "type": "object",
                "properties": {"enable_thinking": fields.schema_of(fields.boolean)},
            },
            "prediction": _PREDICTION,
        }
        return fields.open_object(properties, required=("model", "messages"))

    def _messages(self, value: Any) -> tuple[Turn, ...]:
        if not isinstance(value, list):
            raise fields.wrong_type("messages", "an array", value)
        if not 1 <= len(value) <= self._max_messages:
            raise InvalidRequest(
                f"'messages' has {len(value)} entries; expected 1 to {self._max_messages}.", param="messages"
            )
        return tuple([_turn(each, place) for place, each in enumerate(value)])

    def _logprobs(self, body: Mapping[str, Any]) -> int | None:
        wanted, top = body.get("logprobs"), body.get("top_logprobs")
        wanted = wanted is not None and fields.boolean(wanted, "logprobs")
        if top is None:
            return 0 if wanted else None
        count: int = self._top_logprobs(top, "top_logprobs")
        if not wanted:
            raise InvalidRequest("'top_logprobs' is only allowed when 'logprobs' is true.", param="top_logprobs")
        return count


def _turn(value: Any, place: int) -> Turn:
    where = f"messages[{place}]"
    if not isinstance(value, dict):
        raise fields.wrong_type(where, "an object", value)
    role = value.get("role")
    if not isinstance(role, str):
        raise fields.wrong_type(f"{where}.role", "a string", role)
    if role in _UNSUPPORTED_ROLES or value.get("tool_calls") or value.get("function_call"):
        raise UnsupportedOption(f"'{where}' belongs to a tool call; tools are not supported yet.", param=where)
    if role not in _ROLES:
        raise fields.wrong_value(f"{where}.role", "one of " + ", ".join(map(repr, _ROLES)), role)
    content = value.get("content")
    parts = (TextPart(content),) if isinstance(content, str) else _parts(content, f"{where}.content")
    name = value.get("name")
    if name is not None:
        name = _NAME(name, f"{where}.name")
    return Turn(_ROLES[role], parts, name)


def _prediction(value: Any) -> str | None:
    """OpenAI's predicted output: ``{"type": "content", "content": text or text parts}``."""
    if value is None:
        return None
    found = fields.mapping(value, "prediction")
    if found.get("type") != "content":
        raise fields.wrong_value("prediction.type", "'content'", found.get("type"))
    content = found.get("content")
    if isinstance(content, str):
        return content
    return "\n".join([part.text for part in _parts(content, "prediction.content")])


_NAME = fields.string(_MAX_NAME_CHARS, min_chars=1)

_PART: dict[str, Any] = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"type": "string", "enum": ["text", "refusal"]},
        "text": {"type": "string"},
        "refusal": {"type": "string"},
    },
}
_MESSAGE: dict[str, Any] = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"type": "string", "enum": list(_ROLES)},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART, "minItems": 1}]},
        "name": {"anyOf": [fields.schema_of(_NAME), {"type": "null"}]},
    },
}
_PREDICTION = {
    "type": "object",
    "required": ["type", "content"],
    "properties": {"type": {"const": "content"}, "content": _MESSAGE["properties"]["content"]},
}


def _parts(content: Any, where: str) -> tuple[TextPart, ...]:
    """Read the text parts of a structured content."""
    if not isinstance(content, list):
        raise fields.wrong_type(where, "a string or an array of content parts", content)
    if not content:
        raise InvalidRequest(f"'{where}' is an empty array; expected at least one part.", param=where)
    parts = []
    for place, part in enumerate(content):
        here = f"{where}[{place}]"
        kind = fields.mapping(part, here).get("type")
        if not isinstance(kind, str):
            raise fields.wrong_type(f"{here}.type", "a string", kind)
        if kind not in ("text", "refusal"):
            raise UnsupportedOption(f"'{here}' is of type {kind[:40]!r}; only text is supported.", param=f"{here}.type")
        text = part.get(kind)
        if not isinstance(text, str):
            raise fields.wrong_type(f"{here}.{kind}", "a string", text)
        parts.append(TextPart(text, is_refusal=kind == "refusal"))
    return tuple(parts)
