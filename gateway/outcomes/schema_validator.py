"""Tells whether a value satisfies a caller's JSON Schema, in bounded time and memory.

A schema and the value are both somebody else's. So a schema is measured before it is compiled: its size with every
``$ref`` written out, and that times the size of the value. What is too large, does not compile, or asks for something
outside the request is not judged at all: a verdict is given only where it is certain.

What it does not protect against: a schema that says less than its author meant. ``format`` is not asserted, and a
``pattern`` with lookaround or back references, which no engine matches in linear time, makes its schema unjudged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import jsonschema_rs
import orjson

MAX_SCHEMA_SIZE = 4_000
"""Most keys and list entries of a schema, each ``$ref`` counted as what it points to."""

MAX_WORK = 500_000
"""Most work for one verdict, in keys of a schema met by values; some 20 ms."""

# What a key takes to be compiled, in values that it could have met; a pattern is as much as so many keys.
_COMPILE_WORK = 100
_PATTERN_SIZE = 50
_PATTERNS = jsonschema_rs.RegexOptions(size_limit=65_536, dfa_size_limit=262_144)
# Nesting beyond which nothing is followed; bodies are bounded before they come here.
_MAX_DEPTH = 128


class _Unbounded(Exception):
    """The schema is too large, or its references lead nowhere."""


def satisfies(schema: Mapping[str, Any], value: Any, max_work: int = MAX_WORK) -> bool | None:
    """Return whether a parsed JSON value satisfies a schema; None where that cannot be said.

    Drafts 4 to 2020-12 by ``$schema``, else the last. Nothing is fetched.
    """
    try:
        size = _Measure(schema).size(schema)
    except _Unbounded:
        return None
    if size * (_COMPILE_WORK + value_size(value, max_work)) > max_work:
        return None
    try:
        validator = jsonschema_rs.validator_for(
            dict(schema), retriever=_refuse, validate_formats=False, pattern_options=_PATTERNS
        )
        return bool(validator.is_valid(value))
    except Exception:
        # Not a schema, or one that the library cannot take; its errors are kinds of several.
        return None


def parse_json(text: str) -> Any:
    """Return a JSON text's value.

    Raises
    ------
    ValueError
        It is none, or it holds what no common reader takes: NaN, lone surrogates, nesting beyond 1,024.
    """
    try:
        return orjson.loads(text)
    except UnicodeEncodeError as error:
        raise ValueError(str(error)) from error


def value_size(value: Any, most: int) -> int:
    """Count the values within a value, itself included; no further than one beyond ``most``."""
    left, counted = [value], 0
    while left and counted <= most:
        one = left.pop()
        counted += 1
        if isinstance(one, dict):
            left += one.values()
        elif isinstance(one, list):
            left += one
    return counted


class _Measure:
    """Measures one schema as it would be written without references; a reference to what it stands in counts once."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._left = MAX_SCHEMA_SIZE
        self._open: list[str] = []

    def size(self, schema: Any) -> int:
        """Return the size.

        Raises
        ------
        _Unbounded
            It is beyond the limit, or a reference leads outside the schema.
        """
        self._walk(schema, 0)
        return MAX_SCHEMA_SIZE - self._left

    def _walk(self, node: Any, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise _Unbounded
        if isinstance(node, list):
            self._spend(len(node))
            for each in node:
                self._walk(each, depth + 1)
        elif isinstance(node, Mapping):
            self._spend(len(node))
            for key, each in node.items():
                if key == "$ref" and isinstance(each, str):
                    self._follow(each, depth + 1)
                elif key in ("pattern", "patternProperties"):
                    self._spend(_PATTERN_SIZE * (len(each) if isinstance(each, Mapping) else 1))
                    self._walk(each, depth + 1)
                else:
                    self._walk(each, depth + 1)

    def _follow(self, reference: str, depth: int) -> None:
        if reference in self._open:
            return
        self._open.append(reference)
        self._walk(self._target(reference), depth)
        self._open.pop()

    def _target(self, reference: str) -> Any:
        """Return what a JSON pointer names. Anchors and ids are not looked up: a library might find elsewhere."""
        if not reference.startswith("#") or (len(reference) > 1 and reference[1] != "/"):
            raise _Unbounded
        node: Any = self._root
        for step in reference[2:].split("/") if len(reference) > 1 else ():
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(node, Mapping) and name in node:
                node = node[name]
            elif isinstance(node, list) and name.isdecimal() and len(name) < 6 and int(name) < len(node):
                node = node[int(name)]
            else:
                raise _Unbounded
        return node

    def _spend(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise _Unbounded


def _refuse(uri: str) -> NoReturn:
    raise LookupError(f"{uri!r} is outside the schema")
