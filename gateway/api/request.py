"""The one internal form of a request for text, whichever protocol it came in.

A codec decodes a protocol's body into an :class:`InferenceRequest` and encodes the events of its answer. Routing,
tiers, log and verification know only this form, so a new protocol is one file of decoding and one of encoding.

::

    body ─► decoder ─► InferenceRequest(prompts = Turns of Parts | text | token ids, tools, output format, preferences)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from backends.protocol import (
    FREE_CHOICE,
    MEDIA_CAPABILITIES,
    PLAIN_TEXT,
    Capability,
    Media,
    Message,
    OutputFormat,
    Priority,
    SamplingParams,
    Thought,
    Tool,
    ToolCall,
    ToolChoice,
)
from policies.types import Overrides


class TextPart(Struct, frozen=True):
    """Text of a turn, or a refusal that its author gave in place of one."""

    text: str
    is_refusal: bool = False


Shown = TextPart | Media
"""What a turn shows its reader."""


class ReasoningPart(Struct, frozen=True):
    """A model's own reasoning as a client sends it back; ``signature`` is opaque and passed on unaltered."""

    text: str
    signature: str | None = None
    is_redacted: bool = False


class ToolResultPart(Struct, frozen=True):
    """Holds what a call gave; ``call_id`` names the call it answers."""

    call_id: str
    parts: tuple[Shown, ...]
    is_error: bool = False


Part = Shown | ReasoningPart | ToolCall | ToolResultPart


class Turn(Struct, frozen=True):
    """One turn of a conversation. ``role`` is system, user, assistant or tool, whatever the protocol calls it."""

    role: str
    parts: tuple[Part, ...]
    name: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is one text and nothing else, as nearly every turn is; then there is nothing to look for."""
        return len(self.parts) == 1 and type(self.parts[0]) is TextPart

    @property
    def text(self) -> str:
        """The text parts, one a line, those of results among them."""
        parts = self.parts
        if len(parts) == 1 and type(parts[0]) is TextPart:
            return parts[0].text
        return _text(parts)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return () if self.is_plain else tuple([part for part in self.parts if isinstance(part, ToolCall)])


Prompt = tuple[Turn, ...] | str | tuple[int, ...]
"""A conversation, text to be continued, or its token ids."""


class RoutingPreferences(Struct, frozen=True):
    """Holds what a request asks of the routing: the ``suffice`` object and the ``x-suffice-*`` headers.

    ``given`` holds only what was said, for the log.
    """

    overrides: Overrides = field(default_factory=Overrides)
    policy: str | None = None
    priority: Priority = Priority.LIVE
    given: Mapping[str, Any] = field(default_factory=dict)


NO_PREFERENCES = RoutingPreferences()


class EarlierConversation(Struct, frozen=True):
    """The conversation of an answer that is gone on from: its digest, and what its client called it."""

    digest: str | None = None
    name: str | None = None


class ConversationHints(Struct, frozen=True):
    """Tells of a body's conversation: its ``prompt_cache_key``, ``user_id`` of its metadata, what it goes on from."""

    prompt_cache_key: str | None = None
    user_id: str | None = None
    earlier: EarlierConversation | None = None


NO_HINTS = ConversationHints()


class InferenceRequest(Struct, frozen=True, kw_only=True):
    """A validated request for text.

    Parameters
    ----------
    model : the body's ``model``
    prompts : what is to be answered; several only for ``/v1/completions``
    sampling : of one answer; ``seed`` is that of the first
    n : answers per prompt
    include_usage : a stream carries a usage chunk
    thinking : None leaves it to the tier
    echo : the answer repeats the prompt
    preferences : what is asked of the routing
    prediction : text that the answer may turn out to be
    tools, tool_choice : what the model may call
    output_format : what the answer's text must be
    hints : how the body calls its conversation
    """

    model: str
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    thinking: bool | None = None
    echo: bool = False
    preferences: RoutingPreferences = NO_PREFERENCES
    prediction: str | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = FREE_CHOICE
    output_format: OutputFormat = PLAIN_TEXT
    hints: ConversationHints = NO_HINTS

    @property
    def other_parts(self) -> tuple[Part, ...]:
        """All that its turns hold beside text: calls of tools, their results, media, reasoning. Mostly nothing."""
        found: list[Part] = []
        for prompt in self.prompts:
            if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Turn):
                for turn in prompt:
                    if isinstance(turn, Turn) and not turn.is_plain:
                        found += [part for part in turn.parts if not isinstance(part, TextPart)]
        return tuple(found)

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def turns(self) -> tuple[tuple[str, str], ...]:
        """(role, text) of every turn, for the router; empty when only token ids are known."""
        found: list[tuple[str, str]] = []
        for prompt in self.prompts:
            if isinstance(prompt, str):
                found.append(("user", prompt))
            elif prompt and isinstance(prompt[0], Turn):
                found += [(turn.role, turn.text) for turn in prompt if isinstance(turn, Turn)]
        return tuple(found)


def is_text(prompt: Prompt) -> bool:
    """Whether any tier can read a prompt: a conversation or text, not one tokenizer's ids."""
    return isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], Turn))


def prompt_size(prompt: Prompt) -> int:
    """Return the characters of a text or conversation, or the number of token ids."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return len(prompt)
    return sum([_size(each) for each in prompt if isinstance(each, Turn)])


def prompt_text(prompt: Prompt) -> str:
    """Return a prompt as one text: roles and texts of a conversation, the text itself, or the token ids."""
    if isinstance(prompt, str):
        return prompt
    lines: list[str] = []
    for each in prompt:
        if isinstance(each, int):
            lines.append(str(each))
            continue
        lines.append(f"{each.role}: {each.text}")
        if not each.is_plain:
            lines += [f"{each.role} calls {call.name}: {call.arguments}" for call in each.tool_calls]
    return "\n".join(lines)


def messages_of(prompt: tuple[Turn, ...]) -> tuple[Message, ...]:
    """Return a conversation as backends take it: each result of a tool is a message of its own."""
    messages: list[Message] = []
    for turn in prompt:
        if turn.is_plain:
            messages.append(Message(turn.role, turn.text, turn.name))
        else:
            messages += _messages(turn)
    return tuple(messages)


def _messages(turn: Turn) -> list[Message]:
    results = [
        Message("tool", _text(part.parts), tool_call_id=part.call_id, parts=_with_media(part.parts))
        for part in turn.parts
        if isinstance(part, ToolResultPart)
    ]
    own = tuple([part for part in turn.parts if not isinstance(part, ToolResultPart)])
    if results and not own:
        return results
    thoughts = [part for part in own if isinstance(part, ReasoningPart)]
    message = Message(
        turn.role,
        _text(own),
        turn.name,
        tool_calls=turn.tool_calls,
        reasoning="\n".join([part.text for part in thoughts if part.text]),
        parts=_with_media(own),
        thoughts=tuple([Thought(p.text, p.signature, p.is_redacted) for p in thoughts if p.signature]),
    )
    return [*results, message]


def media_in(parts: Sequence[Part]) -> set[Capability]:
    """Return what a model must be able to read for the media of some parts, and of results among them."""
    found: set[Capability] = set()
    for part in parts:
        if isinstance(part, ToolResultPart):
            found |= media_in(part.parts)
        elif isinstance(part, Media):
            found.add(MEDIA_CAPABILITIES[type(part)])
    return found


def _text(parts: Sequence[Part]) -> str:
    texts: list[str] = []
    for part in parts:
        if isinstance(part, TextPart):
            texts.append(part.text)
        elif isinstance(part, ToolResultPart):
            texts.append(_text(part.parts))
    return "\n".join(texts)


def _with_media(parts: Sequence[Part]) -> tuple[str | Media, ...]:
    """Return texts and media in their order; nothing where there is no media."""
    if not any(isinstance(part, Media) for part in parts):
        return ()
    return tuple([part.text if isinstance(part, TextPart) else part for part in parts if isinstance(part, Shown)])


def _size(turn: Turn) -> int:
    if turn.is_plain:
        return len(turn.text)
    return len(turn.text) + sum([len(call.name) + len(call.arguments) for call in turn.tool_calls])
