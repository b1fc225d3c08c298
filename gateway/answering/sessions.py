"""Remembers where conversations stand: whose turn it is, and which tier's cache holds them.

Memory comes first, then Redis where one is configured, then the log. What is remembered here is trusted where it is
what the request goes on from: an answer's calls are named by what answers them, a turn of the user follows the last
one. All else may have moved on at another server. Everything ages.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Protocol

from msgspec import Struct

from gateway.api.conversation import Conversation
from gateway.store.records import RequestRecord, SessionRecord, StepRecord
from policies.sampling import DrawnCheck
from policies.turn_lock import TurnLock
from policies.types import SessionState

_MAX_REMEMBERED = 20_000

Digest = Callable[[str], str]
"""Hashes a text with this installation's own key."""


class SessionFinder(Protocol):
    """The part of the store that is needed here."""

    async def get_session(
        self, tenant: str, session_id: str, since: datetime | None = None
    ) -> SessionRecord | None: ...

    async def find_step(self, call_digest: str, since: datetime) -> StepRecord | None: ...


class SharedSteps(Protocol):
    """What servers remember together; a failure is nothing found."""

    async def get(self, key: str) -> ConversationState | None: ...

    async def put(self, states: dict[str, ConversationState]) -> None: ...


class ConversationState(Struct, frozen=True):
    """An answer as what goes on from it needs to know it.

    ``at_s`` is the wall clock's, ``turn`` and ``step`` the answer's own; the rest as in :class:`TurnLock` and
    :class:`SessionState`.
    """

    tier: int
    turn_id: str
    cached_tokens: int
    at_s: float
    turn: int | None = None
    step: int | None = None
    confidence: float | None = None
    probability: float | None = None
    drawn: DrawnCheck | None = None

    @property
    def lock(self) -> TurnLock:
        return TurnLock(self.tier, self.turn_id, self.confidence, self.probability, self.drawn)

    @property
    def session(self) -> SessionState:
        return SessionState(self.tier, self.cached_tokens)


class Standing(Struct, frozen=True):
    """Where a conversation stands: the tier that served it last, and the turn that goes on; None without."""

    session: SessionState | None = None
    lock: TurnLock | None = None


NOWHERE = Standing()


class Sessions:
    """A bounded memory before what servers share; the log itself is written with each request's row.

    Parameters
    ----------
    finder : reads the log
    digest : hashes with the installation's key
    ttl_s : what rests longer is forgotten
    is_alone : no other server answers from this log, so that what is remembered is the newest
    shared : what servers remember together
    clock : wall clock, seconds
    """

    def __init__(
        self,
        finder: SessionFinder,
        digest: Digest,
        ttl_s: float,
        *,
        is_alone: bool,
        shared: SharedSteps | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._finder = finder
        self._digest = digest
        self._ttl_s = ttl_s
        self._is_alone = is_alone
        self._shared = shared
        self._clock = clock
        self._remembered: OrderedDict[str, ConversationState] = OrderedDict()

    def conversation_digest(self, conversation: Conversation) -> str | None:
        """Return the keyed hash of a conversation, which tells nothing of it; None of a text that nobody named."""
        if conversation.keyed_digest is None and conversation.digest is not None:
            conversation.keyed_digest = self._digest(conversation.digest)[:32]
        return conversation.keyed_digest

    def call_digest(self, conversation: Conversation, call_id: str) -> str:
        """Return the keyed hash of a call within its conversation."""
        return self._digest(f"call\0{conversation.tenant}\0{conversation.digest}\0{call_id}")[:32]

    async def find(self, conversation: Conversation) -> Standing:
        """Return where a conversation stands.

        Raises
        ------
        StoreUnavailable and its kinds
        """
        shape = conversation.shape
        if conversation.is_side_request or conversation.key is None:
            return NOWHERE
        if shape.in_tool_loop and shape.last_call is not None:
            state = await self._find_step(conversation, self.call_digest(conversation, shape.last_call))
            return NOWHERE if state is None else Standing(state.session, state.lock)
        # A conversation without a name begins with its first turn.
        if conversation.name is None and shape.user_turns <= 1 and not shape.steps_in_turn:
            return NOWHERE
        state = await self._find_session(conversation)
        return NOWHERE if state is None else Standing(state.session)

    async def note(self, conversation: Conversation, record: RequestRecord, turn: TurnLock) -> None:
        """Take in a committed answer, and the turn it belongs to."""
        digest = self.conversation_digest(conversation)
        if digest is None or conversation.is_side_request or record.final_tier is None:
            return
        state = ConversationState(
            record.final_tier,
            turn.turn_id,
            record.prompt_tokens + record.completion_tokens,
            self._clock(),
            record.turn,
            record.step,
            turn.confidence,
            turn.probability,
            turn.drawn,
        )
        states = {digest: state}
        if record.call_digest is not None:
            states[record.call_digest] = state
        for key, each in states.items():
            self._keep(key, each)
        if self._shared is not None and (record.call_digest is not None or conversation.name is not None):
            await self._shared.put(states)

    async def _find_step(self, conversation: Conversation, call_digest: str) -> ConversationState | None:
        if (state := await self._recall(call_digest)) is not None:
            return state
        found = await self._finder.find_step(call_digest, self._since())
        if found is not None:
            state = ConversationState(
                found.tier,
                found.turn_id,
                found.prompt_tokens + found.completion_tokens,
                self._clock(),
                found.turn,
                found.step,
                found.confidence,
                found.probability,
                found.drawn,
            )
            self._keep(call_digest, state)
            return state
        # Somebody renamed the calls on their way: the last answer known made them, if it is the one before.
        digest = self.conversation_digest(conversation)
        last = None if digest is None else self._young(digest)
        shape = conversation.shape
        is_before = last is not None and (last.turn, last.step) == (shape.user_turns, shape.steps_in_turn - 1)
        return last if is_before else None

    async def _find_session(self, conversation: Conversation) -> ConversationState | None:
        digest = self.conversation_digest(conversation)
        assert digest is not None, "asked of what has a key"
        last = self._young(digest)
        if last is not None and (self._is_alone or last.turn == conversation.shape.user_turns - 1):
            return last
        if conversation.name is None:
            # Only what is named is kept beyond memory: what is lost is the price of a cache, not a lock.
            return last if self._shared is None else await self._shared.get(digest) or last
        found = await self._finder.get_session(conversation.tenant, conversation.name, self._since())
        if found is None:
            return None
        state = ConversationState(found.tier, "", found.cached_tokens, self._clock())
        self._keep(digest, state)
        return state

    async def _recall(self, key: str) -> ConversationState | None:
        state = self._young(key)
        if state is None and self._shared is not None:
            state = await self._shared.get(key)
            if state is not None and self._clock() - state.at_s > self._ttl_s:
                return None
        return state

    def _young(self, key: str) -> ConversationState | None:
        state = self._remembered.get(key)
        if state is not None and self._clock() - state.at_s > self._ttl_s:
            del self._remembered[key]
            return None
        return state

    def _since(self) -> datetime:
        return datetime.fromtimestamp(self._clock(), UTC) - timedelta(seconds=self._ttl_s)

    def _keep(self, key: str, state: ConversationState) -> None:
        self._remembered[key] = state
        self._remembered.move_to_end(key)
        while len(self._remembered) > _MAX_REMEMBERED:
            self._remembered.popitem(last=False)
