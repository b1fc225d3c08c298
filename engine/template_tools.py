"""Finds out by rendering small conversations what a chat template does with tools, calls and their results.

Templates agree on the OpenAI shape of tools, and on little else: some want arguments as objects and some as text, some
show calls only where ``content`` is null, some refuse two calls in a turn. Reading their source would be guessing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.chat_template import ChatTemplate
from engine.errors import ChatTemplateError

_NAME, _KEY, _VALUE, _RESULT = "probe_name", "probe_key", "probe_value", "probe_result"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Probes.",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string", "description": "A key."}}},
    },
}
_USER = {"role": "user", "content": "Hello."}
# How an object looks where a template printed it as Python does, and where it quoted text that is JSON already.
_MISPRINTS = (f"'{_KEY}'", f'\\"{_KEY}')


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """Says what a template can lay out.

    Attributes
    ----------
    tools : it shows the tools
    calls : it shows an assistant's calls and the turns that answer them
    text_arguments : it wants a call's arguments as JSON text, not as an object
    null_content : it shows calls only where the turn's content is null
    many_calls : a turn may have several
    system : a conversation may begin with a system turn
    """

    tools: bool
    calls: bool
    text_arguments: bool = False
    null_content: bool = False
    many_calls: bool = False
    system: bool = True

    @classmethod
    def of(cls, template: ChatTemplate) -> ToolSupport:
        """Return what a template can do; a few renderings of a few lines each."""
        tools = _NAME in _rendered(template, [_USER], [_TOOL])
        system = bool(_rendered(template, [{"role": "system", "content": "Help."}, _USER]))
        for text_arguments in (False, True):
            for null_content in (False, True):
                if _shows(template, 1, text_arguments, null_content):
                    many = _shows(template, 2, text_arguments, null_content)
                    return cls(tools, True, text_arguments, null_content, many, system)
        return cls(tools, False, system=system)


def _shows(template: ChatTemplate, num_calls: int, text_arguments: bool, null_content: bool) -> bool:
    """Return whether calls, and what they gave, are to be seen as they should be."""
    arguments: Any = f'{{"{_KEY}": "{_VALUE}"}}' if text_arguments else {_KEY: _VALUE}
    function = {"name": _NAME, "arguments": arguments}
    # Nine letters and digits: Mistral's templates refuse other ids.
    ids = [f"probeid0{place}" for place in range(num_calls)]
    calls = [{"id": call_id, "type": "function", "function": function} for call_id in ids]
    answers = [{"role": "tool", "tool_call_id": i, "name": _NAME, "content": _RESULT} for i in ids]
    assistant = {"role": "assistant", "content": None if null_content else "", "tool_calls": calls}
    text = _rendered(template, [_USER, assistant, *answers], [_TOOL])
    without = _rendered(template, [_USER, {"role": "assistant", "content": "Yes."}], [_TOOL])
    shown = text.count(_VALUE) == num_calls and text.count(_RESULT) == num_calls
    # The tools themselves may be shown anywhere, so what they say is not counted.
    named = text.count(_NAME) - without.count(_NAME) >= num_calls
    return shown and named and not any(each in text for each in _MISPRINTS)


def _rendered(template: ChatTemplate, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> str:
    try:
        return template.render(messages, tools=tools)
    except ChatTemplateError:
        return ""
