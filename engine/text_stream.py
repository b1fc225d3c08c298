"""Writes what a reader sees of an answer as tokens arrive: reasoning apart from text, nothing after a stop string."""

from __future__ import annotations

from dataclasses import dataclass

from engine.detokenizer import Detokenizer, TokenBytes
from engine.stop_strings import StopAutomaton, StopSearch


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """Holds the ids of the tokens around reasoning."""

    open_id: int
    close_id: int


class TextStream:
    """Writes one answer.

    Reasoning begins with the opening tag (or before the first token, if the prompt holds the tag) and ends with the
    closing one, by token id, so text that merely looks like a tag is text. White space at the edges of reasoning and
    the line breaks between it and the answer belong to neither. Stop strings are looked for in the answer only. It is
    also the engine's ``StopCheck``, so a request ends with the very token that completes a stop string.

    Parameters
    ----------
    tokens : the tokenizer's bytes
    stop : compiled stop strings, if any
    stop_ids : tokens that end the answer and are not part of its text
    tags : of reasoning, if the model has them
    thinking : whether the prompt left the reasoning open
    """

    def __init__(
        self,
        tokens: TokenBytes,
        *,
        stop: StopAutomaton | None = None,
        stop_ids: frozenset[int] = frozenset(),
        tags: ThinkTags | None = None,
        thinking: bool = False,
    ) -> None:
        self._tokens = tokens
        self._search = None if stop is None else StopSearch(stop)
        self._stop_ids = stop_ids
        self._tags = tags
        self._detokenizer = Detokenizer(tokens)
        self._thinking = thinking
        self._blank = ""  # white space of the reasoning that may turn out to be its end
        self._began = False  # something other than a line break was seen in this part
        self._after_reasoning = False
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self.num_reasoning_tokens = 0

    @property
    def stopped(self) -> bool:
        return self._search is not None and self._search.stopped

    @property
    def stop_string(self) -> str | None:
        """Return the stop string that ended the answer."""
        return None if self._search is None else self._search.found

    @property
    def is_thinking(self) -> bool:
        """Tell whether the next token is part of the reasoning, unless it ends it."""
        return self._thinking

    @property
    def in_answer(self) -> bool:
        """Tell whether the last token was part of the answer, neither reasoning nor a line break after it."""
        return not self._thinking and (self._began or not self._after_reasoning)

    def is_silent(self, token_id: int) -> bool:
        """Tell whether a token has no text of its own: it ends the answer, or is a control token."""
        return token_id in self._stop_ids or token_id in self._tokens.special

    def push(self, token_id: int) -> bool:
        """Take one token; True if it completed a stop string."""
        if self.stopped:
            return True
        tags = self._tags
        if self._thinking:
            self.num_reasoning_tokens += 1
            if tags is not None and token_id == tags.close_id:
                self._switch(thinking=False)
            elif token_id not in self._stop_ids:
                self._show_reasoning(self._detokenizer.push(token_id))
        elif tags is not None and token_id == tags.open_id and not self._began:
            self.num_reasoning_tokens += 1
            self._switch(thinking=True)
        elif token_id not in self._stop_ids:
            self._show_text(self._detokenizer.push(token_id))
        return self.stopped

    def finish(self) -> None:
        """End the answer: show what was held back."""
        rest = self._detokenizer.flush()
        if self._thinking:
            self._show_reasoning(rest)
        elif not self.stopped:
            self._show_text(rest)
            if self._search is not None:
                self._text.append(self._search.flush())

    def take(self) -> tuple[str, str]:
        """Return the reasoning and text shown since the last call."""
        reasoning, text = "".join(self._reasoning), "".join(self._text)
        self._reasoning.clear()
        self._text.clear()
        return reasoning, text

    def _switch(self, *, thinking: bool) -> None:
        rest = self._detokenizer.flush()
        if self._thinking:
            self._show_reasoning(rest)
        # Anew, since reasoning and answer are two texts: the first space of each may not be part of it.
        self._detokenizer = Detokenizer(self._tokens)
        self._thinking, self._began, self._blank = thinking, False, ""
        self._after_reasoning = not thinking

    def _show_reasoning(self, text: str) -> None:
        text = self._blank + text
        if not self._began:
            text = text.lstrip()
        shown = text.rstrip()
        self._blank = text[len(shown) :]
        if shown:
            self._began = True
            self._reasoning.append(shown)

    def _show_text(self, text: str) -> None:
        if self._after_reasoning and not self._began:
            text = text.lstrip("\r\n")
        if text:
            # An opening tag after blanks still opens reasoning; after words it is a word.
            self._began = self._began or not text.isspace()
            self._text.append(text if self._search is None else self._search.push(text))
