"""Reads the tools of ``/v1/responses`` into the internal form, and finds back what a client calls them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from backends.protocol import FREE_CHOICE, Tool, ToolChoice
from gateway.api.declaration import checked, wrong_type
from gateway.api.tool_fields import ToolName
from gateway.errors import InvalidRequest, UnsupportedOption

_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


class FunctionItem(Struct):
    """A function; without ``strict`` it is strict where its schema leaves nothing open."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomFormat(Struct):
    """What a custom tool's input must be."""

    type: str
    syntax: str | None = None
    definition: str | None = None


class CustomItem(Struct):
    """A tool that takes free text."""

    name: ToolName
    description: str | None = None
    format: CustomFormat | None = None


class NamespaceItem(Struct):
    """Tools under one name."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    tools: list[dict[str, Any]]


class ChoiceItem(Struct):
    """A choice among tools by name."""

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[dict[str, Any]] | None = None


class ClientTool(Struct, frozen=True):
    """What the client calls a tool, and whether it takes free text."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


class ToolBox:
    """The tools of one request, as models and as its client name them.

    Attributes
    ----------
    tools : as models see them; a tool in a namespace is called ``namespace__name``
    clients : name for the model -> what the client calls it
    shown : what of the body's own ``tools`` is served
    ignored : types that were skipped
    """

    def __init__(self, most: int) -> None:
        self.tools: dict[str, Tool] = {}
        self.clients: dict[str, ClientTool] = {}
        self.shown: list[dict[str, Any]] = []
        self.ignored: list[str] = []
        self._names: dict[tuple[str | None, str], str] = {}
        self._most = most

    def add(self, given: Sequence[Mapping[str, Any]], param: str, *, is_shown: bool = False) -> None:
        """Take tools; of two with one name the later counts, types that nobody here knows are skipped.

        Raises
        ------
        InvalidRequest
        """
        for place, each in enumerate(given):
            where, kind = f"{param}[{place}]", each.get("type")
            if not isinstance(kind, str):
                raise wrong_type(f"{where}.type", "a string", kind)
            if kind == "namespace":
                group = checked(each, NamespaceItem, where)
                for inner, tool in enumerate(group.tools):
                    self._add(tool, f"{where}.tools[{inner}]", group.name)
            elif not self._add(each, where, None):
                continue
            if is_shown:
                self.shown.append(dict(each))

    def model_name(self, name: str, namespace: str | None) -> str:
        """Return what models call a tool, whether it is offered or only part of the history."""
        found = self._names.get((namespace, name))
        return found or (name if namespace is None else f"{namespace}__{name}")

    def client_tool(self, name: str) -> ClientTool:
        """Return what the client calls the tool that a model named."""
        return self.clients.get(name) or ClientTool(name)

    def choice(self, given: Any, parallel: bool | None) -> ToolChoice:
        """Return which calls are wanted.

        Raises
        ------
        InvalidRequest, UnsupportedOption
        """
        is_parallel = parallel is not False
        if given is None or isinstance(given, str):
            if given not in (None, "auto", "none", "required"):
                raise InvalidRequest(
                    f"'tool_choice' is {given[:40]!r}; expected 'auto', 'none', 'required' or an object.",
                    param="tool_choice",
                )
            if given == "required" and not self.tools:
                raise InvalidRequest("'tool_choice' is 'required', but no tool can be called.", param="tool_choice")
            plain = given in (None, "auto") and is_parallel
            return FREE_CHOICE if plain else ToolChoice(given or "auto", parallel=is_parallel)  # type: ignore[arg-type]
        wanted = checked(given, ChoiceItem, "tool_choice")
        if wanted.type in ("function", "custom"):
            return ToolChoice("required", (self._chosen(wanted),), is_parallel)
        if wanted.type == "allowed_tools":
            items = [checked(each, ChoiceItem, "tool_choice.tools") for each in wanted.tools or ()]
            names = tuple([self._chosen(each) for each in items if each.type in ("function", "custom")])
            if not names:
                raise InvalidRequest("'tool_choice' allows no tool that can be called.", param="tool_choice.tools")
            return ToolChoice(wanted.mode or "auto", names, is_parallel)
        raise UnsupportedOption(
            f"'tool_choice' asks for {wanted.type[:40]!r}; only functions and custom tools are called.",
            param="tool_choice.type",
        )

    def _chosen(self, wanted: ChoiceItem) -> str:
        name = self.model_name(wanted.name or "", wanted.namespace)
        if name not in self.tools:
            raise InvalidRequest(
                f"'tool_choice' names {wanted.name!r}, which is not among the tools.", param="tool_choice"
            )
        return name

    def _add(self, given: Mapping[str, Any], where: str, namespace: str | None) -> bool:
        kind = given.get("type")
        if kind == "function":
            spec = checked(given, FunctionItem, where)
            parameters = spec.parameters or {}
            strict = bool(parameters) and _is_closed(parameters) if spec.strict is None else spec.strict
            self._put(ClientTool(spec.name, namespace), spec.description or "", parameters, strict=strict)
        elif kind == "custom":
            custom = checked(given, CustomItem, where)
            told = custom.description or ""
            if custom.format is not None and custom.format.definition:
                told += f"\nThe input follows this {custom.format.syntax or ''} grammar:\n{custom.format.definition}"
            self._put(ClientTool(custom.name, namespace, is_custom=True), told, _CUSTOM_PARAMETERS, strict=False)
        else:
            self.ignored.append(str(kind)[:64])
            return False
        if len(self.tools) > self._most:
            raise InvalidRequest(f"There are more than {self._most} tools.", param=where)
        return True

    def _put(self, client: ClientTool, told: str, parameters: Mapping[str, Any], *, strict: bool) -> None:
        key = (client.namespace, client.name)
        name = self._names.get(key)
        if name is None:
            base = name = self.model_name(client.name, client.namespace)
            number = 2
            while name in self.tools:
                name, number = f"{base}_{number}", number + 1
            self._names[key] = name
        self.tools[name] = Tool(name, told, parameters, strict)
        self.clients[name] = client


def _is_closed(schema: Any) -> bool:
    """Whether each object of a schema requires all its members and permits no others, as OpenAI's strict mode asks."""
    if isinstance(schema, list):
        return all(map(_is_closed, schema))
    if not isinstance(schema, dict):
        return True
    if schema.get("type") == "object" or "properties" in schema:
        members = schema.get("properties") or {}
        required = schema.get("required") or ()
        if not isinstance(members, dict) or not isinstance(required, list):
            return False
        if schema.get("additionalProperties") is not False or not set(members) <= {str(each) for each in required}:
            return False
    return all(map(_is_closed, schema.values()))
