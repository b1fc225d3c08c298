"""Makes JSON of arguments that a model wrote as bare text, by the types that their schema permits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

_KINDS = {"object": dict, "array": list, "integer": int, "number": (int, float), "boolean": bool, "null": type(None)}
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
# References and alternatives within each other, followed so far.
_MOST_STEPS = 64
_STRING = frozenset({"string"})
_ANY = frozenset({"string", *_KINDS})


class ParameterTypes:
    """Knows the types of one tool's parameters. ``schema`` is that of its arguments."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._root = schema
        properties = schema.get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}

    def of(self, name: str) -> frozenset[str]:
        """Return the types of a parameter; an unknown one is a string."""
        if name not in self._properties:
            return _STRING
        return self._types(self._properties[name])

    def schema(self, name: str) -> Any:
        """Return a parameter's schema as a document of its own."""
        shared = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        found = self._properties[name]
        return {**shared, **found} if isinstance(found, Mapping) else found

    def _types(self, schema: Any) -> frozenset[str]:
        found: set[str] = set()
        waiting, num_steps = [schema], 0
        while waiting and num_steps < _MOST_STEPS:
            node, num_steps = waiting.pop(), num_steps + 1
            if not isinstance(node, Mapping):
                return _ANY
            if "type" in node:
                found.update([node["type"]] if isinstance(node["type"], str) else node["type"])
            elif "$ref" in node:
                waiting.append(self._resolved(node["$ref"]))
            elif "enum" in node or "const" in node:
                found.update(map(_type_of, node.get("enum", [node.get("const")])))
            elif alternatives := node.get("anyOf") or node.get("oneOf"):
                waiting.extend(alternatives)
            else:
                return _ANY
        return frozenset(found) if found else _ANY

    def _resolved(self, reference: Any) -> Any:
        node: Any = self._root
        for part in str(reference).removeprefix("#/").split("/"):
            node = node.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(node, Mapping) else None
        return node


def to_argument(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value: what the text says as JSON if the types permit it, else a string."""
    if types != _STRING:
        bare = text.strip()
        bare = _PYTHON_WORDS.get(bare, bare)
        try:
            value = json.loads(bare, parse_constant=_refuse)
        except ValueError:
            value = text
        if not isinstance(value, str) and (_is_one_of(value, types) or "string" not in types):
            return bare
        if isinstance(value, str) and value is not text and "string" not in types:
            return bare
    return json.dumps(text, ensure_ascii=False)


def _is_one_of(value: Any, types: frozenset[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in types
    return any(kind in types and isinstance(value, _KINDS[kind]) for kind in _KINDS)  # type: ignore[arg-type]


def _type_of(value: Any) -> str:
    if isinstance(value, str):
        return "string"
    return "boolean" if isinstance(value, bool) else next(k for k in _KINDS if isinstance(value, _KINDS[k]))  # type: ignore[arg-type]


def _refuse(word: str) -> NoReturn:
    raise ValueError(word)
