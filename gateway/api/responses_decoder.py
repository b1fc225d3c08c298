"""Reads the requests of ``/v1/responses`` into the internal form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import orjson
from msgspec import Meta, Struct

from backends.protocol import PLAIN_TEXT, Audio, File, Image, OutputFormat, SamplingParams, ToolCall
from gateway.api.chat_codec import InputAudio
from gateway.api.declaration import Words, checked, limited, wrong_type
from gateway.api.generation_body import (
    LEAST_SHARE,
    BodyDecoder,
    BodyLimits,
    Label,
    ModelName,
    PositiveTokenCount,
    Share,
    text_of,
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
from gateway.api.response_context import ALONE, Item, ResponseContext, own_items
from gateway.api.responses_tools import ClientTool, ToolBox
from gateway.api.routing_preferences import RoutingOptions
from gateway.errors import InvalidRequest, UnsupportedOption

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
_LOGPROBS = "message.output_text.logprobs"
_SEALED = "reasoning.encrypted_content"
# One output of a model is often three items: reasoning, call, result.
_ITEMS_PER_MESSAGE = 4


def _unsupported(value: Any, param: str) -> InvalidRequest:
    return UnsupportedOption(f"'{param}' is not supported; leave it out.", param=param)


_REFUSED = Words(error=_unsupported)


class ReasoningField(Struct):
    """How much the model thinks, and whether its client wants to read it as a summary."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None


class TextFormatField(Struct):
    """What the answer's text must be."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextField(Struct):
    """The answer's text."""

    format: TextFormatField | None = None
    verbosity: str | None = None


class ResponsesBody(Struct, kw_only=True):
    """A conversation as items, which is to be answered."""

    model: ModelName
    input: Annotated[
        str | Annotated[list[dict[str, Any]], Meta(min_length=1)], Words(kind="a string or an array of items")
    ]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningField | None = None
    text: TextField | None = None
    store: bool | None = None
    stream: bool | None = None
    include: list[str] | None = None
    prompt_cache_key: Label | None = None
    client_metadata: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    max_output_tokens: PositiveTokenCount | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_logprobs: int | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    service_tier: Annotated[str, Meta(max_length=64)] | None = None
    suffice: RoutingOptions | None = None

    previous_response_id: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    conversation: Annotated[None, _REFUSED] = None
    background: Annotated[Literal[False], _REFUSED] | None = None
    prompt: Annotated[None, _REFUSED] = None


class ResponsesRequest(InferenceRequest, frozen=True, kw_only=True):
    """A request with what only its encoder reads.

    Parameters
    ----------
    body : as it was checked
    clients : what the client calls each tool, by the model's name for it
    shown_tools : what of the body's tools is served
    items : its own input
    context : what it rests on beside its body
    """

    body: ResponsesBody
    clients: Mapping[str, ClientTool]
    shown_tools: tuple[Mapping[str, Any], ...] = ()
    items: Sequence[Item] = ()
    context: ResponseContext = ALONE

    @property
    def is_kept(self) -> bool:
        """Whether its answer is kept."""
        return self.context.is_kept(self.body.store)

    @property
    def wants_seal(self) -> bool:
        """Whether its client keeps the reasoning itself."""
        return _SEALED in (self.body.include or ())


class ResponsesDecoder(BodyDecoder[ResponsesBody]):
    """Decodes bodies of ``/v1/responses`` under the server's limits."""

    def __init__(self, limits: BodyLimits) -> None:
        top_logprobs = Annotated[int, Meta(ge=0, le=limits.server.max_logprobs)]
        tools = limits.tools(dict[str, Any])
        shape = limited(ResponsesBody, top_logprobs=top_logprobs, tools=tools, suffice=limits.preferences.shape)
        self._server = limits.server
        super().__init__(shape, limits.preferences)

    def __call__(
        self, body: Mapping[str, Any], headers: Mapping[str, str], context: ResponseContext = ALONE
    ) -> ResponsesRequest:
        """Check everything the body says.

        Raises
        ------
        InvalidRequest
            Missing, of the wrong type or out of range; ``param`` names the field.
        UnsupportedOption
            Understood, but nothing here can do it yet.
        """
        given, earlier = self._checked(body), context.earlier
        if given.previous_response_id is not None and earlier is None:
            raise UnsupportedOption(
                "'previous_response_id': answers are not kept here; send the whole conversation as 'input'.",
                param="previous_response_id",
            )
        items = own_items(given.input)
        box = ToolBox(self._server.max_tools)
        box.add(given.tools or (), "tools", is_shown=True)
        turns = self._turns(given, items, box, context)
        preferences = self._preferences(given.suffice, headers, given.service_tier)
        effort = None if given.reasoning is None else given.reasoning.effort
        return ResponsesRequest(
            model=given.model,
            prompts=(turns,),
            sampling=_sampling(given),
            stream=bool(given.stream),
            thinking=None if effort is None else effort not in ("none", "minimal"),
            preferences=context.narrow(preferences),
            tools=tuple(box.tools.values()),
            tool_choice=box.choice(given.tool_choice, given.parallel_tool_calls),
            output_format=_output_format(given.text),
            hints=ConversationHints(given.prompt_cache_key, None, None if earlier is None else earlier.conversation),
            body=given,
            clients=box.clients,
            shown_tools=tuple(box.shown),
            items=items,
            context=context,
        )

    def _turns(
        self, given: ResponsesBody, items: Sequence[Item], box: ToolBox, context: ResponseContext
    ) -> tuple[Turn, ...]:
        first = [Turn("system", (TextPart(given.instructions),))] if given.instructions else []
        placed = [(item, f"input[{place}]") for place, item in enumerate(items)]
        if context.earlier is not None:
            placed[:0] = [(item, "previous_response_id") for item in context.earlier.items]
        placed = [(context.resolved(item, where), where) for item, where in placed]
        blamed = "input" if context.earlier is None else "previous_response_id"
        most = _ITEMS_PER_MESSAGE * self._server.max_messages
        if len(placed) > most:
            raise InvalidRequest(f"The conversation has {len(placed)} items; expected at most {most}.", param=blamed)
        # Calls are named by the tools, wherever in the input these stand.
        for item, where in placed:
            if item.get("type") in ("additional_tools", "tool_search_output"):
                box.add(checked(item.get("tools"), list[dict[str, Any]], f"{where}.tools"), f"{where}.tools")
        history = _History(box, context)
        for item, where in placed:
            history.add(item, where)
        turns = (*first, *history.turns())
        if len(turns) == len(first):
            raise InvalidRequest("'input' has no item that a model can read.", param="input")
        if len(turns) > self._server.max_messages:
            raise InvalidRequest(
                f"The conversation makes {len(turns)} messages; expected at most {self._server.max_messages}.",
                param=blamed,
            )
        return turns


class _History:
    """Joins items into turns: a run of reasoning, text and calls is one output, and its results follow it."""

    def __init__(self, box: ToolBox, context: ResponseContext) -> None:
        self._box = box
        self._context = context
        self._turns: list[tuple[str, list[Part], list[ToolResultPart]]] = []
        self._waiting: dict[str, list[ToolResultPart]] = {}
        self._known: set[str] = set()
        self._is_output = False

    def add(self, item: Mapping[str, Any], where: str) -> None:
        """Take an item; one of a type that nobody here knows is skipped.

        Raises
        ------
        InvalidRequest, UnsupportedOption
        """
        kind = item.get("type") or "message"
        if not isinstance(kind, str):
            raise wrong_type(f"{where}.type", "a string", kind)
        if kind == "message":
            self._add_message(item, where)
        elif kind == "reasoning":
            if text := self._reasoning(item, where):
                self._output().append(ReasoningPart(text))
        elif kind in ("function_call", "custom_tool_call", "tool_search_call"):
            self._add_call(kind, item, where)
        elif kind in ("function_call_output", "custom_tool_call_output", "tool_search_output"):
            self._add_result(kind, item, where)

    def turns(self) -> list[Turn]:
        """Return the turns.

        Raises
        ------
        InvalidRequest
            A call has no result.
        """
        if self._waiting:
            names = ", ".join(map(repr, self._waiting))
            raise InvalidRequest(f"A result is missing for each of these calls: {names}.", param="input")
        found: list[Turn] = []
        for role, parts, results in self._turns:
            found.append(Turn(role, tuple(parts)))
            found += [Turn("tool", (result,)) for result in results]
        return found

    def _output(self) -> list[Part]:
        if not self._is_output:
            self._turns.append(("assistant", [], []))
            self._is_output = True
        return self._turns[-1][1]

    def _reasoning(self, item: Mapping[str, Any], where: str) -> str:
        """Return a model's reasoning as it was sent back: sealed by us, in full, else its summary."""
        text = self._context.unsealed(item.get("encrypted_content"), where)
        if text is not None:
            return text
        for name in ("content", "summary"):
            content = item.get(name)
            if content:
                parts = _parts(content, f"{where}.{name}")
                return "\n".join([part.text for part in parts if isinstance(part, TextPart)])
        return ""

    def _add_message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise InvalidRequest(f"'{where}.role' must be one of {', '.join(_ROLES)}.", param=f"{where}.role")
        parts = _parts(item.get("content"), f"{where}.content")
        if role == "assistant":
            self._output().extend(parts)
        elif parts:
            self._is_output = False
            self._turns.append((_ROLES[role], list(parts), []))

    def _add_call(self, kind: str, item: Mapping[str, Any], where: str) -> None:
        call_id = text_of(item, "call_id", where)
        if call_id in self._known:
            raise InvalidRequest(f"'{where}' is a second call with the id {call_id!r}.", param=f"{where}.call_id")
        if kind == "tool_search_call":
            name, arguments = "tool_search", orjson.dumps(item.get("arguments") or {}).decode()
        else:
            space = item.get("namespace")
            name = self._box.model_name(text_of(item, "name", where), space if isinstance(space, str) else None)
            if kind == "function_call":
                arguments = text_of(item, "arguments", where) or "{}"
            else:
                arguments = orjson.dumps({"input": text_of(item, "input", where)}).decode()
        output = self._output()
        output.append(ToolCall(call_id, name, arguments))
        self._known.add(call_id)
        self._waiting[call_id] = self._turns[-1][2]

    def _add_result(self, kind: str, item: Mapping[str, Any], where: str) -> None:
        call_id = text_of(item, "call_id", where)
        results = self._waiting.pop(call_id, None)
        if results is None:
            raise InvalidRequest(
                f"'{where}' is the result of {call_id!r}, which no call before it waits for.", param=f"{where}.call_id"
            )
        if kind == "tool_search_output":
            names = [each.get("name") for each in item.get("tools") or ()]
            parts: tuple[Shown, ...] = (TextPart(f"Found: {', '.join(map(str, names))}"),)
        else:
            parts = _parts(item.get("output"), f"{where}.output")
        results.append(ToolResultPart(call_id, parts))
        self._is_output = False


def _parts(content: Any, where: str) -> tuple[Shown, ...]:
    if isinstance(content, str):
        return (TextPart(content),)
    if not isinstance(content, list):
        raise wrong_type(where, "a string or an array of content parts", content)
    found: list[Shown] = []
    for place, part in enumerate(content):
        if not isinstance(part, dict):
            raise wrong_type(f"{where}[{place}]", "an object", part)
        if (read := _part(part, f"{where}[{place}]")) is not None:
            found.append(read)
    return tuple(found)


def _part(part: Mapping[str, Any], where: str) -> Shown | None:
    """Return a part; None for one of a type that nobody here knows.

    Raises
    ------
    UnsupportedOption
        It is kept elsewhere.
    """
    kind = part.get("type")
    if kind in _TEXT_PARTS:
        return TextPart(text_of(part, "text", where))
    if kind == "refusal":
        return TextPart(text_of(part, "refusal", where), is_refusal=True)
    if kind == "input_image" and part.get("image_url") is not None:
        detail = part.get("detail")
        return Image(text_of(part, "image_url", where), detail if isinstance(detail, str) else None)
    if kind == "input_audio":
        sound = checked(part.get("input_audio"), InputAudio, f"{where}.input_audio")
        return Audio(sound.data, sound.format)
    if kind == "input_file" and part.get("file_data") is not None:
        name = part.get("filename")
        return File(text_of(part, "file_data", where), name if isinstance(name, str) else None)
    if kind in ("input_image", "input_file"):
        raise UnsupportedOption(
            f"'{where}' is of type {kind!r} and kept elsewhere; send an image by 'image_url', a file as 'file_data'.",
            param=where,
        )
    return None


def _sampling(given: ResponsesBody) -> SamplingParams:
    chosen: dict[str, Any] = {}
    if given.temperature is not None:
        chosen["temperature"] = given.temperature
    if given.top_p is not None:
        chosen["top_p"] = given.top_p or LEAST_SHARE
    if given.max_output_tokens is not None:
        chosen["max_tokens"] = given.max_output_tokens
    if _LOGPROBS in (given.include or ()):
        chosen["logprobs"] = given.top_logprobs or 0
    return SamplingParams(**chosen)


def _output_format(text: TextField | None) -> OutputFormat:
    if text is None or text.format is None or text.format.type == "text":
        return PLAIN_TEXT
    wanted = text.format
    if wanted.type == "json_object":
        return OutputFormat("json_object")
    if wanted.schema is None:
        raise InvalidRequest("You must give 'text.format.schema'.", param="text.format.schema")
    return OutputFormat("json_schema", wanted.schema, bool(wanted.strict), wanted.name or "response")
