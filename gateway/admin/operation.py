"""What a path of the administration takes and gives, declared once: requests are checked by it, and described by it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from gateway.api import fields
from gateway.api.fields import Check, Schema
from gateway.errors import InvalidRequest

Method = Literal["GET", "PUT", "POST", "DELETE"]
Conditional = Literal["no", "may", "must"]


@dataclass(frozen=True, slots=True)
class Field:
    """A query parameter or a member of a body. One that is absent, or null, has its default."""

    check: Check
    help: str
    default: Any = None
    required: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        shown = fields.schema_of(self.check) | {"description": self.help}
        return shown if self.default is None else shown | {"default": self.default}


Fields = Mapping[str, Field]


async def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Bytes:
    """A body that is no JSON, of at most so many bytes."""

    max_bytes: int
    media_type: str = "application/octet-stream"


@dataclass(frozen=True, slots=True)
class Free:
    """A JSON object that is checked where it is used; ``schema`` says what it may hold."""

    schema: Schema


@dataclass(frozen=True, slots=True)
class Asked:
    """A checked request.

    Attributes
    ----------
    by : who asks, for the rows it changes
    path, query, body : by name; a body of bytes is ``raw``
    if_match : the entity tag the change rests on; empty when the thing must not be there yet, None when not said
    is_gone : whether the caller has left; asked by work that takes long
    """

    by: str
    path: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, Any] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)
    raw: bytes = b""
    if_match: str | None = None
    trail: Trail = field(default_factory=lambda: Trail())
    is_gone: Callable[[], Awaitable[bool]] = _never


@dataclass(slots=True)
class Trail:
    """What the audit log will say of a change; ``is_written`` once a change carries it in its own transaction.

    ``status`` is that of a success.
    """

    action: str = ""
    subject: str = ""
    status: int = 200
    key_id: str | None = None
    remote: str = ""
    before: Mapping[str, Any] | None = None
    after: Mapping[str, Any] | None = None
    is_written: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """What is answered: a JSON value, or text of a type of its own."""

    value: Any = None
    status: int = 200
    etag: str | None = None


Handler = Callable[[Asked], Awaitable[Reply]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method on one path.

    Attributes
    ----------
    path : below ``/admin/v1``, with ``{names}`` of the parts that vary
    name : unique, as generated clients call it
    returns : what a success holds
    status : of a success
    errors : exception classes it can answer beside those that every operation can
    conditional : whether ``If-Match`` may or must be sent
    """

    method: Method
    path: str
    name: str
    summary: str
    handler: Handler
    returns: Schema
    status: int = 200
    query: Fields = field(default_factory=dict)
    body: Fields | Bytes | Free | None = None
    errors: tuple[type[Exception], ...] = ()
    conditional: Conditional = "no"

    @property
    def is_write(self) -> bool:
        return self.method != "GET"

    def read_query(self, given: list[tuple[str, str]]) -> dict[str, Any]:
        """Check the query.

        Raises
        ------
        InvalidRequest
            Unknown, given twice, of the wrong form or out of range.
        """
        found: dict[str, Any] = {}
        for name, text in given:
            if name not in self.query or name in found:
                problem = "given twice" if name in found else f"unknown; known are {', '.join(self.query) or 'none'}"
                raise InvalidRequest(f"The query parameter {name[:80]!r} is {problem}.", param=name[:80])
            check = self.query[name].check
            found[name] = check(_from_text(text, fields.schema_of(check)), name)
        for name, each in self.query.items():
            if each.required and name not in found:
                raise InvalidRequest(f"You must give '{name}' in the query: {each.help}", param=name)
        return {name: each.default for name, each in self.query.items()} | found

    def read_body(self, value: Mapping[str, Any]) -> Mapping[str, Any]:
        """Check a JSON body.

        Raises
        ------
        InvalidRequest
        """
        if not isinstance(self.body, Mapping):
            return value
        return read_fields(self.body, value, "")

    def body_schema(self) -> Schema | None:
        """The JSON Schema of the body."""
        if isinstance(self.body, Free):
            return self.body.schema
        return object_schema(self.body) if isinstance(self.body, Mapping) else None


class Pages(Protocol):
    """A group of operations on the same parts of the server."""

    def __init__(self, rooms: Any) -> None: ...

    def operations(self) -> list[Operation]: ...


def read_fields(declared: Fields, value: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Check an object's members; unknown ones are refused, because a misspelt one would be ignored in silence.

    Raises
    ------
    InvalidRequest
    """
    for name in value:
        if name not in declared:
            raise InvalidRequest(
                f"{where or 'The body'} has no field {name[:80]!r}; known are {', '.join(declared) or 'none'}.",
                param=f"{where}{name[:80]}",
            )
    found = {}
    for name, each in declared.items():
        given = value.get(name)
        if given is None and each.required:
            raise InvalidRequest(f"You must give '{where}{name}': {each.help}", param=f"{where}{name}")
        found[name] = each.default if given is None else each.check(given, f"{where}{name}")
    return found


def object_schema(declared: Fields) -> dict[str, Any]:
    """The JSON Schema of an object with these members and no others."""
    properties = {
        name: each.schema if each.required else {"anyOf": [each.schema, {"type": "null"}]}
        for name, each in declared.items()
    }
    required = [name for name, each in declared.items() if each.required]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _from_text(text: str, schema: Mapping[str, Any]) -> Any:
    """A query parameter's text as the JSON value its check expects."""
    kind = schema.get("type")
    if kind == "boolean" and text in ("true", "false"):
        return text == "true"
    if kind == "integer" and text.lstrip("-").isascii() and text.lstrip("-").isdecimal() and len(text) < 20:
        return int(text)
    if kind == "number":
        try:
            return float(text)
        except ValueError:
            return text
    return text
