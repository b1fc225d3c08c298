"""Checks JSON values by declared types, and words what does not fit as the API does.

A shape is declared once: a :class:`msgspec.Struct` whose fields carry their limits (:class:`msgspec.Meta`) and, where
these do not say enough, :class:`Words`. From that declaration values are checked (:func:`checked`), errors worded
(:func:`explain`) and the API described (:func:`schema_of`). A field with a default takes null for "not given".
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, cast, get_args, get_origin, overload

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import FieldInfo

from gateway.errors import InvalidRequest, shorten

T = TypeVar("T")
S = TypeVar("S", bound=Struct)


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """Says of a declared type what its limits do not; stands beside them in ``Annotated``.

    Parameters
    ----------
    kind : what is expected in place of a value of another type, "a token id"
    value : what is expected in place of a value of this type that is not permitted, "a token id from 0"; of an array,
        in place of one that is too short or too long; of a table, in place of its keys
    items, counted : what an array holds, as its limits and as what was given name it
    error : returns an error of its own for a value that does not fit, or None where these words will do
    """

    kind: str = ""
    value: str = ""
    items: str = "items"
    counted: str = ""
    error: Callable[[Any, str], InvalidRequest | None] | None = None


class ClosedShape(Struct, frozen=True, forbid_unknown_fields=True):
    """An object that refuses unknown members: a misspelt one would be ignored in silence."""

    member: ClassVar[str] = "field"

    @classmethod
    def unknown(cls, name: str, param: str) -> InvalidRequest:
        """Return the error for a member that is not declared."""
        known = ", ".join(cls.__struct_encode_fields__)
        return InvalidRequest(
            f"'{param}' has no {cls.member} {name[:80]!r}; it has {known}.", param=f"{param}.{name[:80]}"
        )


class JsonScalar:
    """Base of the types of our own that one JSON value stands for.

    ``from_json`` raises TypeError for a value of another JSON type, ValueError for one that is not permitted.
    """

    words: ClassVar[Words]
    json_schema: ClassVar[Mapping[str, Any]]

    @classmethod
    def from_json(cls, value: Any) -> Any:
        raise NotImplementedError


class Dollars(Decimal, JsonScalar):
    """Dollars, 0 or more, exact to a billionth; a decimal string, or a number, which is read as it is written."""

    words = Words(kind="an amount of dollars", value="an amount of dollars from 0 with at most 9 decimals")
    json_schema: ClassVar[Mapping[str, Any]] = {
        "anyOf": [{"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?$"}, {"type": "number", "minimum": 0}]
    }

    @classmethod
    def from_json(cls, value: Any) -> Dollars:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise TypeError
        if len(str(value)) > _MAX_AMOUNT_CHARS:
            raise ValueError
        try:
            amount = cls(str(value))
            if not amount.is_finite() or not 0 <= amount <= _MOST_USD or amount != amount.quantize(_NANO):
                raise ValueError
        except InvalidOperation:
            raise ValueError from None
        return amount


_MAX_AMOUNT_CHARS = 32
_MOST_USD = 1_000_000_000
_NANO = Decimal("0.000000001")


@overload
def checked(value: Any, declared: type[T], param: str) -> T: ...
@overload
def checked(value: Any, declared: object, param: str) -> Any: ...
def checked(value: Any, declared: Any, param: str) -> Any:
    """Return a JSON value as its declared type; ``param`` names it, and is empty for a whole body.

    Raises
    ------
    InvalidRequest
        ``param`` is the path of the part that does not fit, such as ``messages[2].content[0].type``.
    """
    try:
        return msgspec.convert(value, declared, dec_hook=read_scalar)
    except msgspec.ValidationError:
        raise explain(value, declared, param) from None


def read_scalar(scalar: Any, value: Any) -> Any:
    """Return what a value means to a type of our own; msgspec asks it of the types that it does not know."""
    return scalar.from_json(value)


def limited(shape: type[S], **types: Any) -> type[S]:
    """Return a Struct with some fields' types replaced, by narrower ones that are only known at start."""
    known = {each.name: each for each in msgspec.structs.fields(shape)}
    replaced = [
        (name, each) if known[name].required else (name, each | None, known[name].default)
        for name, each in types.items()
    ]
    namespace = {"__doc__": shape.__doc__}
    made = msgspec.defstruct(
        shape.__name__, replaced, bases=(shape,), kw_only=True, module=shape.__module__, namespace=namespace
    )
    return cast("type[S]", made)


def given_type(declared: Any) -> Any:
    """Return a type without the null that stands for "not given"."""
    return functools.reduce(operator.or_, (each for each in get_args(declared) if each is not NoneType))


def schema_of(declared: Any) -> dict[str, Any]:
    """Return the JSON Schema of what a declared type lets through."""
    (schema,), components = msgspec.json.schema_components(
        [declared], schema_hook=_scalar_schema, ref_template="{name}"
    )
    whole: dict[str, Any] = _inlined(schema, components)
    return whole


def _inlined(schema: Any, components: Mapping[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_inlined(each, components) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        schema = components[schema["$ref"]] | {key: each for key, each in schema.items() if key != "$ref"}
    # A discriminator would name components; what it says stands in the tags' own schemas.
    return {key: _inlined(each, components) for key, each in schema.items() if key != "discriminator"}


def kind_of(value: Any) -> str:
    """Return a JSON value's type, as messages name it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    for kind, name in ((str, "a string"), (int, "an integer"), (float, "a number"), (list, "an array")):
        if isinstance(value, kind):
            return name
    return "an object"


def wrong_type(param: str, expected: str, value: Any) -> InvalidRequest:
    """Return the error for a value of the wrong JSON type."""
    return InvalidRequest(
        f"Invalid type for '{param}': expected {expected}, got {kind_of(value)}.", param=param, code="invalid_type"
    )


def wrong_value(param: str, expected: str, value: Any) -> InvalidRequest:
    """Return the error for a value of the right type that is not permitted."""
    return InvalidRequest(f"Invalid value for '{param}': expected {expected}, got {shorten(repr(value))}.", param=param)


def explain(value: Any, declared: Any, param: str) -> InvalidRequest:
    """Return the error for the first part of a value that does not fit its declared type.

    Each part is tried against its own type, from the whole inwards; nothing rests on the wording of msgspec's errors.
    """
    marks: tuple[Any, ...] = ()
    if get_origin(declared) is Annotated:
        declared, *found = get_args(declared)
        marks = tuple(found)
    words = next((each for each in reversed(marks) if isinstance(each, Words)), None)
    if words is None:
        words = declared.words if _is_scalar(declared) else Words()
    if words.error is not None and (own := words.error(value, param)) is not None:
        return own
    if get_origin(declared) in (Union, UnionType):
        return _explain_union(value, declared, param, words)
    if _is_scalar(declared):
        return _explain_scalar(value, declared, param)
    if not _is_of(value, declared):
        return wrong_type(param, words.kind or _noun(declared), value)
    limits = [each for each in marks if isinstance(each, Meta)]
    return _EXPLAINERS[_plain(declared)](value, declared, param, words, limits)


def fits(value: Any, declared: Any) -> bool:
    """Whether a JSON value fits its declared type."""
    try:
        msgspec.convert(value, declared, dec_hook=read_scalar)
    except msgspec.ValidationError:
        return False
    return True


def _scalar_schema(scalar: Any) -> dict[str, Any]:
    return dict(scalar.json_schema)


def _is_scalar(declared: Any) -> bool:
    return isinstance(declared, type) and issubclass(declared, JsonScalar)


def _plain(declared: Any) -> Any:
    """Return what stands for a type in the tables below."""
    if isinstance(declared, type) and issubclass(declared, Struct):
        return Struct
    return get_origin(declared) or declared


def _noun(declared: Any) -> str:
    if get_origin(declared) is Annotated:
        declared = get_args(declared)[0]
    if get_origin(declared) in (Union, UnionType):
        return " or ".join(dict.fromkeys(_noun(each) for each in get_args(declared)))
    return declared.words.kind if _is_scalar(declared) else _KINDS[_plain(declared)][0]


def _is_of(value: Any, declared: Any) -> bool:
    """Whether a value is of a type's JSON type, whatever its limits."""
    if get_origin(declared) is Annotated:
        declared = get_args(declared)[0]
    if get_origin(declared) in (Union, UnionType):
        return any(_is_of(value, each) for each in get_args(declared))
    if get_origin(declared) is Literal:
        return kind_of(value) in {kind_of(each) for each in get_args(declared)}
    # The parser gives integers beyond 64 bits as floats: too large, not of the wrong type.
    if declared is int and isinstance(value, float):
        return abs(value) >= 2**63
    return _is_scalar(declared) or kind_of(value) in _KINDS[_plain(declared)]


def _explain_union(value: Any, declared: Any, param: str, words: Words) -> InvalidRequest:
    members = [each for each in get_args(declared) if each is not NoneType]
    if len(members) == 1:
        return explain(value, members[0], param)
    if all(_plain(each) is Struct for each in members):
        return _explain_tagged(value, members, param)
    for each in members:
        if _is_of(value, each):
            return explain(value, each, param)
    return wrong_type(param, words.kind or " or ".join(map(_noun, members)), value)


def _explain_tagged(value: Any, members: list[type[Struct]], param: str) -> InvalidRequest:
    """Explain a value that one of its members says the type of."""
    if not isinstance(value, dict):
        return wrong_type(param, "an object", value)
    shapes = {each.__struct_config__.tag: each for each in members}
    field = members[0].__struct_config__.tag_field
    assert field is not None, "msgspec takes no union of Structs without tags"
    tag, where = value.get(field), f"{param}.{field}"
    if not isinstance(tag, str):
        return wrong_type(where, "a string", tag)
    if tag in shapes:
        return explain(value, shapes[tag], param)
    return wrong_value(where, "one of " + ", ".join(map(repr, shapes)), tag)


def _explain_scalar(value: Any, declared: type[JsonScalar], param: str) -> InvalidRequest:
    try:
        declared.from_json(value)
    except TypeError:
        return wrong_type(param, declared.words.kind, value)
    except ValueError:
        pass
    return wrong_value(param, declared.words.value, value)


def _explain_struct(
    value: Mapping[str, Any], shape: type[Struct], param: str, words: Words, limits: list[Meta]
) -> InvalidRequest:
    for field in _in_order(shape):
        given = value.get(field.encode_name)
        if (given is not None or field.required) and not fits(given, field.type):
            return explain(given, field.type, f"{param}.{field.encode_name}" if param else field.encode_name)
    if issubclass(shape, ClosedShape):
        for name in value:
            if name not in shape.__struct_encode_fields__:
                return shape.unknown(name, param)
    return wrong_value(param, words.value or "another value", value)


@functools.cache
def _in_order(shape: type[Struct]) -> tuple[FieldInfo, ...]:
    """Return fields as declared, but those first that the shape wants ``checked_first``."""
    # Remembered because msgspec resolves the annotations each time, which takes most of a millisecond.
    known = {each.name: each for each in msgspec.structs.fields(shape)}
    first: tuple[str, ...] = getattr(shape, "checked_first", ())
    return tuple(known[name] for name in dict.fromkeys((*first, *known)))


def _explain_array(value: list[Any], declared: Any, param: str, words: Words, limits: list[Meta]) -> InvalidRequest:
    least, most = _limit(limits, "min_length") or 0, _limit(limits, "max_length")
    is_short, is_long = len(value) < least, most is not None and len(value) > most
    if is_short or is_long:
        expected = f"at least {least} {words.items}" if is_short else f"at most {most} {words.items}"
        return wrong_value(param, words.value or expected, f"{len(value)} {words.counted or words.items}")
    item = get_args(declared)[0]
    place = _first_misfit(value, item)
    if place is not None:
        return explain(value[place], item, f"{param}[{place}]")
    return wrong_value(param, words.value or "another value", value)


def _first_misfit(value: list[Any], item: Any) -> int | None:
    """Return the place of the first item that does not fit; None where each one does.

    By halves, each checked as a whole: one by one a million items would hold the event loop for a second.
    """
    items = list[item]
    begin, end = 0, len(value)
    if fits(value, items):
        return None
    while end - begin > 1:
        middle = (begin + end) // 2
        if fits(value[begin:middle], items):
            begin = middle
        else:
            end = middle
    return begin


def _explain_table(
    value: Mapping[str, Any], declared: Any, param: str, words: Words, limits: list[Meta]
) -> InvalidRequest:
    most = _limit(limits, "max_length")
    if most is not None and len(value) > most:
        return wrong_value(param, f"at most {most} entries", f"{len(value)} entries")
    key_type, value_type = get_args(declared)
    for key, each in value.items():
        if not fits(key, key_type):
            return wrong_value(param, words.value or "other keys", key)
        if not fits(each, value_type):
            return explain(each, value_type, f"{param}.{key}")
    return wrong_value(param, words.value or "another value", value)


def _explain_text(value: str, declared: Any, param: str, words: Words, limits: list[Meta]) -> InvalidRequest:
    if words.value:
        return wrong_value(param, words.value, value)
    least, most = _limit(limits, "min_length") or 0, _limit(limits, "max_length")
    return wrong_value(param, f"{least} to {most} characters", f"{len(value)} characters")


def _explain_number(value: float, declared: Any, param: str, words: Words, limits: list[Meta]) -> InvalidRequest:
    least, most = _limit(limits, "ge"), _limit(limits, "le")
    expected = f"an integer from {least} to {most}" if declared is int else f"a number from {least:g} to {most:g}"
    return wrong_value(param, words.value or expected, value)


def _explain_literal(value: Any, declared: Any, param: str, words: Words, limits: list[Meta]) -> InvalidRequest:
    return wrong_value(param, words.value or "one of " + ", ".join(map(repr, get_args(declared))), value)


def _limit(limits: list[Meta], name: str) -> Any:
    return next((found for each in limits if (found := getattr(each, name)) is not None), None)


# The JSON types that a declared type takes; messages name the first.
_KINDS: Mapping[Any, tuple[str, ...]] = {
    str: ("a string",),
    int: ("an integer",),
    float: ("a number", "an integer"),
    bool: ("a boolean",),
    list: ("an array",),
    tuple: ("an array",),
    dict: ("an object",),
    Struct: ("an object",),
    Literal: ("a string",),
    NoneType: ("null",),
    None: ("null",),
}
_Explainer = Callable[[Any, Any, str, Words, list[Meta]], InvalidRequest]
_EXPLAINERS: Mapping[Any, _Explainer] = {
    str: _explain_text,
    int: _explain_number,
    float: _explain_number,
    list: _explain_array,
    tuple: _explain_array,
    dict: _explain_table,
    Struct: _explain_struct,
    Literal: _explain_literal,
}
