"""Turns messages into one string, by the checkpoint's own Jinja template.

A template comes from a model's folder, never from a caller. It still runs in Jinja's immutable sandbox, without access
to Python's internals; the sandbox bounds what a template can reach, not how long it runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import ChatTemplateError


class _GenerationBlock(Extension):
    """``{% generation %}`` marks what training learns from; when serving, it is just its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja reads it from the class

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Any) -> Any:
        return caller()


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False, **options: Any
) -> str:
    # Jinja's own filter escapes for HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys, **options)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


class ChatTemplate:
    """Holds a compiled template.

    Parameters
    ----------
    source : Jinja text, as in ``chat_template.jinja`` or ``tokenizer_config.json``
    special_tokens : variables such as ``bos_token``

    Raises
    ------
    ChatTemplateError
        The source is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"The checkpoint's chat template is not valid Jinja: {error}") from error

    @property
    def has_thinking_switch(self) -> bool:
        """Tell whether the template reads ``enable_thinking``."""
        return "enable_thinking" in self.source

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Lay messages out as the model was trained to read them.

        Raises
        ------
        ChatTemplateError
            The template refused the messages (an unknown role, two user turns in a row, ...).
        """
        try:
            return self._template.render(
                **{
                    **self._special_tokens,
                    "tools": None,
                    "documents": None,
                    **variables,
                    "messages": messages,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
            raise ChatTemplateError(f"The model's chat template refused the messages: {error}") from error
