"""Reads the requests of ``/v1/chat/completions`` into the internal form and writes its answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import orjson
from msgspec import Meta, Struct

from backends.protocol import FinishReason, TokenDelta
from gateway.api.answer_encoder import AnswerChoice, AnswerEncoder, logprob_json
from gateway.api.declaration import Words, wrong_value
from gateway.api.generation_body import BodyLimits, GenerationBody, GenerationDecoder
from gateway.api.request import InferenceRequest, TextPart, Turn
from gateway.errors import InvalidRequest, UnsupportedOption

# OpenAI renamed the system role; models know the old name.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_PART_TYPES = ("text", "refusal")


def _unsupported_part(value: Any, param: str) -> InvalidRequest | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind in _PART_TYPES:
        return None
    return UnsupportedOption(f"'{param}' is of type {kind[:40]!r}; only text is supported.", param=f"{param}.type")


def _no_parts(value: Any, param: str) -> InvalidRequest | None:
    if value != []:
        return None
    return InvalidRequest(f"'{param}' is an empty array; expected at least one part.", param=param)


def _tool_role(value: Any, param: str) -> InvalidRequest | None:
    return _tool_call(value, param) if value in ("tool", "function") else None


def _tool_call(value: Any, param: str) -> InvalidRequest:
    where = param.rpartition(".")[0]
    return UnsupportedOption(f"'{where}' belongs to a tool call; tools are not supported yet.", param=where)


def _wrong_prediction(value: Any, param: str) -> InvalidRequest:
    return wrong_value(param, "'content'", value)


class ChatTextPart(Struct, tag="text", tag_field="type"):
    """Text of a message."""

    text: str


class ChatRefusalPart(Struct, tag="refusal", tag_field="type"):
    """A refusal that an earlier answer gave."""

    refusal: str


ChatPart = Annotated[ChatTextPart | ChatRefusalPart, Words(error=_unsupported_part)]
Content = Annotated[
    str | Annotated[list[ChatPart], Meta(min_length=1)],
    Words(kind="a string or an array of content parts", error=_no_parts),
]


class ChatMessage(Struct, kw_only=True):
    """One message of a conversation."""

    role: Annotated[Literal["system", "developer", "user", "assistant"], Words(error=_tool_role)]
    tool_calls: Annotated[list[Any], Meta(max_length=0), Words(error=_tool_call)] | None = None
    function_call: Annotated[dict[str, Any], Meta(max_length=0), Words(error=_tool_call)] | None = None
    content: Content
    name: Annotated[str, Meta(min_length=1, max_length=64)] | None = None


class ChatPrediction(Struct):
    """Text that the answer may turn out to be."""

    type: Annotated[Literal["content"], Words(error=_wrong_prediction)]
    content: Content


class TemplateOptions(Struct):
    """Switches of the model's chat template, as vLLM names them."""

    enable_thinking: bool | None = None


class ChatBody(GenerationBody, kw_only=True):
    """A conversation that is to be answered."""

    checked_first = (*GenerationBody.checked_first, "messages")

    messages: list[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: TemplateOptions | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    prediction: ChatPrediction | None = None


class ChatDecoder(GenerationDecoder[ChatBody]):
    """Decodes chat bodies under the server's limits."""

    def __init__(self, limits: BodyLimits) -> None:
        most = limits.server.max_messages

        def wrong_count(value: Any, param: str) -> InvalidRequest | None:
            if not isinstance(value, list) or 1 <= len(value) <= most:
                return None
            return InvalidRequest(f"'{param}' has {len(value)} entries; expected 1 to {most}.", param=param)

        messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=most), Words(error=wrong_count)]
        top_logprobs = Annotated[int, Meta(ge=0, le=limits.server.max_logprobs)]
        super().__init__(limits.limit(ChatBody, messages=messages, top_logprobs=top_logprobs), limits.preferences)

    def __call__(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> InferenceRequest:
        """Check everything the body says.

        Raises
        ------
        InvalidRequest
            Missing, of the wrong type or out of range; ``param`` names the field.
        UnsupportedOption
            Understood, but nothing here can do it yet.
        """
        given = self._checked(body)
        turns = tuple([Turn(_ROLES[each.role], _parts(each.content), each.name) for each in given.messages])
        return self._request(
            given,
            body,
            headers,
            (turns,),
            _logprobs(given),
            thinking=_thinking(given),
            prediction=_prediction(given.prediction),
        )


def _parts(content: str | list[ChatTextPart | ChatRefusalPart]) -> tuple[TextPart, ...]:
    if isinstance(content, str):
        return (TextPart(content),)
    return tuple(
        [
            TextPart(part.text) if isinstance(part, ChatTextPart) else TextPart(part.refusal, is_refusal=True)
            for part in content
        ]
    )


def _logprobs(body: ChatBody) -> dict[str, Any]:
    if body.top_logprobs is None:
        return {"logprobs": 0} if body.logprobs else {}
    if not body.logprobs:
        raise InvalidRequest("'top_logprobs' is only allowed when 'logprobs' is true.", param="top_logprobs")
    return {"logprobs": body.top_logprobs}


def _thinking(body: ChatBody) -> bool | None:
    """Return ``chat_template_kwargs.enable_thinking``, else what ``reasoning_effort`` says (none, minimal: off)."""
    if body.chat_template_kwargs is not None and body.chat_template_kwargs.enable_thinking is not None:
        return body.chat_template_kwargs.enable_thinking
    return None if body.reasoning_effort is None else body.reasoning_effort not in ("none", "minimal")


def _prediction(given: ChatPrediction | None) -> str | None:
    return None if given is None else "\n".join([part.text for part in _parts(given.content)])


class ChatEncoder(AnswerEncoder):
    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def opening(self, index: int) -> bytes:
        return self._frame(index, b'{"role":"assistant","content":""}')

    def delta(self, index: int, delta: TokenDelta) -> bytes:
        if delta.reasoning:
            parts: dict[str, str] = {"reasoning_content": delta.reasoning}
            if delta.text:
                parts["content"] = delta.text
            shown = orjson.dumps(parts)
        elif delta.text:
            shown = b'{"content":' + orjson.dumps(delta.text) + b"}"
        elif delta.logprobs:
            shown = b"{}"
        else:
            return b""
        if not delta.logprobs:
            return self._frame(index, shown)
        content = [logprob_json(entry) for entry in delta.logprobs]
        return self._frame(index, shown, b'{"content":' + orjson.dumps(content) + b',"refusal":null}')

    def ending(self, index: int, reason: FinishReason) -> bytes:
        return self._frame(index, b"{}", reason=b'"' + reason.value.encode() + b'"')

    def _frame(self, index: int, delta: bytes, logprobs: bytes = b"null", reason: bytes = b"null") -> bytes:
        choice = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}' % (index, delta, logprobs, reason)
        return self._before + choice + self._after

    def choice(self, answer: AnswerChoice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.reasonings:
            message["reasoning_content"] = answer.reasoning
        logprobs = None
        if answer.logprobs or answer.wants_logprobs:
            logprobs = {"content": [logprob_json(entry) for entry in answer.logprobs], "refusal": None}
        return {
            "index": answer.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": answer.finish_reason.value,
        }
