"""Declares the operations of ``/admin/v1`` at their handlers; requests are checked and described by what is declared.

A handler's signature says what it takes: a parameter for each part of its path that varies, ``query`` and ``body`` of a
declared type. Its docstring is the operation's summary, its name the operation's name::

    @operation("PUT", "/kill-switch", returns=KillSwitchView, conditional="may")
    async def set_kill_switch(self, request: AdminRequest, body: KillSwitchBody) -> AdminResponse:
        \"\"\"Send all traffic to the top tier, on every server within a second; or route again.\"\"\"
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar, get_origin, get_type_hints

from msgspec import Struct
from msgspec.structs import FieldInfo, fields

from gateway.admin.audit_trail import AuditTrail
from gateway.admin.context import AdminContext
from gateway.api.declaration import ClosedShape, checked, schema_of
from gateway.config.sections import AdminConfig
from gateway.control.audited_change import Audit
from gateway.control.control_state import ControlState
from gateway.errors import InvalidRequest
from gateway.store.control_records import AuditEntry

S = TypeVar("S", bound="AdminShape")

Method = Literal["GET", "PUT", "POST", "DELETE"]
Conditional = Literal["no", "may", "must"]
BodyKind = Literal["none", "bytes", "free", "members"]
"""Whether a body is none, no JSON, an object that is checked where it is used, or one of declared members."""


class AdminShape(ClosedShape, frozen=True):
    """A query, or an object in a body. A member that is absent, or null, has its default."""


@dataclass(frozen=True, slots=True)
class AdminRequest:
    """Holds what every operation may ask of a request.

    Attributes
    ----------
    by : who asks, for the rows it changes
    if_match : the entity tag the change rests on; empty when the thing must not be there yet, None when not said
    trail : what the audit log will say
    is_gone : whether the caller has left; asked by work that takes long
    """

    by: str
    if_match: str | None
    trail: AuditTrail
    is_gone: Callable[[], Awaitable[bool]]

    def audited(self, subject: str, before: Any = None, after: Any = None) -> AuditEntry:
        """Return the audit entry that a change carries in its own transaction."""
        return self.trail.carried(subject, before, after)

    def auditing(self, subject: str, before: Callable[[ControlState], Any], after: Any) -> Audit:
        """Return what makes the audit entry from the control state that a change finds."""
        self.trail.subject = subject
        return lambda state: self.trail.carried(subject, before(state), after)


@dataclass(frozen=True, slots=True)
class AdminResponse:
    """Holds what is answered: a view or other JSON value, and its entity tag."""

    value: Any
    etag: str | None = None


Handler = Callable[..., Awaitable[AdminResponse]]
H = TypeVar("H", bound=Handler)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """Describes one method on one path.

    Attributes
    ----------
    path : below ``/admin/v1``, with ``{names}`` of the parts that vary
    name : unique, as generated clients and ``suffice admin`` call it
    returns : shape of a success
    status : of a success
    query : shape of the query; None takes none
    body : shape of the body, ``bytes``, or a JSON object that is checked where it is used; None takes none
    errors : exception classes it can answer beside those that every operation can
    conditional : whether ``If-Match`` may or must be sent
    """

    method: Method
    path: str
    name: str
    summary: str
    returns: Any
    status: int = 200
    query: type[AdminShape] | None = None
    body: Any = None
    errors: tuple[type[Exception], ...] = ()
    conditional: Conditional = "no"

    @property
    def is_write(self) -> bool:
        return self.method != "GET"

    @property
    def path_parameters(self) -> list[str]:
        return re.findall(r"{(\w+)}", self.path)

    @property
    def body_kind(self) -> BodyKind:
        if self.body is None:
            return "none"
        if self.body is bytes:
            return "bytes"
        return "members" if _is_shape(self.body) else "free"

    @cached_property
    def query_schemas(self) -> dict[str, Any]:
        """The JSON Schema of each query parameter."""
        return dict(member_schemas(self.query))

    def read_query(self, given: Sequence[tuple[str, str]]) -> Any:
        """Return the query as its shape.

        Raises
        ------
        InvalidRequest
            Unknown, given twice, of the wrong form or out of range.
        """
        types = {each.encode_name: each.type for each in _fields(self.query)} if self.query else {}
        found: dict[str, Any] = {}
        for name, text in given:
            schema = self.query_schemas.get(name)
            if schema is None or name in found:
                problem = "given twice" if schema else f"unknown; known are {', '.join(self.query_schemas) or 'none'}"
                raise InvalidRequest(f"The query parameter {name[:80]!r} is {problem}.", param=name[:80])
            found[name] = _from_text(text, schema)
            # One by one, so that the first parameter that is wrong is the one blamed.
            checked(found[name], types[name], name)
        return None if self.query is None else _read_members(self.query, found, "'{name}' in the query")

    def read_body(self, given: dict[str, Any]) -> Any:
        """Return a JSON body as its shape.

        Raises
        ------
        InvalidRequest
            A member that is unknown, missing, of the wrong type or out of range.
        """
        if not _is_shape(self.body):
            return given
        known = self.body.__struct_encode_fields__
        for name in given:
            if name not in known:
                raise InvalidRequest(
                    f"The body has no field {name[:80]!r}; known are {', '.join(known) or 'none'}.", param=name[:80]
                )
        return _read_members(self.body, given, "'{name}'")

    def body_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of a JSON body, in which a member that may be absent may be null."""
        schema = schema_of(self.body)
        if _is_shape(self.body):
            for name, each in schema["properties"].items():
                if name not in schema["required"] and {"type": "null"} not in each.get("anyOf", ()):
                    schema["properties"][name] = {"anyOf": [each, {"type": "null"}]}
        return schema


def operation(
    method: Method,
    path: str,
    *,
    returns: Any,
    status: int = 200,
    errors: tuple[type[Exception], ...] = (),
    conditional: Conditional = "no",
) -> Callable[[H], H]:
    """Declare a method of an :class:`OperationGroup` as an operation; its signature and docstring say the rest.

    Raises
    ------
    TypeError
        The signature does not fit the path, or the summary or a type is missing.
    """

    def declare(handler: H) -> H:
        hints = get_type_hints(handler, include_extras=True)
        declared = Operation(
            method=method,
            path=path,
            name=handler.__name__,
            summary=" ".join((inspect.getdoc(handler) or "").split()),
            returns=returns,
            status=status,
            query=hints.get("query"),
            body=hints.get("body"),
            errors=errors,
            conditional=conditional,
        )
        _check_declaration(declared, list(inspect.signature(handler).parameters))
        handler.__dict__["operation"] = declared
        return handler

    return declare


class OperationGroup:
    """Base of the classes whose methods are operations on the same parts of the server."""

    def __init__(self, context: AdminContext) -> None:
        self._context = context

    @classmethod
    def operations(cls, config: AdminConfig) -> list[Operation]:
        """Return the group's operations in the order of their declaration; limits are those of ``config``."""
        return [
            each.__dict__["operation"] for each in vars(cls).values() if "operation" in getattr(each, "__dict__", ())
        ]


def member_schemas(shape: type[Struct] | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each member's name and the JSON Schema of its values, null for "not given" left out."""
    for name, schema in ({} if shape is None else schema_of(shape)["properties"]).items():
        yield name, given_schema(schema)


def given_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a schema says of a value that is given: the inside of "this or null"."""
    outside = {key: each for key, each in schema.items() if not (key == "default" and each is None)}
    alternatives = [each for each in schema.get("anyOf", ()) if each != {"type": "null"}]
    return outside if len(alternatives) != 1 else alternatives[0] | {k: v for k, v in outside.items() if k != "anyOf"}


def answer_schema(shape: Any) -> dict[str, Any]:
    """Return the JSON Schema of an answer: its members are always there, and later versions may have more."""
    found: dict[str, Any] = _all_required(schema_of(shape))
    return found


def _all_required(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_all_required(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _all_required(each) for key, each in schema.items() if key != "default"}
    return found | {"required": list(found["properties"])} if "properties" in found else found


def _check_declaration(declared: Operation, parameters: Sequence[str]) -> None:
    expected = ["self", "request", *declared.path_parameters]
    given = [each for each in parameters if each not in ("query", "body")]
    if given != expected:
        raise TypeError(f"{declared.name} takes {', '.join(given)}; its path gives {', '.join(expected)}.")
    for each in ("query", "body"):
        if each in parameters and getattr(declared, each) is None:
            raise TypeError(f"{declared.name} says no type for its {each}.")
    if declared.query is not None and not _is_shape(declared.query):
        raise TypeError(f"The query of {declared.name} is no AdminShape.")
    if not declared.summary:
        raise TypeError(f"{declared.name} has no summary; its docstring is missing.")


@functools.cache
def _fields(shape: type[Struct]) -> tuple[FieldInfo, ...]:
    # Remembered because msgspec resolves the annotations each time.
    return fields(shape)


def _is_shape(declared: Any) -> bool:
    return get_origin(declared) is None and isinstance(declared, type) and issubclass(declared, AdminShape)


def _read_members(shape: type[S], given: Mapping[str, Any], place: str) -> S:
    for each in _fields(shape):
        name = each.encode_name
        if each.required and given.get(name) is None:
            help_text = given_schema(schema_of(shape)["properties"][name])["description"]
            raise InvalidRequest(f"You must give {place.format(name=name)}: {help_text}", param=name)
    return checked({name: each for name, each in given.items() if each is not None}, shape, "")


def _from_text(text: str, schema: Mapping[str, Any]) -> Any:
    """Return the JSON value that a query parameter's text stands for, where it is of the schema's type."""
    kind = schema.get("type")
    if kind == "boolean" and text in ("true", "false"):
        return text == "true"
    if kind == "integer" and text.lstrip("-").isascii() and text.lstrip("-").isdecimal() and len(text) < 20:
        return int(text)
    return text
