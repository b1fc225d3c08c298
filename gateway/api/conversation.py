"""Reads whose conversation a request continues, and where in it the request stands, whichever protocol it came in.

Clients name their conversations, each in its own way, and re-send the whole history with every request. From both
follow a key, always within the tenant, and the shape: how many turns a user opened, how many steps the running turn
has, and whether the model's calls have just been answered (the tool loop).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final

import orjson
from msgspec import Struct

from gateway.api.request import InferenceRequest, Prompt, TextPart, ToolResultPart, Turn
from gateway.errors import InvalidRequest

AGENT_HEADER: Final = "x-claude-code-agent-id"
# In the order in which they count.
_NAMING_HEADERS: Final = (
    *("x-claude-code-session-id", "thread-id", "session-id", "session_id", "conversation_id"),
    *("x-session-affinity", "x-opencode-session"),
)
SESSION_HEADERS: Final = frozenset({AGENT_HEADER, *_NAMING_HEADERS})
"""Request headers by which clients name their conversations, in lower case."""

_MAX_NAME_CHARS = 512
_CHAIN = "body:previous_response_id"
_DIGEST_CHARS = 32
# User messages by which Codex tells of the project and of its surroundings; they open no turn.
_NOTES = ("# AGENTS.md instructions", "<environment_context>", "<user_instructions>")


class ConversationKey(Struct, frozen=True):
    """Names a conversation: ``source`` says where the name stood; ``name`` is None where the prefix stands for it."""

    source: str
    name: str | None = None


class TurnShape(Struct, frozen=True):
    """Says where in its conversation a request stands.

    Parameters
    ----------
    user_turns : turns that the user opened
    steps_in_turn : the model's outputs since the last of them began
    tail_results, failed_results : call ids answered after the last output, and those of them marked as errors
    last_call : the first call of the last output, which names the output
    num_calls : calls in the whole history
    """

    user_turns: int = 0
    steps_in_turn: int = 0
    tail_results: tuple[str, ...] = ()
    failed_results: tuple[str, ...] = ()
    last_call: str | None = None
    num_calls: int = 0

    @property
    def in_tool_loop(self) -> bool:
        """Whether the model that made the calls has to go on."""
        return bool(self.tail_results)


ONE_TURN = TurnShape(user_turns=1)
_BY_PREFIX = ConversationKey("prefix")


class Conversation:
    """The conversation of one request.

    Parameters
    ----------
    tenant : within whom names count
    key : None for a text or token ids that nobody named
    shape : where the request stands in it
    prompt : of the request
    is_side_request : it shares the name, not the history: a title, a count of tokens
    digest : where it is known from an earlier request

    Attributes
    ----------
    keyed_digest : ``digest`` hashed with the installation's key, once somebody did
    """

    __slots__ = ("_digest", "_prompt", "is_side_request", "key", "keyed_digest", "shape", "tenant")

    def __init__(
        self,
        tenant: str = "",
        key: ConversationKey | None = None,
        shape: TurnShape = ONE_TURN,
        prompt: Prompt = (),
        *,
        is_side_request: bool = False,
        digest: str | None = None,
    ) -> None:
        self.tenant = tenant
        self.key = key
        self.shape = shape
        self.is_side_request = is_side_request
        self.keyed_digest: str | None = None
        self._prompt = prompt
        self._digest = digest

    @property
    def name(self) -> str | None:
        """What its client calls it."""
        return None if self.key is None else self.key.name

    @property
    def digest(self) -> str | None:
        """Hexadecimal digits that are equal for requests of one conversation of one tenant, and for no others.

        Not keyed: whoever shows or keeps it hashes it again with a key.
        """
        if self._digest is None and self.key is not None:
            kind, text = ("name", self.key.name) if self.key.name is not None else ("prefix", prefix_text(self._prompt))
            content = f"{kind}\0{self.tenant}\0{text}".encode("utf-8", "surrogatepass")
            self._digest = hashlib.blake2b(content, digest_size=_DIGEST_CHARS // 2).hexdigest()
        return self._digest


def read_conversation(request: InferenceRequest, headers: Mapping[str, str], tenant: str) -> Conversation:
    """Return whose conversation a request continues.

    Parameters
    ----------
    headers : those of :data:`SESSION_HEADERS` that came with it
    """
    prompt = request.prompts[0]
    turns = turns_of(prompt)
    shape = read_shape(turns) if turns else ONE_TURN
    key = find_key(request, headers, has_turns=bool(turns))
    is_session = key is not None and key.source.startswith(("header:", "body:metadata"))
    # Agents offer their tools in every step; without any, and without a history, it is no step of theirs.
    is_side = is_session and not request.tools and shape.user_turns <= 1 and not shape.steps_in_turn
    earlier = request.hints.earlier
    # By name it follows from the name; without one the prompt may begin otherwise now: with other instructions.
    digest = earlier.digest if earlier is not None and key is not None and key.source == _CHAIN else None
    return Conversation(tenant, key, shape, prompt, is_side_request=is_side, digest=digest)


def find_key(request: InferenceRequest, headers: Mapping[str, str], *, has_turns: bool) -> ConversationKey | None:
    """Return the first name that counts: our own field, session headers, the body's names, what it goes on from.

    Without any the prefix stands for it.
    """
    own = request.preferences.overrides.session_id
    if own is not None:
        return ConversationKey("suffice.session_id", own)
    hints = request.hints
    agent = headers.get(AGENT_HEADER)
    for header in _NAMING_HEADERS if headers else ():
        if name := headers.get(header):
            if agent and header == _NAMING_HEADERS[0]:
                return ConversationKey(f"header:{header}+{AGENT_HEADER}", f"{name}/{agent}")
            return ConversationKey(f"header:{header}", name)
    if hints.prompt_cache_key:
        return ConversationKey("body:prompt_cache_key", hints.prompt_cache_key)
    if hints.user_id and (session := session_of(hints.user_id)):
        return ConversationKey("body:metadata.user_id", f"{session}/{agent}" if agent else session)
    if hints.earlier is not None:
        return ConversationKey(_CHAIN, hints.earlier.name)
    return _BY_PREFIX if has_turns else None


def session_of(user_id: str) -> str | None:
    """Return the session that Claude Code writes into ``metadata.user_id``: JSON, or ``…_session_ID``."""
    if len(user_id) > 4 * _MAX_NAME_CHARS:
        return None
    if user_id.startswith("{"):
        try:
            said = orjson.loads(user_id)
        except ValueError:
            return None
        session = said.get("session_id") if isinstance(said, dict) else None
    else:
        session = user_id.rpartition("_session_")[2] if "_session_" in user_id else None
    return session if isinstance(session, str) and 0 < len(session) <= _MAX_NAME_CHARS else None


def turns_of(prompt: Prompt) -> tuple[Turn, ...]:
    """Return the turns of a conversation; none of a text or of token ids."""
    if isinstance(prompt, str) or not prompt or not isinstance(prompt[0], Turn):
        return ()
    return prompt


def prefix_text(prompt: Prompt) -> str:
    """Return what no later request changes: the leading instructions and all that the user said before any output."""
    texts: list[str] = []
    for turn in turns_of(prompt):
        if turn.role not in ("system", "user"):
            break
        if turn.role == "system" and texts and texts[-1].startswith("user"):
            continue
        texts.append(f"{turn.role}\0{turn.text}")
    return "\0".join(texts)


def read_shape(turns: Sequence[Turn]) -> TurnShape:
    """Return where a conversation stands. What counts are its shapes; the last role alone says little."""
    if len(turns) == 1 and turns[0].role == "user" and turns[0].is_plain and not _is_note(turns[0]):
        # Most conversations begin and end so.
        return ONE_TURN
    user_turns = steps = num_calls = 0
    results: list[ToolResultPart] = []
    last_call: str | None = None
    last = ""  # what stood last: user, output, result
    for turn in turns:
        role = turn.role
        if role == "system":
            continue
        if role == "assistant":
            if last != "output":
                steps, last, last_call, results = steps + 1, "output", None, []
            if (calls := turn.tool_calls) and last_call is None:
                last_call = calls[0].call_id
            num_calls += len(calls)
        elif found := _results(turn):
            results += found
            last = "result"
        elif role == "user" and last in ("", "output") and not _is_note(turn):
            user_turns, steps, last = user_turns + 1, 0, "user"
    if not results:
        return TurnShape(user_turns, steps, last_call=last_call, num_calls=num_calls)
    return TurnShape(
        user_turns,
        steps,
        tuple([each.call_id for each in results]),
        tuple([each.call_id for each in results if each.is_error]),
        last_call,
        num_calls,
    )


def _results(turn: Turn) -> list[ToolResultPart]:
    if turn.is_plain:
        return []
    return [part for part in turn.parts if isinstance(part, ToolResultPart)]


def _is_note(turn: Turn) -> bool:
    if turn.is_plain:
        return turn.text.startswith(_NOTES)
    return all(isinstance(part, TextPart) and part.text.startswith(_NOTES) for part in turn.parts)


def check_results(turns: Sequence[Turn], param: str) -> None:
    """Hold results of tools against the calls before them: each answers a call, once, and none is missing.

    Calls that the conversation ends with are not answered yet; no model could go on from there either.

    Raises
    ------
    InvalidRequest
        A result without its call, a second one, two calls with one id, or a call without its result.
    """
    open_calls: dict[str, None] = {}
    for place, turn in enumerate(turns):
        where = f"{param}[{place}]"
        results = [part for part in turn.parts if isinstance(part, ToolResultPart)]
        for result in results:
            if result.call_id not in open_calls:
                raise InvalidRequest(
                    f"'{where}' is the result of {result.call_id!r}, which no call before it waits for.", param=where
                )
            del open_calls[result.call_id]
        if open_calls and not results:
            raise _missing(open_calls, where)
        calls = turn.tool_calls
        if calls and open_calls:
            raise _missing(open_calls, where)
        for call in calls:
            if call.call_id in open_calls:
                raise InvalidRequest(f"'{where}' has two calls with the id {call.call_id!r}.", param=where)
            open_calls[call.call_id] = None
    if open_calls:
        raise _missing(open_calls, param)


def _missing(open_calls: dict[str, None], where: str) -> InvalidRequest:
    names = ", ".join(map(repr, open_calls))
    return InvalidRequest(f"A result is missing for each of these calls: {names}.", param=where)
