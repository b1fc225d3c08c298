"""Reads the requests of ``/v1/messages`` into the internal form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import orjson
from msgspec import Meta, Struct

from backends.protocol import (
    FREE_CHOICE,
    PLAIN_TEXT,
    File,
    Image,
    OutputFormat,
    SamplingParams,
    Tool,
    ToolCall,
    ToolChoice,
)
from gateway.api.conversation import check_results
from gateway.api.declaration import Words, limited, wrong_type
from gateway.api.generation_body import (
    LEAST_SHARE,
    BodyDecoder,
    BodyLimits,
    ModelName,
    PositiveTokenCount,
    Share,
    text_of,
    user_id_of,
)
from gateway.api.request import (
    ConversationHints,
    InferenceRequest,
    Part,
    ReasoningPart,
    Shown,
    TextPart,
    ToolResultPart,
    Turn,
)
from gateway.api.routing_preferences import RoutingOptions
from gateway.api.tool_fields import ToolName
from gateway.errors import InvalidRequest, UnsupportedOption

# Claude Code's first system block; it differs in each request, and no prefix after it would be found in a cache.
_BILLING_LINE = "x-anthropic-billing-header:"
# The protocol has no name for a schema, remote tiers want one.
_FORMAT_NAME = "response"

Content = Annotated[str | list[dict[str, Any]], Words(kind="a string or an array of content blocks")]


def _no_threads(value: Any, param: str) -> InvalidRequest:
    return UnsupportedOption(f"'{param}': answers are not kept here; send the whole conversation.", param=param)


class MessageField(Struct):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Content


class ToolField(Struct):
    """A tool; of another ``type`` than custom its provider would run it, which nobody here does."""

    name: ToolName
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None

    @property
    def is_custom(self) -> bool:
        return self.type in (None, "custom")


class ToolChoiceField(Struct):
    """Which calls are wanted."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingField(Struct):
    """Whether the model thinks; its budget is the tier's own."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class FormatField(Struct):
    """What the answer's text must be."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputField(Struct):
    """What the answer must be."""

    format: FormatField | None = None
    effort: str | None = None


class CountBody(Struct, kw_only=True):
    """A conversation whose tokens are to be counted."""

    model: ModelName
    messages: list[MessageField]
    system: Content | None = None
    tools: list[ToolField] | None = None
    tool_choice: ToolChoiceField | None = None
    thinking: ThinkingField | None = None
    output_config: OutputField | None = None
    temperature: Share | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    stop_sequences: tuple[str, ...] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    thread: Annotated[None, Words(error=_no_threads)] = None
    suffice: RoutingOptions | None = None


class MessagesBody(CountBody, kw_only=True):
    """A conversation that is to be answered."""

    max_tokens: PositiveTokenCount


class MessagesRequest(InferenceRequest, frozen=True, kw_only=True):
    """A request with what only its encoder reads: whether its client wants to see what the model thinks."""

    shows_thinking: bool = False


class MessagesDecoder(BodyDecoder[CountBody]):
    """Decodes bodies of ``/v1/messages`` under the server's limits; as a ``CountBody`` those of ``/count_tokens``."""

    def __init__(self, limits: BodyLimits, body: type[CountBody] = MessagesBody) -> None:
        shape = limited(
            body,
            messages=limits.messages(MessageField),
            tools=limits.tools(ToolField),
            stop_sequences=limits.stop_strings()[1],
            suffice=limits.preferences.shape,
        )
        super().__init__(shape, limits.preferences)

    def __call__(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> MessagesRequest:
        """Check everything the body says.

        Raises
        ------
        InvalidRequest
            Missing, of the wrong type or out of range; ``param`` names the field.
        UnsupportedOption
            Understood, but nothing here can do it yet.
        """
        given = self._checked(body)
        reader = _BlockReader()
        turns = [reader.turn(each, f"messages[{place}]") for place, each in enumerate(given.messages)]
        check_results(turns, "messages")
        if system := _system(given.system):
            turns.insert(0, Turn("system", system))
        choice = given.tool_choice
        loaded = reader.referenced | ({choice.name} if choice is not None and choice.name else set())
        tools = _tools(given.tools or (), loaded)
        thinking = None if given.thinking is None else given.thinking.type
        return MessagesRequest(
            model=given.model,
            prompts=(tuple(turns),),
            sampling=_sampling(given),
            stream=bool(given.stream),
            thinking={"enabled": True, "disabled": False}.get(thinking or ""),
            preferences=self._preferences(given.suffice, headers, None),
            tools=tools,
            tool_choice=_tool_choice(choice, tools),
            output_format=_output_format(given.output_config),
            hints=ConversationHints(user_id=user_id_of(given.metadata)),
            shows_thinking=thinking in ("enabled", "adaptive"),
        )


class _BlockReader:
    """Reads the blocks of messages. ``referenced`` are the tools that results have loaded."""

    def __init__(self) -> None:
        self.referenced: set[str] = set()

    def turn(self, message: MessageField, where: str) -> Turn:
        where = f"{where}.content"
        if isinstance(message.content, str):
            return Turn(message.role, (TextPart(message.content),))
        found = [self._part(block, f"{where}[{place}]") for place, block in enumerate(message.content)]
        return Turn(message.role, tuple([part for part in found if part is not None]))

    def _part(self, block: Mapping[str, Any], where: str) -> Part | None:
        """Return a block's part; None for one of a type that nobody here knows."""
        kind = block.get("type")
        if kind == "tool_use":
            arguments = _object(block, "input", where)
            call_id, name = text_of(block, "id", where), text_of(block, "name", where)
            return ToolCall(call_id, name, orjson.dumps(arguments).decode())
        if kind == "tool_result":
            parts = self._result(block.get("content"), f"{where}.content")
            return ToolResultPart(text_of(block, "tool_use_id", where), parts, block.get("is_error") is True)
        if kind == "thinking":
            signature = block.get("signature")
            thought = text_of(block, "thinking", where)
            return ReasoningPart(thought, signature if isinstance(signature, str) and signature else None)
        if kind == "redacted_thinking":
            return ReasoningPart("", text_of(block, "data", where), is_redacted=True)
        return _shown(block, where)

    def _result(self, content: Any, where: str) -> tuple[Shown, ...]:
        if content is None:
            return ()
        if isinstance(content, str):
            return (TextPart(content),)
        if not isinstance(content, list):
            raise wrong_type(where, "a string or an array of content blocks", content)
        found: list[Shown] = []
        for place, block in enumerate(content):
            if not isinstance(block, dict):
                raise wrong_type(f"{where}[{place}]", "an object", block)
            if block.get("type") == "tool_reference":
                name = text_of(block, "tool_name", f"{where}[{place}]")
                self.referenced.add(name)
                found.append(TextPart(f"Found: {name}"))
            elif (part := _shown(block, f"{where}[{place}]")) is not None:
                found.append(part)
        return tuple(found)


def _shown(block: Mapping[str, Any], where: str) -> Shown | None:
    """Return a block of text, an image or a document; None for one of another type.

    Raises
    ------
    UnsupportedOption
        It is kept elsewhere.
    """
    kind = block.get("type")
    if kind == "text":
        return TextPart(text_of(block, "text", where))
    if kind not in ("image", "document"):
        return None
    source = _object(block, "source", where)
    if source.get("type") == "base64":
        media = text_of(source, "media_type", f"{where}.source")
        url, title = f"data:{media};base64,{text_of(source, 'data', f'{where}.source')}", block.get("title")
        return Image(url) if kind == "image" else File(url, title if isinstance(title, str) else None)
    if kind == "image" and source.get("type") == "url":
        return Image(text_of(source, "url", f"{where}.source"))
    if kind == "document" and source.get("type") == "text":
        return TextPart(text_of(source, "data", f"{where}.source"))
    told = str(source.get("type"))[:40]
    raise UnsupportedOption(
        f"'{where}' is of type {kind!r} with a source of type {told!r}; send it in base64, or as text.",
        param=where,
    )


def _object(block: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    value = block.get(name)
    if not isinstance(value, dict):
        raise wrong_type(f"{where}.{name}", "an object", value)
    return value


def _system(given: str | Sequence[Mapping[str, Any]] | None) -> tuple[TextPart, ...]:
    if given is None or isinstance(given, str):
        texts = [given or ""]
    else:
        texts = [
            text_of(block, "text", f"system[{place}]")
            for place, block in enumerate(given)
            if block.get("type", "text") == "text"
        ]
    kept = [_without_billing(text) for text in texts]
    return tuple([TextPart(text) for text in kept if text])


def _without_billing(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(_BILLING_LINE) else text


def _tools(given: Sequence[ToolField], loaded: set[str]) -> tuple[Tool, ...]:
    tools: dict[str, Tool] = {}
    for place, each in enumerate(given):
        if not each.is_custom or (each.defer_loading and each.name not in loaded):
            continue
        if each.name in tools:
            raise InvalidRequest(f"Two tools are named {each.name!r}.", param=f"tools[{place}].name")
        tools[each.name] = Tool(each.name, each.description or "", each.input_schema or {}, bool(each.strict))
    return tuple(tools.values())


def _tool_choice(given: ToolChoiceField | None, tools: Sequence[Tool]) -> ToolChoice:
    if given is None:
        return FREE_CHOICE
    is_parallel = not given.disable_parallel_tool_use
    if given.type == "tool":
        if given.name not in {tool.name for tool in tools}:
            raise InvalidRequest(
                f"'tool_choice' names {given.name!r}, which is not among 'tools'.", param="tool_choice.name"
            )
        return ToolChoice("required", (str(given.name),), is_parallel)
    if given.type == "any":
        if not tools:
            raise InvalidRequest("'tool_choice' is 'any', but no tool can be called.", param="tool_choice")
        return ToolChoice("required", parallel=is_parallel)
    if given.type == "none":
        return ToolChoice("none", parallel=is_parallel)
    return FREE_CHOICE if is_parallel else ToolChoice(parallel=False)


def _sampling(given: CountBody) -> SamplingParams:
    num_tokens = given.max_tokens if isinstance(given, MessagesBody) else None
    chosen: dict[str, Any] = {"max_tokens": num_tokens, "stop": given.stop_sequences or ()}
    if given.temperature is not None:
        chosen["temperature"] = given.temperature
    if given.top_p is not None:
        chosen["top_p"] = given.top_p or LEAST_SHARE
    if given.top_k is not None:
        chosen["top_k"] = given.top_k
    return SamplingParams(**chosen)


def _output_format(given: OutputField | None) -> OutputFormat:
    if given is None or given.format is None:
        return PLAIN_TEXT
    return OutputFormat("json_schema", given.format.schema, strict=True, name=_FORMAT_NAME)
