"""Writes the Lark grammar, as llguidance reads it, of an answer that may hold tool calls.

::

    start: TEXT | calls          auto; nothing but calls where they are required
    calls: as the format says    from the first marker on nothing but valid calls
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from backends.protocol import Tool
from engine.grammar import JSON_BLANKS

_ANY_TEXT = r"/(.|\n)*/"
_REGEX_SIGNS = frozenset("\\.+*?()|[]{}^$/")
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_ARGUMENTS = {"type": "object"}
# A schema's own options may not loosen what is enforced.
_BLANKS = {"whitespace_pattern": JSON_BLANKS}
# What tells a model something, and constrains nothing.
_NOTES = frozenset({"description", "title", "examples", "default", "deprecated", "$schema", "$comment", "x-guidance"})
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_VALUES = frozenset({"enum", "const", "required"})


class GrammarWriter:
    """Collects rules.

    Parameters
    ----------
    token_ids : of the markers that are tokens of the vocabulary
    required : whether the answer is calls and nothing else
    text : the rule of an answer without calls; None is any text
    with_schemas : whether arguments satisfy their schema; otherwise only those of strict tools do
    """

    def __init__(
        self,
        token_ids: Mapping[str, int],
        *,
        required: bool = False,
        text: str | None = None,
        with_schemas: bool = True,
    ) -> None:
        self._token_ids = token_ids
        self._required = required
        self._text = text
        self._with_schemas = with_schemas
        self._rules: list[str] = []

    def new(self, body: str, *, lazy: bool = False) -> str:
        """Add a rule and return its name; one that is lazy ends as soon as it can."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def has_token(self, marker: str) -> bool:
        """Tell whether a marker is a token of the vocabulary."""
        return marker in self._token_ids

    def marker(self, marker: str) -> str:
        """Return a marker: the token, or the text where there is none."""
        return f"<[{self._token_ids[marker]}]>" if marker in self._token_ids else literal(marker)

    def is_checked(self, tool: Tool) -> bool:
        """Tell whether a tool's arguments are held to its schema."""
        return self._with_schemas or tool.strict

    def arguments(self, tool: Tool) -> str:
        """Return what a tool's arguments are."""
        return self.json(parameters_of(tool) if self.is_checked(tool) else _ANY_ARGUMENTS, strict=tool.strict)

    def json(self, schema: Any, *, strict: bool) -> str:
        """Return JSON of a schema; unless strict, what of it cannot be enforced is left out."""
        options = {"x-guidance": {"lenient": not strict, "coerce_one_of": not strict, **_BLANKS}}
        bare = without_notes(schema)
        return "%json " + json.dumps({**bare, **options} if isinstance(bare, dict) else bare, ensure_ascii=False)

    def json_call(self, tool: Tool, key: str) -> str:
        """Return a new rule: a call as a JSON object, its name first."""
        head = literal(f'{{"name": "{tool.name}", "{key}": ')
        return self.new(f'{head} {self.arguments(tool)} "}}"')

    def answer(self, marker: str, calls: str, *, bare: str = "") -> str:
        """Return the grammar.

        Parameters
        ----------
        marker : stands before the first call
        calls : what follows it
        bare : regular expression of how a text begins that is a call without any marker; then calls need none
        """
        marked = f"{self.marker(marker)} {calls}"
        if self._required:
            start = calls if bare else marked
        elif self._text is not None:
            start = f"{self._text} | {marked}" + (f" | {calls}" if bare else "")
        elif self.has_token(marker):
            # Text cannot hold a token, so the marker ends it.
            start = f"TEXT ({marked})?" + (f" | {calls}" if bare else "")
        elif bare:
            start = f"TEXT | {calls}"
        else:
            head = self.new(f"/(.|\\n)*{regex(marker)}/", lazy=True)
            start = f"TEXT | {head} {calls}"
        text = f"{_ANY_TEXT} & ~/{bare}(.|\\n)*/" if bare else _ANY_TEXT
        return "\n".join(["%llguidance {}", f"start: {start}", f"TEXT: {text}", *self._rules]) + "\n"


def parameters_of(tool: Tool) -> Mapping[str, Any]:
    """Return the JSON Schema of a tool's arguments, which are an object always."""
    return {**tool.parameters, "type": "object"} if tool.parameters else _NO_ARGUMENTS


def without_notes(schema: Any) -> Any:
    """Return a schema without what constrains nothing: grammars are bounded by their size."""
    if isinstance(schema, list):
        return [without_notes(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {}
    for key, value in schema.items():
        if key in _NAMED_SCHEMAS and isinstance(value, Mapping):
            found[key] = {name: without_notes(each) for name, each in value.items()}
        elif key not in _NOTES:
            found[key] = value if key in _VALUES else without_notes(value)
    return found


def literal(text: str) -> str:
    """Return text as a grammar writes it."""
    return json.dumps(text, ensure_ascii=False)


def regex(text: str) -> str:
    """Return the regular expression, between slashes, of one text."""
    return "".join(f"\\{each}" if each in _REGEX_SIGNS else each for each in text).replace("\n", "\\n")
