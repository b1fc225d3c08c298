"""Compares calls of tools as parsed arguments.

Order of parallel calls and of an object's names does not count, and 1 is 1.0. Two readings are given: *exact*, where
strings are the same; and *normalised*, where case, spaces and punctuation aside they are, as public graders of tool
calls compare them. A string that is a number stays that number.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from backends.protocol import ToolCall
from gateway.outcomes.schema_validator import parse_json

_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")
_NO_LETTER = re.compile(r"[\W_]+")
_LARGEST_EXACT = 2**53


@dataclass(frozen=True, slots=True)
class CallAgreement:
    """Says whether two answers make the same calls: in normal form, as written, and whether both make any."""

    normalised: bool
    exact: bool
    same_kind: bool


def compare_calls(one: Sequence[ToolCall], other: Sequence[ToolCall]) -> CallAgreement | None:
    """Return how two answers' calls agree, symmetric in its arguments; None where neither makes any."""
    if not one and not other:
        return None
    exact, normalised = (_counted(one, is_loose) == _counted(other, is_loose) for is_loose in (False, True))
    return CallAgreement(normalised, exact, bool(one) == bool(other))


def _counted(calls: Sequence[ToolCall], is_loose: bool) -> Counter[tuple[str, bytes]]:
    return Counter((call.name, _key(call.arguments, is_loose)) for call in calls)


def _key(arguments: str, is_loose: bool) -> bytes:
    """Return one spelling of equal arguments; what does not parse is equal to nothing but itself."""
    try:
        value = _normal(parse_json(arguments), is_loose)
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except (ValueError, TypeError, RecursionError):
        return b"\0" + arguments.encode("utf-8", "surrogatepass")


def _normal(value: Any, is_loose: bool) -> Any:
    if isinstance(value, dict):
        return {name: _normal(each, is_loose) for name, each in value.items()}
    if isinstance(value, list):
        return [_normal(each, is_loose) for each in value]
    if isinstance(value, float) and value.is_integer() and abs(value) <= _LARGEST_EXACT:
        return int(value)
    return _normal_text(value) if is_loose and isinstance(value, str) else value


def _normal_text(text: str) -> str:
    bare = text.strip()
    if _NUMBER.fullmatch(bare):
        return bare
    # Of a sign alone nothing would be left, and all signs be the same.
    return _NO_LETTER.sub("", bare).casefold() or bare
