"""Says for one served model how tools come into its prompts, how they are constrained, and how calls are read."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from backends.errors import RequestRejected
from backends.local_engine.output_grammar import spec_of
from backends.local_engine.tool_formats.grammar_writer import GrammarWriter, literal
from backends.local_engine.tool_formats.registry import find_format
from backends.local_engine.tool_formats.tool_format import arguments_of
from backends.local_engine.tool_stream import ToolStream
from backends.protocol import GenerateRequest, Message, OutputFormat, Tool, ToolCall
from engine.grammar import GrammarSpec
from engine.stop_strings import StopAutomaton
from engine.text_stream import TextStream
from engine.tokenizer import Tokenizer

# What a model whose template shows no tools is told of them.
_SECTION = """# Tools

You may call functions. For each call write its name and arguments like this:
{example}

The functions there are:
{tools}"""
_EXAMPLE = (ToolCall("call", "NAME", '{"PARAMETER": "VALUE"}'),)
# Stands for arguments that have begun, to find out where a format writes them.
_BEGUN = '{"suffice-begun-arguments": 0}'


class ModelTools:
    """Knows the tool format of a model.

    Parameters
    ----------
    tool_format : its name, or ``auto``
    """

    def __init__(self, tokenizer: Tokenizer, tool_format: str) -> None:
        self._tokenizer = tokenizer
        self.format = find_format(tokenizer, tool_format)
        found = {marker: tokenizer.token_id(marker) for marker in self.format.markers}
        self.token_ids = {marker: token_id for marker, token_id in found.items() if token_id is not None}
        support = tokenizer.tool_support
        source = tokenizer.tool_template.source if tokenizer.tool_template is not None else ""
        # A template that shows tools in a format we do not read would teach the model what we take for text.
        is_read = tool_format != "auto" or self.format.fits(source, tokenizer.has_token)
        self.uses_template = support.tools and support.calls and is_read

    # Into the prompt

    def messages(self, given: Sequence[Message]) -> list[dict[str, Any]]:
        """Return messages as templates read them, calls and results of tools among them."""
        names = {call.call_id: call.name for message in given for call in message.tool_calls}
        text_arguments = self._tokenizer.tool_support.text_arguments
        messages = []
        for each in given:
            found: dict[str, Any] = {"role": "system" if each.role == "developer" else each.role}
            found["content"] = each.content
            name = each.name or names.get(each.tool_call_id or "")
            if name is not None:
                found["name"] = name
            if each.reasoning:
                found["reasoning_content"] = each.reasoning
            if each.tool_call_id is not None:
                found["tool_call_id"] = self.format.call_id(each.tool_call_id)
            if each.tool_calls:
                found["tool_calls"] = [self._call(call, as_text=text_arguments) for call in each.tool_calls]
                if not each.content and self._tokenizer.tool_support.null_content:
                    found["content"] = None
            messages.append(found)
        return messages

    def _call(self, call: ToolCall, *, as_text: bool) -> dict[str, Any]:
        arguments = call.arguments if as_text else arguments_of(call)
        function = {"name": call.name, "arguments": arguments}
        return {"id": self.format.call_id(call.call_id), "type": "function", "function": function}

    def lay_out(self, messages: list[dict[str, Any]], tools: list[Any]) -> tuple[list[dict[str, Any]], list[Any]]:
        """Return what the template is to show: calls in a form that it can, tools told in words where it cannot."""
        if self.uses_template:
            return (messages if self._tokenizer.tool_support.many_calls else one_call_a_turn(messages)), tools
        told = [self._told(each) for each in messages]
        joined: list[dict[str, Any]] = []
        for each in told:
            # Many templates refuse two turns of one side in a row.
            if joined and each["role"] == joined[-1]["role"] == "user":
                joined[-1] = {**joined[-1], "content": f"{joined[-1]['content']}\n{each['content']}"}
            else:
                joined.append(each)
        return (self._with_section(joined, tools) if tools else joined), []

    def _told(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["role"] == "tool":
            return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        calls = message.get("tool_calls")
        if not calls:
            return message
        made = [ToolCall(c["id"], c["function"]["name"], _text(c["function"]["arguments"])) for c in calls]
        content = "\n".join(filter(None, [message["content"], self.format.write(made)]))
        return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": content}

    def _with_section(self, messages: list[dict[str, Any]], tools: list[Any]) -> list[dict[str, Any]]:
        lines = "\n".join([json.dumps(tool["function"], ensure_ascii=False) for tool in tools])
        section = _SECTION.format(example=self.format.write(_EXAMPLE), tools=lines)
        first = messages[0] if messages else {"role": "user", "content": ""}
        if first["role"] == "system" or (first["role"] == "user" and not self._tokenizer.tool_support.system):
            before, after = (first["content"], section) if first["role"] == "system" else (section, first["content"])
            return [{**first, "content": f"{before}\n\n{after}"}, *messages[1:]]
        return [{"role": "system", "content": section}, *messages]

    def begun_ids(self, begun: Message) -> tuple[int, ...] | None:
        """Return an answer as far as it was sent, as this model would have written it up to the last character.

        Arguments of which nothing was sent begin with their bracket. None where its format does not write arguments as
        they were sent.
        """
        plain = self._tokenizer.encode_plain
        ids = plain(begun.content)
        if not begun.tool_calls:
            return tuple(ids)
        *whole, last = begun.tool_calls
        written = self.format.write([*whole, ToolCall(last.call_id, last.name, _BEGUN)])
        frame, found, _ = written.rpartition(_BEGUN)
        if not found:
            return None
        markers = "|".join(map(re.escape, self.token_ids)) or r"(?!)"
        for piece in re.split(f"({markers})", "\n" + frame if begun.content else frame):
            ids += [self.token_ids[piece]] if piece in self.token_ids else plain(piece)
        return (*ids, *plain(last.arguments or "{"))

    # Out of the answer

    def stream(self, request: GenerateRequest, text: TextStream, stop: StopAutomaton | None) -> ToolStream:
        """Return what writes an answer that may hold calls."""
        parser = self.format.parser(request.tools, self.token_ids.keys())
        return ToolStream(text, parser, {token_id: marker for marker, token_id in self.token_ids.items()}, stop)

    def grammar(self, request: GenerateRequest, *, with_schemas: bool) -> GrammarSpec:
        """Return the grammar of the answer: valid calls from the first marker on, and before it what is permitted.

        Raises
        ------
        RequestRejected
            The output format cannot stand beside tools.
        """
        choice = request.tool_choice
        required = choice.mode == "required"
        tools = [tool for tool in request.tools if not choice.names or tool.name in choice.names]
        text = None if required else _text_rule(request.output_format)
        writer = GrammarWriter(self.token_ids, required=required, text=text, with_schemas=with_schemas)
        parallel = choice.parallel and (not self.uses_template or self._tokenizer.tool_support.many_calls)
        return GrammarSpec("lark", self.format.grammar(tools, writer, parallel=parallel))


def offers_calls(request: GenerateRequest) -> bool:
    """Tell whether an answer may hold calls."""
    return bool(request.tools) and request.tool_choice.mode != "none"


def has_tools(request: GenerateRequest) -> bool:
    """Tell whether a prompt has tools, calls or results in it."""
    messages = request.messages or ()
    return offers_calls(request) or any(each.tool_calls or each.tool_call_id is not None for each in messages)


def tool_json(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return tools in OpenAI's shape, which templates read."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters or {"type": "object", "properties": {}},
            },
        }
        for tool in tools
    ]


def one_call_a_turn(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which each call is a turn of its own, its result after it."""
    found: list[dict[str, Any]] = []
    waiting: dict[str, dict[str, Any]] = {}
    for each in messages:
        calls = each.get("tool_calls") or ()
        if len(calls) > 1:
            turns = [
                {**each, "content": each["content"] if not i else "", "tool_calls": [c]} for i, c in enumerate(calls)
            ]
            waiting = {call["id"]: turn for call, turn in zip(calls, turns, strict=True)}
        elif each.get("tool_call_id") in waiting:
            found += [waiting.pop(each["tool_call_id"]), each]
        else:
            found.append(each)
    return found


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _text_rule(wanted: OutputFormat) -> str | None:
    spec = spec_of(wanted)
    if spec is None:
        return None
    if spec.kind == "json_schema":
        return f"%json {spec.text}"
    if spec.kind == "choice":
        return "(" + " | ".join([literal(each) for each in json.loads(spec.text)]) + ")"
    raise RequestRejected(
        f"A {wanted.kind} beside tools is not supported; give a JSON Schema or choices, or no tools.",
        status=400,
        param="structured_outputs",
    )
