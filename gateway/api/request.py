"""The one internal form of a request for text, whichever protocol it came in.

A codec decodes a protocol's body into an :class:`InferenceRequest` and encodes the events of its answer. Routing,
tiers, log and verification know only this form, so a new protocol is one file of decoding and one of encoding.

::

    body ─► decoder ─► InferenceRequest(prompts = Turns of Parts | text | token ids, tools, output format, preferences)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct, field

from backends.protocol import Message, Priority, SamplingParams
from policies.types import Overrides


class TextPart(Struct, frozen=True):
    """Text of a turn, or a refusal that its author gave in place of one."""

    text: str
    is_refusal: bool = False


class ImagePart(Struct, frozen=True):
    """An image by URL or as a ``data:`` URL; ``detail`` is the client's wish for resolution."""

    url: str
    detail: str | None = None


class ReasoningPart(Struct, frozen=True):
    """A model's own reasoning as a client sends it back; ``signature`` is opaque and returned unaltered."""

    text: str
    signature: str | None = None


class ToolCallPart(Struct, frozen=True):
    """A call that an assistant turn made; ``arguments`` is the JSON text as the model wrote it."""

    call_id: str
    name: str
    arguments: str


class ToolResultPart(Struct, frozen=True):
    """Holds what a call gave; ``call_id`` names the call it answers."""

    call_id: str
    parts: tuple[TextPart | ImagePart, ...]
    is_error: bool = False


Part = TextPart | ImagePart | ReasoningPart | ToolCallPart | ToolResultPart


class Turn(Struct, frozen=True):
    """One turn of a conversation. ``role`` is system, user, assistant or tool, whatever the protocol calls it."""

    role: str
    parts: tuple[Part, ...]
    name: str | None = None

    @property
    def text(self) -> str:
        """The text parts, one a line."""
        if len(self.parts) == 1 and isinstance(self.parts[0], TextPart):
            return self.parts[0].text
        return "\n".join([part.text for part in self.parts if isinstance(part, TextPart)])


Prompt = tuple[Turn, ...] | str | tuple[int, ...]
"""A conversation, text to be continued, or its token ids."""


class Tool(Struct, frozen=True):
    """A function the model may call; ``parameters`` is JSON Schema, ``strict`` asks for calls that satisfy it."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False


class ToolChoice(Struct, frozen=True):
    """Whether a call is free, forbidden or required; ``names`` limits it to some tools."""

    mode: Literal["auto", "none", "required"] = "auto"
    names: tuple[str, ...] = ()
    parallel: bool = True


class OutputFormat(Struct, frozen=True):
    """Says what the answer's text must be; ``spec`` is the JSON Schema, regular expression, choices or grammar."""

    kind: Literal["text", "json_object", "json_schema", "regex", "choice", "grammar"] = "text"
    spec: Any = None
    strict: bool = False


FREE_CHOICE = ToolChoice()
PLAIN_TEXT = OutputFormat()


class RoutingPreferences(Struct, frozen=True):
    """Holds what a request asks of the routing: the ``suffice`` object and the ``x-suffice-*`` headers.

    ``given`` holds only what was said, for the log.
    """

    overrides: Overrides = field(default_factory=Overrides)
    policy: str | None = None
    priority: Priority = Priority.LIVE
    given: Mapping[str, Any] = field(default_factory=dict)


NO_PREFERENCES = RoutingPreferences()


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
    tools, tool_choice, output_format : decoders leave the defaults until an engine serves them
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
    return sum([len(each.text) for each in prompt if isinstance(each, Turn)])


def prompt_text(prompt: Prompt) -> str:
    """Return a prompt as one text: roles and texts of a conversation, the text itself, or the token ids."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join([str(each) if isinstance(each, int) else f"{each.role}: {each.text}" for each in prompt])


def messages_of(prompt: tuple[Turn, ...]) -> tuple[Message, ...]:
    """Return a conversation as backends take it today: text alone."""
    return tuple([Message(turn.role, turn.text, turn.name) for turn in prompt])
