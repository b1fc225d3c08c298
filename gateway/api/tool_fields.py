"""Declares how chat bodies name tools, choose among them and say what an answer's text must be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from backends.protocol import FREE_CHOICE, PLAIN_TEXT, OutputFormat, Tool, ToolChoice
from gateway.api.declaration import Words
from gateway.errors import InvalidRequest, UnsupportedOption


def _unsupported_tool(value: Any, param: str) -> InvalidRequest | None:
    if not isinstance(value, str) or value == "function":
        return None
    return UnsupportedOption(f"'{param}' is {value[:40]!r}; only functions are supported.", param=param)


# "$" alone would let a line break follow.
ToolName = Annotated[
    str,
    Meta(pattern=r"^[A-Za-z0-9_.-]{1,128}(?!\n)$"),
    Words(value="1 to 128 letters, digits, underscores, dots and hyphens"),
]


class FunctionSpec(Struct):
    """A function that the model may call; ``parameters`` is the JSON Schema of its arguments."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(Struct):
    """A tool; functions are the one kind there is."""

    type: Annotated[Literal["function"], Words(error=_unsupported_tool)]
    function: FunctionSpec


class FunctionName(Struct):
    """A function by its name."""

    name: ToolName


class NamedTool(Struct, tag="function", tag_field="type"):
    """The function that is to be called."""

    function: FunctionName


class AllowedSet(Struct):
    """Functions that may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1)]


class AllowedTools(Struct, tag="allowed_tools", tag_field="type"):
    """Limits the choice to some of the tools."""

    allowed_tools: AllowedSet


ChoiceField = (
    Annotated[
        Literal["auto", "none", "required"], Words(value="'auto', 'none', 'required', or an object that names tools")
    ]
    | Annotated[NamedTool | AllowedTools, Words()]
)


class TextFormat(Struct, tag="text", tag_field="type"):
    """Any text."""


class JsonObjectFormat(Struct, tag="json_object", tag_field="type"):
    """Some JSON object."""


class SchemaSpec(Struct):
    """A JSON Schema that the answer satisfies."""

    name: Annotated[str, Meta(min_length=1, max_length=64)] = "response"
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class JsonSchemaFormat(Struct, tag="json_schema", tag_field="type"):
    """JSON that satisfies a schema."""

    json_schema: SchemaSpec


FormatField = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(Struct):
    """What the answer must be, as vLLM says it; one of the fields."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=1024)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


def read_tools(given: Sequence[ChatTool] | None) -> tuple[Tool, ...]:
    """Return the tools of a body.

    Raises
    ------
    InvalidRequest
        Two have one name.
    """
    tools: dict[str, Tool] = {}
    for place, each in enumerate(given or ()):
        spec = each.function
        if spec.name in tools:
            raise InvalidRequest(f"Two tools are named {spec.name!r}.", param=f"tools[{place}].function.name")
        tools[spec.name] = Tool(spec.name, spec.description or "", spec.parameters or {}, bool(spec.strict))
    return tuple(tools.values())


def read_tool_choice(
    given: str | NamedTool | AllowedTools | None, parallel: bool | None, tools: Sequence[Tool]
) -> ToolChoice:
    """Return which calls are wanted.

    Raises
    ------
    InvalidRequest
        It asks for a tool that is not there.
    """
    is_parallel = parallel is not False
    if given is None or isinstance(given, str):
        mode = "auto" if given is None else given
        if mode == "required" and not tools:
            raise InvalidRequest("'tool_choice' is 'required', but there are no 'tools'.", param="tool_choice")
        if mode == "auto" and is_parallel:
            return FREE_CHOICE
        return ToolChoice(mode, parallel=is_parallel)  # type: ignore[arg-type]
    if isinstance(given, NamedTool):
        names: tuple[str, ...] = (given.function.name,)
        mode = "required"
    else:
        names = tuple([each.function.name for each in given.allowed_tools.tools])
        mode = given.allowed_tools.mode
    known = {tool.name for tool in tools}
    for name in names:
        if name not in known:
            raise InvalidRequest(f"'tool_choice' names {name!r}, which is not among 'tools'.", param="tool_choice")
    return ToolChoice(mode, names, is_parallel)  # type: ignore[arg-type]


def read_output_format(given: FormatField | None, structured: StructuredOutputs | None) -> OutputFormat:
    """Return what the answer's text must be.

    Raises
    ------
    InvalidRequest
        It is said twice, or a schema is missing.
    """
    constrained = _structured(structured)
    if isinstance(given, JsonObjectFormat):
        plain = OutputFormat("json_object")
    elif isinstance(given, JsonSchemaFormat):
        spec = given.json_schema
        if spec.schema is None:
            where = "response_format.json_schema.schema"
            raise InvalidRequest(f"You must give '{where}'.", param=where)
        plain = OutputFormat("json_schema", spec.schema, bool(spec.strict), spec.name)
    else:
        return constrained
    if constrained is not PLAIN_TEXT:
        raise InvalidRequest(
            "'response_format' and 'structured_outputs' both say what the answer must be; give one.",
            param="structured_outputs",
        )
    return plain


def _structured(given: StructuredOutputs | None) -> OutputFormat:
    if given is None:
        return PLAIN_TEXT
    found: Mapping[str, Any] = {
        "json_schema": given.json,
        "regex": given.regex,
        "choice": given.choice,
        "grammar": given.grammar,
        "json_object": given.json_object or None,
    }
    said = [(kind, spec) for kind, spec in found.items() if spec is not None]
    if len(said) > 1:
        raise InvalidRequest("'structured_outputs' says more than one thing; give one.", param="structured_outputs")
    if not said:
        return PLAIN_TEXT
    kind, spec = said[0]
    if kind == "json_object":
        return OutputFormat("json_object")
    return OutputFormat(kind, tuple(spec) if kind == "choice" else spec, strict=True)  # type: ignore[arg-type]
