"""Writes the answers of ``/v1/messages``: one message, or the events that join to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import orjson

from backends.protocol import FinishReason, Thought, TokenDelta, ToolCallDelta, Usage
from gateway.api.answer_encoder import AnswerChoice, AnswerEnd, ResponseHead
from gateway.api.messages_decoder import MessagesRequest
from gateway.api.request import InferenceRequest

_STOP_REASONS = {
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
    FinishReason.CONTENT_FILTER: "refusal",
}
# Kinds of blocks -> the type of their deltas, and the member that holds the piece.
_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}

Event = dict[str, Any]


class Block:
    """One content block while it is written. ``call`` is the index of its call; None for text and thinking."""

    __slots__ = ("call", "fields", "kind", "pieces")

    def __init__(self, kind: str, call: int | None, **fields: Any) -> None:
        self.kind = kind
        self.call = call
        self.fields = fields
        self.pieces: list[str] = []

    @property
    def is_whole(self) -> bool:
        """Whether something else may begin: after an object nothing of a call can follow."""
        if self.call is None:
            return True
        return "".join(self.pieces[-1:]).rstrip().endswith("}") and _parsed("".join(self.pieces)) is not None

    def shown(self) -> dict[str, Any]:
        text = "".join(self.pieces)
        if self.kind == "tool_use":
            found = _parsed(text)
            # What is no object must not run as if it had no arguments.
            return {"type": self.kind, **self.fields, "input": {"invalid_json": text} if found is None else found}
        return {"type": self.kind, **self._text(text), **self.fields}

    def opening(self) -> dict[str, Any]:
        if self.kind == "tool_use":
            return {"type": self.kind, **self.fields, "input": {}}
        return {"type": self.kind, **self._text(""), **self.fields}

    def _text(self, text: str) -> dict[str, str]:
        return {self.kind: text} if self.kind in _DELTAS else {}


class BlockWriter:
    """Turns the pieces of an answer into blocks and into the events that tell of them.

    One block is open at a time. Calls may be written at once: once something else comes while a call is not whole, all
    but that call waits for the end. So a call is parsed once, however many pieces an upstream cuts it into.
    """

    def __init__(self, *, shows_thinking: bool) -> None:
        self.blocks: list[Block] = []
        self._shows_thinking = shows_thinking
        self._open: Block | None = None
        self._begun: set[int] = set()
        self._waiting: list[tuple[str, ToolCallDelta]] = []

    def add(self, delta: TokenDelta) -> list[Event]:
        """Return the events of some new pieces."""
        events: list[Event] = []
        if delta.reasoning and self._shows_thinking:
            self._take("thinking", ToolCallDelta(0, arguments=delta.reasoning), events)
        if delta.signed and self._shows_thinking:
            self._sign(delta.signed, events)
        if delta.text:
            self._take("text", ToolCallDelta(0, arguments=delta.text), events)
        for piece in delta.tool_calls:
            self._take("tool_use", piece, events)
        return events

    def end(self) -> list[Event]:
        """Return the events that end what is open, after all that has waited."""
        events: list[Event] = []
        blocks: dict[tuple[str, int], list[ToolCallDelta]] = {}
        for kind, piece in self._waiting:
            blocks.setdefault((kind, piece.index), []).append(piece)
        self._waiting = []
        for (kind, _), pieces in blocks.items():
            self._close(events)
            for piece in pieces:
                self._take(kind, piece, events)
        self._close(events)
        return events

    def _take(self, kind: str, piece: ToolCallDelta, events: list[Event]) -> None:
        call = piece.index if kind == "tool_use" else None
        block = self._open
        if block is not None and (block.kind, block.call) == (kind, call) and not block.fields.get("signature"):
            self._write(block, piece.arguments, events)
        elif block is not None and (self._waiting or not block.is_whole):
            self._waiting.append((kind, piece))
        elif call is None or call not in self._begun:
            self._close(events)
            self._begin(kind, call, piece, events)

    def _sign(self, signed: Sequence[Thought], events: list[Event]) -> None:
        """End pieces of reasoning by what signs them; inside a call, where no model thinks, it is left."""
        for thought in signed:
            if self._waiting or (self._open is not None and not self._open.is_whole):
                return
            if thought.is_redacted:
                self._close(events)
                self._start(Block("redacted_thinking", None, data=thought.signature), events)
                continue
            if self._open is None or self._open.kind != "thinking" or self._open.fields["signature"]:
                self._take("thinking", ToolCallDelta(0), events)
            block = self._open
            assert block is not None, "it has just begun"
            block.fields["signature"] = thought.signature
            delta = {"type": "signature_delta", "signature": thought.signature}
            events.append({"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta})

    def _begin(self, kind: str, call: int | None, piece: ToolCallDelta, events: list[Event]) -> None:
        fields: dict[str, Any] = {"signature": ""} if kind == "thinking" else {}
        if call is not None:
            self._begun.add(call)
            fields = {"id": piece.call_id, "name": piece.name}
        block = Block(kind, call, **fields)
        self._start(block, events)
        self._write(block, piece.arguments, events)

    def _start(self, block: Block, events: list[Event]) -> None:
        self._open = block
        self.blocks.append(block)
        place = len(self.blocks) - 1
        events.append({"type": "content_block_start", "index": place, "content_block": block.opening()})

    def _write(self, block: Block, text: str, events: list[Event]) -> None:
        if not text:
            return
        block.pieces.append(text)
        kind, member = _DELTAS[block.kind]
        delta = {"type": kind, member: text}
        events.append({"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta})

    def _close(self, events: list[Event]) -> None:
        if self._open is not None:
            events.append({"type": "content_block_stop", "index": len(self.blocks) - 1})
            self._open = None


class MessagesEncoder:
    """Encodes one message; see :class:`gateway.api.answer_encoder.AnswerEncoder`."""

    ping: ClassVar[bytes] = b'event: ping\ndata: {"type": "ping"}\n\n'

    def __init__(self, head: ResponseHead, request: InferenceRequest) -> None:
        assert isinstance(request, MessagesRequest), "its own decoder makes them"
        self._head = head
        self._writer = BlockWriter(shows_thinking=request.shows_thinking)
        self._is_begun = False

    def add(self, choice: AnswerChoice, delta: TokenDelta) -> bytes:
        return self._begin() + _frames(self._writer.add(delta))

    def end(self, end: AnswerEnd) -> bytes:
        last = {
            "type": "message_delta",
            "delta": _ending(end),
            "usage": _usage_json(end.usage),
            "suffice": end.note,
        }
        return self._begin() + _frames([*self._writer.end(), last, {"type": "message_stop"}])

    def whole(self, end: AnswerEnd) -> bytes:
        choice = end.choices[0]
        for thought in choice.thoughts:
            self._writer.add(TokenDelta(reasoning=thought.text, signed=(thought,)))
        rest = "".join(choice.reasonings[choice.num_signed :])
        self._writer.add(TokenDelta(choice.text, reasoning=rest, tool_calls=tuple(choice.call_pieces)))
        self._writer.end()
        content = [block.shown() for block in self._writer.blocks]
        return orjson.dumps(self._message(content, end.usage) | _ending(end) | {"suffice": end.note})

    def error_event(self, error: Mapping[str, Any]) -> bytes:
        return _frames([{"type": "error", "error": error}])

    def _begin(self) -> bytes:
        if self._is_begun:
            return b""
        self._is_begun = True
        usage = Usage(prompt_tokens=self._head.num_prompt_tokens or 0)
        return _frames([{"type": "message_start", "message": self._message([], usage)}])

    def _message(self, content: Sequence[Any], usage: Usage) -> dict[str, Any]:
        return {
            "id": f"msg_{self._head.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage_json(usage),
        }


def _ending(end: AnswerEnd) -> dict[str, str | None]:
    """Return why a message ended; a stop sequence only where its tier says which one it was."""
    finished = end.choices[0].finished
    assert finished is not None, "an answer that runs has no ending"
    if finished.reason is FinishReason.STOP and finished.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": finished.stop_string}
    return {"stop_reason": _STOP_REASONS.get(finished.reason, "end_turn"), "stop_sequence": None}


def _usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": max(0, usage.prompt_tokens - usage.cached_tokens),
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }


def _parsed(arguments: str) -> dict[str, Any] | None:
    try:
        found = orjson.loads(arguments)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _frames(events: Sequence[Event]) -> bytes:
    return b"".join([b"event: %b\ndata: %b\n\n" % (each["type"].encode(), orjson.dumps(each)) for each in events])
