"""Reads the requests of ``/v1/chat/completions`` into the internal form and writes its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import orjson
from msgspec import Meta, Struct

from backends.protocol import FREE_CHOICE, Audio, File, FinishReason, Image, TokenDelta, Tool, ToolCall, ToolCallDelta
from gateway.api.answer_encoder import AnswerChoice, CompletionsEncoder, logprob_json
from gateway.api.conversation import check_results
from gateway.api.declaration import Words, wrong_type, wrong_value
from gateway.api.generation_body import BodyLimits, GenerationBody, GenerationDecoder
from gateway.api.request import InferenceRequest, Part, ReasoningPart, Shown, TextPart, ToolResultPart, Turn
from gateway.api.tool_fields import ChatTool, ChoiceField, ToolName, read_tool_choice, read_tools
from gateway.errors import InvalidRequest, UnsupportedOption

# OpenAI renamed the system role; models know the old name.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_PART_TYPES = ("text", "refusal", "image_url", "input_audio", "file")


def _unsupported_part(value: Any, param: str) -> InvalidRequest | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind in _PART_TYPES:
        return None
    return UnsupportedOption(
        f"'{param}' is of type {kind[:40]!r}; only text, images, audio and files are supported.", param=f"{param}.type"
    )


def _kept_elsewhere(value: Any, param: str) -> InvalidRequest:
    return UnsupportedOption(f"'{param}': files are not kept here; send the file itself as 'file_data'.", param=param)


def _no_parts(value: Any, param: str) -> InvalidRequest | None:
    if value != []:
        return None
    return InvalidRequest(f"'{param}' is an empty array; expected at least one part.", param=param)


def _old_role(value: Any, param: str) -> InvalidRequest | None:
    return _old_call(value, param) if value == "function" else None


def _old_call(value: Any, param: str) -> InvalidRequest:
    where = param.rpartition(".")[0]
    return UnsupportedOption(f"'{where}' is of the older form of tool calls; use 'tool_calls' and 'tool'.", param=where)


def _wrong_prediction(value: Any, param: str) -> InvalidRequest:
    return wrong_value(param, "'content'", value)


class ChatTextPart(Struct, tag="text", tag_field="type"):
    """Text of a message."""

    text: str


class ChatRefusalPart(Struct, tag="refusal", tag_field="type"):
    """A refusal that an earlier answer gave."""

    refusal: str


class ImageUrl(Struct):
    """Where an image is; ``data:`` URLs hold it."""

    url: Annotated[str, Meta(min_length=1)]
    detail: str | None = None


class ChatImagePart(Struct, tag="image_url", tag_field="type"):
    """An image in a message."""

    image_url: ImageUrl


class InputAudio(Struct):
    """Sound in base64."""

    data: Annotated[str, Meta(min_length=1)]
    format: Literal["wav", "mp3"]


class ChatAudioPart(Struct, tag="input_audio", tag_field="type"):
    """Sound in a message."""

    input_audio: InputAudio


class InputFile(Struct):
    """A file as a ``data:`` URL. Ids would be of one provider, and of all who use its account."""

    checked_first: ClassVar[tuple[str, ...]] = ("file_id",)

    file_data: Annotated[str, Meta(min_length=1)]
    file_id: Annotated[None, Words(error=_kept_elsewhere)] = None
    filename: str | None = None


class ChatFilePart(Struct, tag="file", tag_field="type"):
    """A file in a message."""

    file: InputFile


ChatPartFields = ChatTextPart | ChatRefusalPart | ChatImagePart | ChatAudioPart | ChatFilePart
ChatPart = Annotated[ChatPartFields, Words(error=_unsupported_part)]
Content = Annotated[
    str | Annotated[list[ChatPart], Meta(min_length=1)],
    Words(kind="a string or an array of content parts", error=_no_parts),
]


class CalledFunction(Struct):
    """What was called; ``arguments`` is JSON text."""

    name: ToolName
    arguments: str


class ChatToolCall(Struct):
    """A call that an earlier answer made."""

    id: Annotated[str, Meta(min_length=1, max_length=256)]
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatMessage(Struct, kw_only=True):
    """One message of a conversation; ``content`` may be null beside ``tool_calls``."""

    role: Annotated[Literal["system", "developer", "user", "assistant", "tool"], Words(error=_old_role)]
    tool_calls: list[ChatToolCall] | None = None
    function_call: Annotated[dict[str, Any], Meta(max_length=0), Words(error=_old_call)] | None = None
    content: Content | None = None
    tool_call_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
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
    tools: list[ChatTool] | None = None
    tool_choice: ChoiceField | None = None
    prediction: ChatPrediction | None = None


class ChatDecoder(GenerationDecoder[ChatBody]):
    """Decodes chat bodies under the server's limits."""

    def __init__(self, limits: BodyLimits) -> None:
        top_logprobs = Annotated[int, Meta(ge=0, le=limits.server.max_logprobs)]
        messages, tools = limits.messages(ChatMessage), limits.tools(ChatTool)
        shape = limits.limit(ChatBody, messages=messages, top_logprobs=top_logprobs, tools=tools)
        super().__init__(shape, limits.preferences)

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
        turns = tuple([_turn(each, place) for place, each in enumerate(given.messages)])
        # Few conversations have calls, and looking for them in each would take longer than reading it.
        if any(each.tool_calls or each.tool_call_id for each in given.messages):
            check_results(turns, "messages")
        tools: tuple[Tool, ...] = ()
        choice = FREE_CHOICE
        if given.tools or given.tool_choice is not None:
            tools = read_tools(given.tools)
            choice = read_tool_choice(given.tool_choice, given.parallel_tool_calls, tools)
        return self._request(
            given,
            body,
            headers,
            (turns,),
            _logprobs(given),
            thinking=_thinking(given),
            prediction=_prediction(given.prediction),
            tools=tools,
            tool_choice=choice,
        )


def _turn(message: ChatMessage, place: int) -> Turn:
    """Return a message as a turn.

    Raises
    ------
    InvalidRequest
        It lacks what its role needs.
    """
    role, content = message.role, message.content
    if content is not None and role != "tool" and role != "assistant":
        return Turn(_ROLES[role], _parts(content), message.name)
    where = f"messages[{place}]"
    if role == "tool":
        if message.tool_call_id is None:
            raise wrong_type(f"{where}.tool_call_id", "a string", None)
        shown = () if content is None else _parts(content)
        return Turn("tool", (ToolResultPart(message.tool_call_id, shown),), message.name)
    if content is None and not message.tool_calls:
        raise wrong_type(f"{where}.content", "a string or an array of content parts", None)
    thought = message.reasoning_content or message.reasoning
    parts: list[Part] = [ReasoningPart(thought)] if thought else []
    if content is not None:
        parts += _parts(content)
    # Of a call without arguments some servers wrote nothing, where the others want JSON.
    parts += [ToolCall(c.id, c.function.name, c.function.arguments or "{}") for c in message.tool_calls or ()]
    return Turn(_ROLES[role], tuple(parts), message.name)


def _parts(content: str | list[ChatPartFields]) -> tuple[Shown, ...]:
    if isinstance(content, str):
        return (TextPart(content),)
    return tuple([_part(part) for part in content])


def _part(part: ChatPartFields) -> Shown:
    if isinstance(part, ChatTextPart):
        return TextPart(part.text)
    if isinstance(part, ChatImagePart):
        return Image(part.image_url.url, part.image_url.detail)
    if isinstance(part, ChatAudioPart):
        return Audio(part.input_audio.data, part.input_audio.format)
    if isinstance(part, ChatFilePart):
        return File(part.file.file_data, part.file.filename)
    return TextPart(part.refusal, is_refusal=True)


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
    if given is None:
        return None
    return "\n".join([part.text for part in _parts(given.content) if isinstance(part, TextPart)])


class ChatEncoder(CompletionsEncoder):
    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def opening(self, index: int) -> bytes:
        return self._frame(index, b'{"role":"assistant","content":""}')

    def delta(self, index: int, delta: TokenDelta) -> bytes:
        if delta.tool_calls:
            said = self.delta(index, replace(delta, tool_calls=()))
            # One call a chunk, as OpenAI has it: LlamaIndex reads no further.
            calls = [orjson.dumps({"tool_calls": [piece]}) for piece in _call_pieces(delta.tool_calls)]
            return said + b"".join([self._frame(index, each) for each in calls])
        if delta.reasoning:
            parts = {"reasoning_content": delta.reasoning, "reasoning": delta.reasoning}
            shown = orjson.dumps(parts | {"content": delta.text} if delta.text else parts)
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
        return self._frame(index, b"{}", reason=b'"' + reason.encode() + b'"')

    def _frame(self, index: int, delta: bytes, logprobs: bytes = b"null", reason: bytes = b"null") -> bytes:
        choice = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}' % (index, delta, logprobs, reason)
        return self._before + choice + self._after

    def choice(self, answer: AnswerChoice) -> dict[str, Any]:
        calls = answer.tool_calls
        # OpenAI's own answers have null beside calls; the key itself is always there.
        content = None if calls and not answer.texts else answer.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if answer.reasonings:
            message["reasoning_content"] = message["reasoning"] = answer.reasoning
        if calls:
            message["tool_calls"] = [
                {"id": c.call_id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in calls
            ]
        logprobs = None
        if answer.logprobs or answer.wants_logprobs:
            logprobs = {"content": [logprob_json(entry) for entry in answer.logprobs], "refusal": None}
        return {
            "index": answer.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": str(answer.finish_reason),
        }


def _call_pieces(pieces: Sequence[ToolCallDelta]) -> list[dict[str, Any]]:
    """Return pieces of calls, one of each call: OpenAI's Python package keeps a first chunk's list as it is."""
    shown: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        if (known := shown.get(piece.index)) is not None:
            known["function"]["arguments"] += piece.arguments
        elif piece.name:
            function = {"name": piece.name, "arguments": piece.arguments}
            shown[piece.index] = {"index": piece.index, "id": piece.call_id, "type": "function", "function": function}
        else:
            shown[piece.index] = {"index": piece.index, "function": {"arguments": piece.arguments}}
    return list(shown.values())
