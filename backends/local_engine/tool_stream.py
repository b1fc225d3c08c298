"""Writes an answer that may hold tool calls: reasoning, text and pieces of calls, in their order."""

from __future__ import annotations

from collections.abc import Mapping

from backends.local_engine.tool_formats.call_parser import CallParser
from backends.protocol import TokenDelta, ToolCallDelta
from engine.stop_strings import StopAutomaton, StopSearch
from engine.text_stream import TextStream


class ToolStream:
    """Writes one answer. Stop strings are looked for in its text, never in a call or across one.

    It is also the engine's ``StopCheck``.

    Parameters
    ----------
    text : turns tokens into text; it looks for no stop strings itself
    parser : takes the calls out of that text
    markers : token ids of markers → their texts
    stop : compiled stop strings, if any
    """

    def __init__(
        self, text: TextStream, parser: CallParser, markers: Mapping[int, str], stop: StopAutomaton | None
    ) -> None:
        self._text = text
        self._parser = parser
        self._markers = markers
        self._search = None if stop is None else StopSearch(stop)
        self._out: list[TokenDelta] = []

    @property
    def stopped(self) -> bool:
        return self._search is not None and self._search.stopped

    @property
    def stop_string(self) -> str | None:
        """Return the stop string that ended the answer."""
        return None if self._search is None else self._search.found

    @property
    def has_calls(self) -> bool:
        """Tell whether a call has begun."""
        return self._parser.num_calls > 0

    @property
    def in_answer(self) -> bool:
        """Tell whether the last token was part of the answer's text."""
        return self._text.in_answer and not self._parser.in_call

    @property
    def num_reasoning_tokens(self) -> int:
        return self._text.num_reasoning_tokens

    def is_silent(self, token_id: int) -> bool:
        """Tell whether a token has no text of its own."""
        return token_id in self._markers or self._text.is_silent(token_id)

    def push(self, token_id: int) -> bool:
        """Take one token; True if it completed a stop string."""
        if self.stopped:
            return True
        if token_id in self._markers and not self._text.is_thinking:
            self._parser.marker(self._markers[token_id])
        else:
            self._text.push(token_id)
            self._pass_on()
        self._collect()
        return self.stopped

    def finish(self) -> None:
        """End the answer: show what was held back."""
        self._text.finish()
        if self.stopped:
            return
        self._pass_on()
        self._parser.finish()
        self._collect()
        self._flush_search()

    def show(self, delta: TokenDelta) -> None:
        """Let the next :meth:`take` begin with this."""
        self._out.insert(0, delta)

    def take(self) -> list[TokenDelta]:
        """Return what was made since the last call of this, in as few deltas as keep its order."""
        out, self._out = self._out, []
        return out

    def _pass_on(self) -> None:
        reasoning, text = self._text.take()
        if reasoning:
            self._add(TokenDelta(reasoning=reasoning))
        if text:
            self._parser.text(text)

    def _collect(self) -> None:
        for piece in self._parser.take():
            if self.stopped:
                return
            if isinstance(piece, ToolCallDelta):
                self._flush_search()
                self._add(TokenDelta(tool_calls=(piece,)))
            else:
                self._add(TokenDelta(piece if self._search is None else self._search.push(piece)))

    def _flush_search(self) -> None:
        if self._search is not None and not self._search.stopped:
            self._add(TokenDelta(self._search.flush()))

    def _add(self, delta: TokenDelta) -> None:
        if not (delta.text or delta.reasoning or delta.tool_calls):
            return
        last = self._out[-1] if self._out else TokenDelta()
        # One delta shows reasoning, text, calls in this order.
        if not self._out or (delta.text and last.tool_calls) or (delta.reasoning and (last.text or last.tool_calls)):
            self._out.append(delta)
        else:
            self._out[-1] = TokenDelta(
                last.text + delta.text, last.reasoning + delta.reasoning, tool_calls=last.tool_calls + delta.tool_calls
            )
