"""Writes the answers of ``/v1/responses``: one object, or events that end in the same object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import orjson

from backends.protocol import FinishReason, TokenDelta, ToolCallDelta, Usage
from gateway.api import sse
from gateway.api.answer_encoder import AnswerChoice, AnswerEnd, ResponseHead, logprob_json
from gateway.api.request import InferenceRequest
from gateway.api.responses_decoder import ResponsesRequest

_INCOMPLETE = {FinishReason.LENGTH: "max_output_tokens", FinishReason.CONTENT_FILTER: "content_filter"}
# Kinds of items -> the prefix of their ids.
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}

Event = tuple[str, dict[str, Any]]


class OutputItem:
    """One item of an answer while it is written. ``pieces`` join to its text, arguments or input."""

    __slots__ = ("fields", "is_done", "item_id", "kind", "logprobs", "pieces", "place")

    def __init__(self, kind: str, item_id: str, place: int, **fields: Any) -> None:
        self.kind = kind
        self.item_id = item_id
        self.place = place
        self.fields = fields
        self.pieces: list[str] = []
        self.logprobs: list[dict[str, Any]] = []
        self.is_done = False

    @property
    def text(self) -> str:
        joined = "".join(self.pieces)
        return _custom_input(joined) if self.kind == "custom_tool_call" else joined

    @property
    def at(self) -> dict[str, Any]:
        """What every event of it names."""
        return {"item_id": self.item_id, "output_index": self.place}


class OutputWriter:
    """Turns the pieces of an answer into items and into the events that tell of them.

    Text and reasoning end where something else begins. Calls may be written at once, so they end with the answer.
    """

    def __init__(self, request: ResponsesRequest, response_id: str) -> None:
        self.items: list[OutputItem] = []
        self._clients = request.clients
        self._response_id = response_id
        reasoning = request.body.reasoning
        self._is_summary = reasoning is not None and reasoning.summary not in (None, "none")
        self._sealed = request.context.sealed if request.wants_seal else None
        self._open: OutputItem | None = None
        self._calls: dict[int, OutputItem] = {}

    def add(self, delta: TokenDelta) -> list[Event]:
        """Return the events of some new pieces."""
        events: list[Event] = []
        if delta.reasoning:
            item = self._text_item("reasoning", events)
            item.pieces.append(delta.reasoning)
            name, index = self._reasoning_names()
            events.append((f"response.{name}_text.delta", {**item.at, index: 0, "delta": delta.reasoning}))
        if delta.text or delta.logprobs:
            item = self._text_item("message", events)
            item.pieces.append(delta.text)
            logprobs = [logprob_json(entry) for entry in delta.logprobs]
            item.logprobs += logprobs
            fields = {**item.at, "content_index": 0, "delta": delta.text, "logprobs": logprobs}
            events.append(("response.output_text.delta", fields))
        for piece in delta.tool_calls:
            self._add_piece(piece, events)
        return events

    def end(self, reason: FinishReason) -> list[Event]:
        """Return the events that end what is open; an answer of nothing has an empty message."""
        events: list[Event] = []
        if not self.items and reason is FinishReason.STOP:
            self._text_item("message", events)
        is_cut = reason in _INCOMPLETE
        last = self.items[-1] if self.items else None
        for item in self.items:
            if not item.is_done:
                self._close(item, events, is_cut=is_cut and item is last)
        return events

    def output(self) -> list[dict[str, Any]]:
        """Return the items."""
        return [self._shown(item) for item in self.items]

    def _text_item(self, kind: str, events: list[Event]) -> OutputItem:
        if self._open is not None and self._open.kind == kind:
            return self._open
        self._close_open(events)
        item = self._open = self._begin(kind, events)
        if kind == "message":
            events.append(("response.content_part.added", {**item.at, "content_index": 0, "part": _text_part("", [])}))
        elif self._is_summary:
            part = {"type": "summary_text", "text": ""}
            events.append(("response.reasoning_summary_part.added", {**item.at, "summary_index": 0, "part": part}))
        else:
            # OpenAI's npm package takes no delta of a part that was not announced.
            part = {"type": "reasoning_text", "text": ""}
            events.append(("response.content_part.added", {**item.at, "content_index": 0, "part": part}))
        return item

    def _add_piece(self, piece: ToolCallDelta, events: list[Event]) -> None:
        if piece.name:
            self._close_open(events)
            client = self._clients.get(piece.name)
            fields: dict[str, Any] = {"call_id": piece.call_id, "name": piece.name if client is None else client.name}
            if client is not None and client.namespace is not None:
                fields["namespace"] = client.namespace
            kind = "custom_tool_call" if client is not None and client.is_custom else "function_call"
            self._calls[piece.index] = self._begin(kind, events, **fields)
        item = self._calls[piece.index]
        if not piece.arguments:
            return
        item.pieces.append(piece.arguments)
        if item.kind == "function_call":
            events.append(("response.function_call_arguments.delta", {**item.at, "delta": piece.arguments}))

    def _begin(self, kind: str, events: list[Event], **fields: Any) -> OutputItem:
        place = len(self.items)
        item = OutputItem(kind, f"{_PREFIXES[kind]}_{self._response_id}_{place}", place, status="in_progress", **fields)
        self.items.append(item)
        shown = self._shown(item) | ({"content": []} if kind == "message" else {})
        if kind == "reasoning":
            shown = {"id": item.item_id, "type": kind, "summary": [], "status": "in_progress"}
        events.append(("response.output_item.added", {"output_index": place, "item": shown}))
        return item

    def _close_open(self, events: list[Event]) -> None:
        if self._open is not None:
            self._close(self._open, events)
            self._open = None

    def _close(self, item: OutputItem, events: list[Event], *, is_cut: bool = False) -> None:
        item.is_done = True
        item.fields["status"] = "incomplete" if is_cut else "completed"
        text, at = item.text, item.at
        if item.kind == "message":
            told = {**at, "content_index": 0}
            events.append(("response.output_text.done", {**told, "text": text, "logprobs": item.logprobs}))
            events.append(("response.content_part.done", {**told, "part": _text_part(text, item.logprobs)}))
        elif item.kind == "reasoning":
            if self._sealed is not None:
                item.fields["encrypted_content"] = self._sealed(text)
            name, index = self._reasoning_names()
            events.append((f"response.{name}_text.done", {**at, index: 0, "text": text}))
            if self._is_summary:
                part = {"type": "summary_text", "text": text}
                events.append(("response.reasoning_summary_part.done", {**at, "summary_index": 0, "part": part}))
            else:
                part = {"type": "reasoning_text", "text": text}
                events.append(("response.content_part.done", {**at, "content_index": 0, "part": part}))
        elif item.kind == "function_call":
            events.append(("response.function_call_arguments.done", {**at, "arguments": text}))
        else:
            # Its input is known when the JSON around it is whole.
            if text:
                events.append(("response.custom_tool_call_input.delta", {**at, "delta": text}))
            events.append(("response.custom_tool_call_input.done", {**at, "input": text}))
        events.append(("response.output_item.done", {"output_index": item.place, "item": self._shown(item)}))

    def _reasoning_names(self) -> tuple[str, str]:
        return ("reasoning_summary", "summary_index") if self._is_summary else ("reasoning", "content_index")

    def _shown(self, item: OutputItem) -> dict[str, Any]:
        shown: dict[str, Any] = {"id": item.item_id, "type": item.kind, **item.fields}
        text = item.text
        if item.kind == "message":
            return shown | {"role": "assistant", "content": [_text_part(text, item.logprobs)]}
        if item.kind == "reasoning":
            if self._is_summary:
                return shown | {"summary": [{"type": "summary_text", "text": text}]}
            return shown | {"summary": [], "content": [{"type": "reasoning_text", "text": text}]}
        return shown | {"arguments" if item.kind == "function_call" else "input": text}


class ResponsesEncoder:
    """Encodes one response; see :class:`gateway.api.answer_encoder.AnswerEncoder`.

    Attributes
    ----------
    request : as it was decoded
    final : the response as it ends, once it has
    """

    ping: ClassVar[bytes] = sse.PING

    def __init__(self, head: ResponseHead, request: InferenceRequest) -> None:
        assert isinstance(request, ResponsesRequest), "its own decoder makes them"
        self._head = head
        self.request = request
        self.final: dict[str, Any] | None = None
        self._writer = OutputWriter(request, head.request_id)
        self._number = self._num_sent = 0

    def add(self, choice: AnswerChoice, delta: TokenDelta) -> bytes:
        frames = self._begin() + self._frames(self._writer.add(delta))
        self._num_sent = self._number
        return frames

    def end(self, end: AnswerEnd) -> bytes:
        reason = end.choices[0].finish_reason
        frames = self._begin() + self._frames(self._writer.end(reason))
        response = self.final = self._response(_status(reason), reason, end.usage, end.note)
        return frames + self._frames([(f"response.{_status(reason)}", {"response": response})])

    def whole(self, end: AnswerEnd) -> bytes:
        choice = end.choices[0]
        self._writer.add(TokenDelta(reasoning=choice.reasoning))
        self._writer.add(TokenDelta(choice.text, logprobs=tuple(choice.logprobs)))
        self._writer.add(TokenDelta(tool_calls=tuple(choice.call_pieces)))
        self._writer.end(choice.finish_reason)
        reason = choice.finish_reason
        self.final = self._response(_status(reason), reason, end.usage, end.note)
        return orjson.dumps(self.final)

    def error_event(self, error: Mapping[str, Any]) -> bytes:
        """OpenAI's SDKs raise at the first of the two events, Codex reads the second."""
        # The events of an end whose commit failed were made, and not sent.
        self._number = self._num_sent
        failed = self._response("failed") | {"store": False}
        code = error["code"] if error["code"] in ("server_error", "rate_limit_exceeded") else "server_error"
        failed["error"] = {"code": code, "message": error["message"]}
        flat = {name: error[name] for name in ("code", "message", "param")}
        events = [("error", {**flat, "error": error}), ("response.failed", {"response": failed})]
        return self._begin() + self._frames(events)

    def _begin(self) -> bytes:
        if self._number:
            return b""
        response = self._response("in_progress")
        return self._frames([(f"response.{name}", {"response": response}) for name in ("created", "in_progress")])

    def _frames(self, events: Sequence[Event]) -> bytes:
        frames = []
        for name, fields in events:
            body = orjson.dumps({"type": name, "sequence_number": self._number, **fields})
            frames.append(b"event: " + name.encode() + b"\ndata: " + body + b"\n\n")
            self._number += 1
        return b"".join(frames)

    def _response(
        self,
        status: str,
        reason: FinishReason | None = None,
        usage: Usage | None = None,
        note: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        head, given = self._head, self.request.body
        reasoning, text = given.reasoning, given.text
        cut = None if reason is None else _INCOMPLETE.get(reason)
        response: dict[str, Any] = {
            "id": f"resp_{head.request_id}",
            "object": "response",
            "created_at": head.created_s,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None if cut is None else {"reason": cut},
            "instructions": given.instructions,
            "max_output_tokens": given.max_output_tokens,
            "model": head.model,
            "output": self._writer.output() if status != "in_progress" else [],
            "parallel_tool_calls": given.parallel_tool_calls is not False,
            "previous_response_id": given.previous_response_id,
            "prompt_cache_key": given.prompt_cache_key,
            "reasoning": {
                "effort": None if reasoning is None else reasoning.effort,
                "summary": None if reasoning is None else reasoning.summary,
            },
            "safety_identifier": given.safety_identifier,
            "service_tier": "flex" if given.service_tier == "flex" else "default",
            "store": self.request.is_kept,
            "temperature": 1.0 if given.temperature is None else given.temperature,
            "text": {"format": _format(given), "verbosity": None if text is None else text.verbosity},
            "tool_choice": given.tool_choice or "auto",
            "tools": self.request.shown_tools,
            "top_logprobs": given.top_logprobs or 0,
            "top_p": 1.0 if given.top_p is None else given.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage_json(usage),
            "user": given.user,
            "metadata": given.metadata or {},
        }
        return response if note is None else response | {"suffice": note}


def _status(reason: FinishReason) -> str:
    return "incomplete" if reason in _INCOMPLETE else "completed"


def _text_part(text: str, logprobs: Sequence[Any]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _format(given: Any) -> dict[str, Any]:
    wanted = None if given.text is None else given.text.format
    if wanted is None or wanted.type != "json_schema":
        return {"type": "text" if wanted is None else wanted.type}
    return {
        "type": "json_schema",
        "name": wanted.name or "response",
        "schema": wanted.schema,
        "strict": bool(wanted.strict),
    }


def _usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _custom_input(arguments: str) -> str:
    """Return the free text of a call with the arguments ``{"input": …}``; a model that wrote only the text meant it."""
    try:
        found = orjson.loads(arguments)["input"]
    except (ValueError, KeyError, TypeError):
        return arguments
    return found if isinstance(found, str) else arguments
